"""Products of tensors, however they are spelled, as einsum terms: each operand with a letter for every dimension.

`einsum`, `matmul` (with broadcast batch dimensions), `bmm`, `mm`, `linear`. A sum of one value over a dimension is a
product of one term.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape
from disagmoe_compile.passes.program import Dim

Letter = Hashable


@dataclass(frozen=True, slots=True)
class Term:
    node: fx.Node
    letters: tuple[Letter, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """`result[letters]` = sum over all other letters of the product of the terms."""

    terms: tuple[Term, ...]
    letters: tuple[Letter, ...]

    def size_of(self, letter: Letter) -> Dim:
        """The size of a letter; a term in which it has size one is broadcast."""
        sizes = [
            shape(term.node)[term.letters.index(letter)] for term in self.terms if letter in term.letters
        ]
        return next((size for size in sizes if size != 1), 1)

    @property
    def summed(self) -> tuple[Letter, ...]:
        """Letters that the result does not have, in order of appearance."""
        found = [letter for term in self.terms for letter in term.letters if letter not in self.letters]
        return tuple(dict.fromkeys(found))


def read_product(node: fx.Node) -> Product | None:
    """The product that `node` computes, or None."""
    if is_call(node, "einsum"):
        return _einsum(node)
    if is_call(node, "matmul", "bmm", "mm"):
        left, right = node.args[0], argument(node, 1, "other", argument(node, 1, "mat2"))
        return _matmul(left, right) if is_tensor(left) and is_tensor(right) else None
    if is_call(node, "linear") and argument(node, 2, "bias") is None:
        rows, weight = node.args[0], argument(node, 1, "weight")
        if is_tensor(rows) and is_tensor(weight) and rank_of(weight) == 2:
            lead = tuple(range((rank_of(rows) or 0) - 1))
            return Product((Term(rows, (*lead, "in")), Term(weight, ("out", "in"))), (*lead, "out"))
    return None


def _einsum(node: fx.Node) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or not all(map(is_tensor, operands)):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != len(operands) or any(len(set(name)) != len(name) for name in names):
        return None  # a repeated letter takes a diagonal
    if not arrow:
        text = "".join(names)
        output = "".join(sorted(letter for letter in set(text) if text.count(letter) == 1))
    terms = tuple(Term(operand, tuple(name)) for operand, name in zip(operands, names, strict=True))
    return Product(terms, tuple(output))


def _matmul(left: fx.Node, right: fx.Node) -> Product | None:
    ranks = rank_of(left) or 0, rank_of(right) or 0
    if min(ranks) < 2:
        return None
    batch = tuple(range(max(ranks) - 2))
    first = (*batch[len(batch) - (ranks[0] - 2) :], "row", "in")
    second = (*batch[len(batch) - (ranks[1] - 2) :], "in", "column")
    return Product((Term(left, first), Term(right, second)), (*batch, "row", "column"))
