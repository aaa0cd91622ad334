"""What enters the sorted rows of a region with grouped products: tokens, routing weights and parameters, and what one expert
makes of them.

    rows = tokens[perm // k]        weights[perm]        grouped_mm(rows, W, offs) -> rows @ W of one expert

In the extracted function each grouped matmul is a plain matmul of one expert's rows, and a bias gathered by
expert is that expert's bias. Rows of no expert (sentinels past the last group) are absent from the canonical
form, so masking them is dropped.

Legend: T tokens, k experts a token, P = T * k pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from disagmoe_compile.passes.metadata import (
    argument,
    is_call,
    is_gather,
    is_tensor,
    rank_of,
    same_value,
    shape,
    source_of,
    value,
)
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.regions import NoMatch, ParamNodes
from disagmoe_compile.passes.styles.loop_routing import first_part
from disagmoe_compile.passes.styles.parameters import is_parameter
from disagmoe_compile.passes.styles.pieces import Alike, CountedPieces
from disagmoe_compile.passes.styles.rowwise import RowFunction
from disagmoe_compile.passes.styles.sorting import Sorting

GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class EnteringRows:
    """Converts values over sorted rows to those of one expert; what it meets on the way is the region's tokens and weights.

    Raises NoMatch where a value is neither.
    """

    def __init__(self, sorting: Sorting, num_experts: int, pieces: Sequence[CountedPieces] = ()) -> None:
        self.num_experts = num_experts
        self.expert_ids, self.perm, self.sorted_ids = sorting.expert_ids, sorting.perm, sorting.sorted_ids
        self.alike = {one.joined: Alike(one) for one in pieces}
        self.rows_of = {one.cuts[0]: one.rows for one in pieces}
        self.function = RowFunction(self._leaf)
        self.tokens: fx.Node | None = None
        self.token_ids: fx.Node | None = None
        self.gathered_top_k: int | None = None  # where rows are gathered with perm // k
        self.by_pair = False  # rows are gathered with perm: one for each pair
        self.row_index: fx.Node | None = None
        self.weights: fx.Node | None = None

    def convert(self, rows: fx.Node) -> fx.Node:
        """One expert's value of `rows`, in `function`."""
        for alike in self.alike.values():
            alike.check()
        return self.function.convert(rows)

    def params(self) -> tuple[ParamNodes, ...]:
        """Those of all experts, in the order of the function's."""
        return tuple(self._params_of_all(node) for node in self.function.params)

    def _params_of_all(self, node: fx.Node) -> ParamNodes:
        return next((alike.separate(node) for alike in self.alike.values() if node in alike.params), node)

    def _leaf(self, node: fx.Node) -> fx.Node | None:
        if node in self.alike:
            return self.function.convert(self.alike[node].pieces.results[0])
        if node in self.rows_of:
            return self.function.convert(self.rows_of[node])
        if self.alike and (entered := self._of_first_expert(node)) is not None:
            return entered
        if is_call(node, *GROUPED):
            rows, weight = node.args[0], argument(node, 1, "weight", argument(node, 1, "mat_b"))
            arguments = (self.function.convert(rows), self._param(weight))
            bias = node.kwargs.get("bias")
            if bias is not None:
                raise NoMatch(node, "a bias inside grouped_mm is not supported")
            return self.function.call("call_function", torch.matmul, arguments)
        if is_call(node, "masked_fill") and self._is_sentinel_mask(node.args[1]):
            return self.function.convert(node.args[0])
        if is_call(node, "view", "reshape") and rank_of(node.args[0]) == 1 and shape(node)[1:] == (1,):
            vector = self.function.convert(node.args[0])  # type: ignore[arg-type]
            return self.function.call("call_method", "unsqueeze", (vector, -1))
        source, index = _rows_taken(node)
        if source is None or index is None:
            return None
        if self._unclamped(index) is self.sorted_ids and self.sorted_ids is not None:
            return self._param(source)
        if index is self.perm and rank_of(source) == 1:
            if self.weights not in (None, source):
                raise NoMatch(node, "a second vector over pairs enters the experts' rows")
            self.weights = source
            if is_gather(node):
                return self.function.weight
            return self.function.call("call_method", "unsqueeze", (self.function.weight, -1))
        if rank_of(source) == 2 and self.tokens in (None, source):
            self._set_row_index(index)
            self.tokens = source
            return self.function.rows
        raise NoMatch(node, "rows are gathered in a way that is not tokens, weights or biases")

    def _of_first_expert(self, node: fx.Node) -> fx.Node | None:
        """The first expert's parameters, and products of its rows with them."""
        stacked, number = first_part(node)
        if (
            stacked is not None
            and is_parameter(stacked)
            and number == 0
            and shape(stacked)[0] == self.num_experts
        ):
            return self.function.parameter(stacked)
        if any(node in alike.params for alike in self.alike.values()):
            return self.function.parameter(node)
        if is_call(node, "linear"):
            operands = [node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")]
        elif is_call(node, "matmul", "mm"):
            operands = [node.args[0], argument(node, 1, "other", argument(node, 1, "mat2"))]
        elif is_call(node, "t", "transpose") and rank_of(node) == 2 and is_tensor(node.args[0]):
            inner = self._of_first_expert(node.args[0])  # type: ignore[arg-type]
            return None if inner is None else self.function.call("call_method", "transpose", (inner, -2, -1))
        else:
            return None
        rows, *others = operands
        params = [None if other is None else self._of_first_expert(other) for other in others]
        if any(param is None for param, other in zip(params, others) if other is not None):
            raise NoMatch(node, "it multiplies rows by something else than the expert's parameters")
        if any(value(operand).dtype != value(node).dtype for operand in operands if operand is not None):
            raise NoMatch(node, "autocast chooses the type of its product")
        return self.function.call(node.op, node.target, (self.function.convert(rows), *params))

    def _set_row_index(self, index: fx.Node) -> None:
        if self.row_index is not None and not same_value(self.row_index, index):
            raise NoMatch(index, "rows are gathered twice with different indices")
        self.row_index = index
        if index is self.perm:
            self.by_pair = True
        elif (top_k := divided(index, self.perm)) is not None:
            self.gathered_top_k = top_k
        elif is_gather(index) and index.args[1] is self.perm:
            self.token_ids = index.args[0]  # type: ignore[assignment]
        else:
            raise NoMatch(index, "the token of each row does not follow from the sort by expert")

    def _param(self, node: fx.Node) -> fx.Node:
        """One expert's slice of a stacked parameter, through casts and transposes of the other dimensions."""
        source = source_of(node)
        if source is not None:
            if source.kind is not InputKind.PARAMETER or shape(node)[0] != self.num_experts:
                raise NoMatch(
                    node, f"`{source.name}` is not a parameter stacked over {self.num_experts} experts"
                )
            return self.function.parameter(node)
        if is_call(node, "transpose", "swapaxes"):
            rank = rank_of(node)
            dims = [d - rank if d > 0 else d for d in node.args[1:3]]  # type: ignore[operator]
            if all(-rank < d < 0 for d in dims):  # type: ignore[operator]
                return self.function.call("call_method", "transpose", (self._param(node.args[0]), *dims))
        if is_call(node, "permute") and node.args[1] in (0, (0, 2, 1)) and rank_of(node) == 3:
            return self.function.call("call_method", "transpose", (self._param(node.args[0]), -2, -1))
        if is_call(node, "getattr") and node.args[1] == "mT":
            return self.function.call("call_method", "transpose", (self._param(node.args[0]), -2, -1))
        if is_call(node, "to", "float", "half", "bfloat16", "contiguous"):
            return self.function.call(
                node.op, node.target, (self._param(node.args[0]), *node.args[1:]), dict(node.kwargs)
            )
        raise NoMatch(node, "the weights are not a parameter stacked over experts")

    def _unclamped(self, index: fx.Node) -> fx.Node:
        is_clamp = is_call(index, "clamp", "clamp_max") and argument(index, 2, "max") == self.num_experts - 1
        return index.args[0] if is_clamp else index  # type: ignore[return-value]

    def _is_sentinel_mask(self, mask: fx.Node) -> bool:
        inner = mask.args[0] if is_call(mask, "unsqueeze") else mask
        return is_call(inner, "ge") and inner.args[0] is self.sorted_ids and inner.args[1] == self.num_experts


def divided(index: fx.Node, perm: fx.Node) -> int | None:
    """k of `perm // k`, which is not negative."""
    divides = is_call(index, "floordiv", "floor_divide") or (
        is_call(index, "div") and index.kwargs.get("rounding_mode") in ("floor", "trunc")
    )
    return index.args[1] if divides and index.args[0] is perm and isinstance(index.args[1], int) else None


def _rows_taken(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(source, index) where `node` takes rows of a source: `x[i]`, `x[i, None]`, index_select, gather along
    dim 0."""
    if is_gather(node):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    if node.target is operator.getitem and isinstance(node.args[1], tuple) and is_tensor(node.args[0]):
        index, *rest = node.args[1]
        if is_tensor(index) and rest == [None]:
            return node.args[0], index  # type: ignore[return-value]
    if is_call(node, "index_select") and argument(node, 1, "dim") == 0:
        return node.args[0], argument(node, 2, "index")  # type: ignore[return-value]
    if is_call(node, "gather") and argument(node, 1, "dim") == 0:
        return node.args[0], broadcast_index(argument(node, 2, "index"))  # type: ignore[return-value]
    return None, None


def broadcast_index(index: fx.Node) -> fx.Node:
    """The vector behind `i.reshape(-1, 1).expand(-1, D)`."""
    while is_call(index, "expand", "reshape", "view", "unsqueeze", "expand_as", "broadcast_to"):
        index = index.args[0]  # type: ignore[assignment]
    return index
