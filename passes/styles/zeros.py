"""Routing scores [T, E] that are zero by structure: outside a top-k's ids, whatever the numbers are.

    zeros.scatter(1, ids, weights)            full(-inf).scatter(1, ids, logits).softmax(-1)
    (one_hot(ids, E) * weights[..., None]).sum(1)               probabilities * one_hot(ids, E).sum(1)
    where(mask, probabilities, 0)             logits.masked_fill(~mask, -inf).softmax(-1)

Outside the ids such a tensor has one known value, its background; operations on it are followed by computing what they
make of that value. Numbers that merely happen to be small, or a threshold, have no such value.

Legend: T tokens, k experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape, target_name
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.ids import are_distinct
from disagmoe_compile.passes.styles.products import read_product

_UNARY = frozenset({
    "to", "float", "half", "bfloat16", "double", "type", "bool", "int", "long", "contiguous", "clone", "detach",
    "relu", "sigmoid", "exp", "tanh", "abs", "neg", "square", "sqrt", "logical_not", "invert", "bitwise_not", "not_",
    "eq", "ne", "gt", "ge", "lt", "le", "sub", "rsub", "add", "mul", "div", "truediv", "nan_to_num", "clamp", "clamp_min",
    "clamp_max",
})  # fmt: skip
_SUMS = ("sum", "any", "amax")


@dataclass(frozen=True, slots=True)
class Background:
    """Outside the columns `ids` [T, k] (or [T]), every score is `value`."""

    ids: fx.Node
    value: torch.Tensor


def routed_ids(scores: fx.Node) -> fx.Node:
    """The ids outside of which scores [..., E] are zero by structure. Raises NoMatch."""
    found = background(scores, storages(scores.graph).writers)
    if found.value != 0:
        raise NoMatch(scores, "scores outside the top-k are not exactly zero")
    if rank_of(found.ids) == rank_of(scores) and shape(found.ids)[-1] != 1 and not are_distinct(found.ids):
        raise NoMatch(found.ids, "a token may have the same expert twice: its ids are not those of a top-k")
    return found.ids


def is_zero(found: object) -> bool:
    """Whether it is the number, or a tensor made of zeros that nobody writes to."""
    if not isinstance(found, fx.Node):
        return isinstance(found, int | float) and found == 0
    try:
        return _constant(found, storages(found.graph).writers) == 0
    except NoMatch:
        return False


def background(node: fx.Node, written: Mapping[fx.Node, fx.Node]) -> Background:
    """Raises NoMatch at the operation after which values outside the ids are not known. `written`: as `Storages.writers`."""
    name = target_name(node)
    if node in written:
        raise NoMatch(
            written[node], "it writes in place to the scores, which may not be zero outside the top-k then"
        )
    if node.op in ("call_function", "call_method"):
        if name in ("scatter", "scatter_add") and argument(node, 1, "dim") in (-1, (rank_of(node) or 0) - 1):
            return Background(argument(node, 2, "index"), torch.tensor(_constant(node.args[0], written)))  # type: ignore[arg-type]
        if name == "one_hot":
            return Background(node.args[0], torch.tensor(0))  # type: ignore[arg-type]
        if name in _SUMS and _is_over_choices(node):
            return _zero(node, background(node.args[0], written))  # type: ignore[arg-type]
        if name in ("softmax",) and argument(node, 1, "dim") in (-1, (rank_of(node) or 0) - 1):
            before = background(node.args[0], written)  # type: ignore[arg-type]
            if before.value != float("-inf"):
                raise NoMatch(node, "scores outside the top-k are not exactly zero")
            return Background(before.ids, torch.tensor(0.0))
        if name == "masked_fill":
            return _where(node, node.args[1], node.args[2], node.args[0], written)
        if name == "where" and len(node.args) == 3:
            mask, chosen, other = node.args
            return _where(node, mask, chosen, other, written)
        tensors = [source for source in node.all_input_nodes if is_tensor(source)]
        if name in _UNARY and len(tensors) == 1:
            return _computed(node, background(tensors[0], written))
        if name == "type_as":
            return background(tensors[0], written)
        if name in ("mul", "logical_and", "and_"):
            return _any_zero(node, tensors, written)
        if name in ("div", "truediv") and _is_per_token(node, node.args[1]):
            return _zero(node, background(node.args[0], written))  # type: ignore[arg-type]
        product = read_product(node)
        if product is not None:
            aligned = [
                term.node
                for term in product.terms
                if tuple(letter for letter in term.letters if letter in product.letters) == product.letters
            ]
            return _any_zero(node, aligned, written)
    raise NoMatch(node, "scores are not zero by structure outside a top-k")


def _any_zero(node: fx.Node, factors: list[fx.Node], written: Mapping[fx.Node, fx.Node]) -> Background:
    """A product is zero where one factor is."""
    reason: NoMatch | None = None
    for factor in factors:
        if shape(factor)[-1] != shape(node)[-1]:
            continue
        try:
            return _zero(node, background(factor, written))
        except NoMatch as stopped:
            reason = reason or stopped
    raise reason or NoMatch(node, "scores are not zero by structure outside a top-k")


def _zero(node: fx.Node, found: Background) -> Background:
    if found.value != 0:
        raise NoMatch(node, "scores outside the top-k are not exactly zero")
    return Background(found.ids, torch.zeros_like(found.value))


def _where(
    node: fx.Node, mask: object, chosen: object, other: object, written: Mapping[fx.Node, fx.Node]
) -> Background:
    if not isinstance(mask, fx.Node):
        raise NoMatch(node, "scores are not zero by structure outside a top-k")
    found = background(mask, written)
    outside = chosen if bool(found.value) else other
    if isinstance(outside, int | float):
        return Background(found.ids, torch.tensor(outside))
    assert isinstance(outside, fx.Node)
    try:
        return Background(found.ids, torch.tensor(_constant(outside, written)))
    except NoMatch:
        return background(outside, written)


def _computed(node: fx.Node, found: Background) -> Background:
    """One operation on the background value. Numbers alone are its other operands."""

    def replaced(source: fx.Node) -> torch.Tensor:
        if not is_tensor(source):
            raise NoMatch(node, "a size takes part in the scores")
        return found.value

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), replaced)
    if node.op == "call_method":
        return Background(found.ids, getattr(args[0], str(node.target))(*args[1:], **kwargs))
    return Background(found.ids, torch.as_tensor(node.target(*args, **kwargs)))  # type: ignore[operator]


def _is_over_choices(node: fx.Node) -> bool:
    """Whether `node` reduces [..., k, E] to [..., E]."""
    rank = rank_of(node.args[0]) or 0  # type: ignore[arg-type]
    dims = argument(node, 1, "dim")
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    return (
        len(listed) == 1
        and isinstance(listed[0], int)
        and listed[0] % rank == rank - 2
        and rank_of(node) == rank - 1
    )


def _is_per_token(node: fx.Node, divisor: object) -> bool:
    return (
        isinstance(divisor, fx.Node)
        and is_tensor(divisor)
        and rank_of(divisor) == rank_of(node)
        and shape(divisor)[-1] == 1
    )


def _constant(node: fx.Node, written: Mapping[fx.Node, fx.Node]) -> float:
    if node in written:
        raise NoMatch(written[node], "it writes in place to the constant that scores are scattered into")
    if is_call(node, "zeros_like", "zeros", "new_zeros"):
        return 0.0
    if is_call(node, "full_like", "full", "new_full"):
        position = 1 if is_call(node, "full_like") or node.op == "call_function" else 2
        fill = argument(node, position, "fill_value")
        if isinstance(fill, int | float):
            return float(fill)
    raise NoMatch(node, "scores are not scattered into a constant")
