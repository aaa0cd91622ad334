"""Reads a scalar loss as a weighted sum of terms that micro-batches can share out:

    loss = sum over terms of  coefficient * numerator / denominator

Numerators add up over micro-batches and ranks; denominators depend on the whole batch's inputs alone, so
they are known before the first micro-batch runs and its backward already has the right scale. Cross entropy
with reduction "mean" is the sum of the token losses over the number of labels that are not `ignore_index`;
`mean()` of per-token values is their sum over their number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.metadata import (
    argument,
    describe,
    emit,
    free_symbols,
    is_call,
    is_tensor,
    rank_of,
    shape,
    value,
)

_KEEPS_VALUE = (
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "clone",
    "contiguous",
    "view",
    "reshape",
    "squeeze",
    "type",
)
_CLASSIFYING = ("cross_entropy", "nll_loss")
_ELEMENTWISE = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
Factor: TypeAlias = fx.Node | int | sympy.Expr | float


class NotLinear(Exception):
    """The loss is not such a sum: which node stopped the reading, and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{describe(node)}: {reason}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Term:
    """`denominators` multiply: nodes of input-only values, sizes by expression, numbers."""

    numerator: fx.Node
    denominators: tuple[Factor, ...] = ()
    coefficient: float = 1.0


@dataclass(frozen=True, slots=True)
class LossReader:
    """`computed(node)`: the node depends on more than the model's inputs. `batch`: the batch symbol, None
    where there is one sample.

    `opaque`: how to take a term that no rule reads ("mean" or "sum" over samples), or None to raise
    NotLinear.
    """

    graph: fx.Graph
    computed: Callable[[fx.Node], bool]
    batch: sympy.Symbol | None
    opaque: str | None = None

    def terms(self, node: fx.Node) -> list[Term]:
        """Raises NotLinear."""
        try:
            return self._terms(node)
        except NotLinear:
            if self.batch is None:
                return [Term(node)]
            if self.opaque is None:
                raise
            return [self._per_sample(node)]

    def _terms(self, node: fx.Node) -> list[Term]:
        if is_call(node, *_KEEPS_VALUE) and rank_of(node.args[0]) == 0:  # type: ignore[arg-type]
            return self.terms(node.args[0])  # type: ignore[arg-type]
        if is_call(node, "add", "sub"):
            return self._sum(node)
        if is_call(node, "neg"):
            return [_scaled(term, -1.0) for term in self.terms(node.args[0])]  # type: ignore[arg-type]
        if is_call(node, "mul", "multiply"):
            return self._product(node)
        if is_call(node, "div", "truediv", "true_divide", "divide"):
            return self._quotient(node)
        if is_call(node, *_CLASSIFYING):
            return [self._classification(node)]
        if is_call(node, *_ELEMENTWISE):
            return [self._elementwise(node)]
        if is_call(node, "mean", "sum"):
            return self._reduction(node)
        if node.op == "placeholder":
            raise NotLinear(
                node, "an earlier part of the model computes this scalar (a router's auxiliary loss?)"
            )
        raise NotLinear(node, "no rule shares this operation out over micro-batches")

    def _per_sample(self, node: fx.Node) -> Term:
        """A term taken on the user's word: each micro-batch's value counts by its samples ("mean") or as it
        is ("sum")."""
        assert self.batch is not None, "with one sample there is nothing to share out"
        if self.opaque == "sum":
            return Term(node)
        samples = self._batch_size_node(node)
        with self.graph.inserting_after(node):
            weighted = self.graph.call_function(operator.mul, (node, samples))
        weighted.meta = {**node.meta}
        return Term(weighted, (self.batch,))

    def _batch_size_node(self, before: fx.Node) -> fx.Node:
        for node in self.graph.nodes:
            if is_tensor(node) and shape(node) and shape(node)[0] == self.batch:
                with self.graph.inserting_before(before):
                    return emit(self.graph, "size", (node, 0))
        raise NotLinear(before, "no value of this part has the batch as its first dimension")

    def _sum(self, node: fx.Node) -> list[Term]:
        if argument(node, 2, "alpha", 1) != 1:
            raise NotLinear(node, "a sum with alpha")
        found: list[Term] = []
        for position, part in enumerate(node.args[:2]):
            sign = -1.0 if position == 1 and is_call(node, "sub") else 1.0
            if isinstance(part, fx.Node) and self.computed(part):
                if rank_of(part) != 0:
                    raise NotLinear(node, "its summands are not scalars")
                found += [_scaled(term, sign) for term in self.terms(part)]
            elif part != 0:
                raise NotLinear(node, "it adds a value that no micro-batch computes")
        return found

    def _product(self, node: fx.Node) -> list[Term]:
        for part, factor in (node.args[:2], node.args[1::-1]):
            if isinstance(part, fx.Node) and self.computed(part) and rank_of(part) == 0:
                if isinstance(factor, int | float):
                    return [_scaled(term, float(factor)) for term in self.terms(part)]
                if isinstance(factor, fx.Node) and not self.computed(factor) and _is_scalar(factor):
                    with self.graph.inserting_after(factor):
                        inverse = self.graph.call_function(operator.truediv, (1.0, factor))
                    return [_divided(term, inverse) for term in self.terms(part)]
        raise NotLinear(node, "a product of two values that micro-batches compute")

    def _quotient(self, node: fx.Node) -> list[Term]:
        part, divisor = node.args[:2]
        if (
            isinstance(part, fx.Node)
            and self.computed(part)
            and rank_of(part) == 0
            and len(node.args) == 2
            and not node.kwargs
        ):
            if isinstance(divisor, int | float) and divisor != 0:
                return [_divided(term, divisor) for term in self.terms(part)]
            if isinstance(divisor, fx.Node) and not self.computed(divisor) and _is_scalar(divisor):
                return [_divided(term, divisor) for term in self.terms(part)]
        raise NotLinear(node, "its divisor is not known from the inputs alone")

    def _classification(self, node: fx.Node) -> Term:
        """cross_entropy and nll_loss: (input, target, weight, size_average, ignore_index, reduce, reduction,
        label_smoothing)."""
        reduction = argument(node, 6, "reduction", "mean")
        target, weight = argument(node, 1, "target"), argument(node, 2, "weight")
        if argument(node, 3, "size_average") is not None or argument(node, 5, "reduce") is not None:
            raise NotLinear(node, "size_average and reduce are deprecated; use reduction")
        if reduction == "sum":
            return Term(node)
        if (
            reduction != "mean"
            or self.computed(target)
            or (isinstance(weight, fx.Node) and self.computed(weight))
        ):
            raise NotLinear(node, "its labels or class weights are computed by the model")
        if value(target).is_floating_point():  # class probabilities: the mean is over samples
            classes = shape(node.args[0])[1]
            return Term(self._with_sum(node), (_numel(target) / sympy.sympify(classes),))
        ignored = argument(node, 4, "ignore_index", -100)
        with self.graph.inserting_before(node):
            valid = self.graph.call_function(operator.ne, (target, ignored))
            if weight is None:
                count = self.graph.call_method("sum", (valid,))
            else:
                clean = self.graph.call_method("where", (target, valid, 0))
                picked = self.graph.call_function(operator.getitem, (weight, clean))
                count = self.graph.call_method(
                    "sum", (self.graph.call_function(operator.mul, (picked, valid)),)
                )
        return Term(self._with_sum(node), (count,))

    def _elementwise(self, node: fx.Node) -> Term:
        reduction = node.kwargs.get("reduction", "mean")
        if len(node.args) > 2 or reduction not in ("mean", "sum"):
            raise NotLinear(node, "its reduction is not given by keyword as mean or sum")
        predicted, target = node.args[0], argument(node, 1, "target")
        if not is_tensor(predicted) or not is_tensor(target) or shape(predicted) != shape(target):
            raise NotLinear(node, "it broadcasts its arguments")
        self._need_batch(node, predicted)
        return Term(node) if reduction == "sum" else Term(self._with_sum(node), (_numel(predicted),))

    def _reduction(self, node: fx.Node) -> list[Term]:
        source = node.args[0]
        dims = argument(node, 1, "dim", argument(node, 1, "axis"))
        if not isinstance(source, fx.Node) or not is_tensor(source):
            raise NotLinear(node, "it does not reduce a tensor")
        rank = rank_of(source) or 0
        listed = (
            range(rank)
            if dims is None
            else [d % rank for d in (dims if isinstance(dims, tuple | list) else (dims,))]
        )
        if rank == 0:
            return self.terms(source)
        if len(set(listed)) != rank or rank_of(node) != 0:
            raise NotLinear(node, "it does not reduce to one number")
        self._need_batch(node, source)
        if is_call(node, "sum"):
            return [Term(node)]
        with self.graph.inserting_after(node):
            keep = {k: v for k, v in node.kwargs.items() if k == "dtype"}
            total = self.graph.call_method("sum", (source,), keep)
        total.meta = dict(node.meta)
        return [Term(total, (_numel(source),))]

    def _need_batch(self, node: fx.Node, source: fx.Node) -> None:
        if self.batch is not None and self.batch not in free_symbols(shape(source)):
            raise NotLinear(
                node, "what it reduces is not per sample: tokens of different samples were mixed before"
            )

    def _with_sum(self, node: fx.Node) -> fx.Node:
        """The same loss with reduction="sum"."""
        with self.graph.inserting_after(node):
            args = list(node.args)
            kwargs = dict(node.kwargs)
            if len(args) > 6:
                args[6] = "sum"
            else:
                kwargs["reduction"] = "sum"
            total = self.graph.create_node(node.op, node.target, tuple(args), kwargs)
        total.meta = dict(node.meta)
        return total


def _scaled(term: Term, factor: float) -> Term:
    return Term(term.numerator, term.denominators, term.coefficient * factor)


def _divided(term: Term, factor: Factor) -> Term:
    return Term(term.numerator, (*term.denominators, factor), term.coefficient)


def _numel(node: fx.Node) -> sympy.Expr:
    return math.prod((sympy.sympify(dim) for dim in shape(node)), start=sympy.Integer(1))


def _is_scalar(node: fx.Node) -> bool:
    found = value(node)
    return (isinstance(found, torch.Tensor) and found.dim() == 0) or isinstance(
        found, int | float | torch.SymInt
    )


def product_node(graph: fx.Graph, factors: Sequence[fx.Node | float]) -> fx.Node | float:
    """The product of the factors at the graph's insertion point; 1.0 for none."""
    result: fx.Node | float = 1.0
    for index, factor in enumerate(factors):
        result = factor if index == 0 else graph.call_function(operator.mul, (result, factor))
    return result
