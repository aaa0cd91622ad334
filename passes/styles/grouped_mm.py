"""Regions that sort their pairs by expert and multiply with `grouped_mm` (Hugging Face's default,
torchtitan).

    perm = sort(expert_ids)          rows = tokens[perm // k]       offs = cumsum(histogram(expert_ids))
    out  = grouped_mm(act(grouped_mm(rows, W1, offs)), W2, offs) * weights[perm]
    exit = out[inverse(perm)].view(T, k, D).sum(1)      or      zeros(T, D).index_add(0, perm // k, out)

The products may be written out, a piece of the rows for each expert (`pieces.py`). Where rows come in pair by pair, or leave
unsummed (experts inside an attention), pairs take the place of tokens: `zeros(P, D).index_add(0, perm, out)`.

In the extracted function each grouped matmul is a plain matmul of one expert's rows, and a bias gathered by
expert is that expert's bias. Rows of no expert (sentinels past the last group) are absent from the canonical
form, so masking them is dropped.

Legend: T tokens, k experts a token, P = T * k pairs, D hidden size, E experts.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import (
    argument,
    emit_for,
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
from disagmoe_compile.passes.regions import Found, NoMatch, ParamNodes, Region
from disagmoe_compile.passes.styles.loop_routing import first_part
from disagmoe_compile.passes.styles.parameters import is_parameter
from disagmoe_compile.passes.styles.pieces import Alike, CountedPieces, read_pieces
from disagmoe_compile.passes.styles.rowwise import RowFunction, check_rowwise
from disagmoe_compile.passes.styles.sorting import Sorting, sorting_behind_counts, sorting_behind_offsets
from disagmoe_compile.passes.styles.zeros import is_zero

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_ADDS_ROWS = ("index_add", "scatter_add")


@dataclass(frozen=True, slots=True)
class GroupedMM:
    name: str = "grouped_mm"

    def find(self, graph: fx.Graph) -> Found:
        by_offsets: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        stopped = []
        for node in graph.nodes:
            if is_call(node, *_GROUPED):
                offsets = argument(node, 2, "offs")
                if isinstance(offsets, fx.Node):
                    by_offsets[offsets].append(node)
                else:
                    stopped.append(NoMatch(node, "it has no group offsets"))
        candidates = [partial(_of_offsets, offsets, matmuls) for offsets, matmuls in by_offsets.items()]
        candidates += [partial(_of_pieces, group) for group in _groups_of_pieces(graph)]
        regions = []
        for candidate in candidates:
            try:
                regions.append(candidate().region())
            except NoMatch as reason:
                stopped.append(reason)
        return Found(tuple(regions), tuple(stopped))


def _of_offsets(offsets: fx.Node, matmuls: list[fx.Node]) -> _Match:
    experts = shape(offsets)[0]
    if not isinstance(experts, int):
        raise NoMatch(offsets, "the number of experts is not fixed")
    return _Match(sorting_behind_offsets(offsets), experts, matmuls)


def _of_pieces(group: list[CountedPieces]) -> _Match:
    sorting = sorting_behind_counts(group[0].counts)
    return _Match(sorting, len(group[0].results), [one.joined for one in group], group)


def _groups_of_pieces(graph: fx.Graph) -> list[list[CountedPieces]]:
    """Joined pieces, each with those that its rows are computed from."""
    group_of: dict[fx.Node, list[CountedPieces]] = {}
    groups = []
    for node in graph.nodes:
        pieces = read_pieces(node)
        if pieces is None:
            continue
        before = pieces.rows
        while before not in group_of and not is_gather(before) and before.all_input_nodes:
            before = before.all_input_nodes[0]
        group = group_of.get(before, [])
        if not group or group[0].counts is not pieces.counts:
            group = []
            groups.append(group)
        group.append(pieces)
        group_of[node] = group
    return groups


@dataclass(frozen=True, slots=True)
class _Summed:
    """`exit` [T, D] sums the `top_k` rows of every token, times `weights` [T, k] if they are not in the rows already, and
    adds them to `base` [T, D] if it is not zero (what a shared expert returned)."""

    exit: fx.Node
    top_k: int
    weights: fx.Node | None
    base: fx.Node | None = None


class _Match:
    """One candidate: the products of all experts with their rows of one sorting. Raises NoMatch where it is not a region."""

    def __init__(
        self, sorting: Sorting, num_experts: int, matmuls: list[fx.Node], pieces: Sequence[CountedPieces] = ()
    ) -> None:
        self.matmuls, self.num_experts = matmuls, num_experts
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

    def region(self) -> Region:
        rows, leaving = self._last_rows()
        for alike in self.alike.values():
            alike.check()
        result = self.function.convert(rows)
        if self.tokens is None:
            raise NoMatch(self.matmuls[0], "its rows are not gathered from tokens")
        if is_call(leaving, *_ADDS_ROWS) and argument(leaving, 2, "index") is not self.perm:
            summed: _Summed | None = self._added(leaving)
        else:
            summed = self._summed_if_at_all(leaving)
        top_k = 1 if summed is None else summed.top_k
        if summed is not None and self.gathered_top_k not in (None, top_k):
            raise NoMatch(
                summed.exit, f"it sums {top_k} rows a token, but {self.gathered_top_k} were gathered"
            )
        if summed is not None and summed.weights is not None:
            self.weights = summed.weights
            column = self.function.call("call_method", "unsqueeze", (self.function.weight, -1))
            result = self.function.call("call_function", torch.mul, (result, column))
        if summed is None and not self.by_pair:
            self._repeat_tokens(leaving)
        return Region(
            style="grouped_mm",
            tokens=self.tokens,
            token_ids=self.token_ids,
            expert_ids=self.expert_ids,
            weights=self.weights,
            params=tuple(self._params_of_all(node) for node in self.function.params),
            function=self.function.finish(result),
            exit=leaving if summed is None else summed.exit,
            num_experts=self.num_experts,
            top_k=1 if self.by_pair else top_k,
            summed=top_k if self.by_pair else 1,
            base=None if summed is None else summed.base,
        )

    def _params_of_all(self, node: fx.Node) -> ParamNodes:
        return next((alike.separate(node) for alike in self.alike.values() if node in alike.params), node)

    def _repeat_tokens(self, leaving: fx.Node) -> None:
        """Rows leave pair by pair: every pair is a token of its own."""
        tokens, graph = self.tokens, leaving.graph
        assert tokens is not None, "checked before"
        with graph.inserting_before(leaving):
            if self.token_ids is not None:
                self.tokens = emit_for(graph, leaving, operator.getitem, (tokens, self.token_ids))
            else:
                repeats = {"dim": 0}
                self.tokens = emit_for(
                    graph, leaving, "repeat_interleave", (tokens, self.gathered_top_k), repeats
                )
        self.token_ids = None

    # -- the way out

    def _summed_if_at_all(self, leaving: fx.Node) -> _Summed | None:
        """How rows that are back in the order of pairs are summed; None where each leaves by itself."""
        if is_call(leaving, *_ADDS_ROWS):
            self._require_zero(leaving)
        try:
            return self._unsorted(leaving)
        except NoMatch:
            if self.gathered_top_k is None and self.token_ids is None and not self.by_pair:
                raise
            return None

    def _last_rows(self) -> tuple[fx.Node, fx.Node]:
        """The last value over sorted rows, and the call through which it leaves the row order."""
        pending, seen, stopped = [self.matmuls[-1]], set(), None
        while pending:
            node = pending.pop(0)
            for user in node.users:
                if is_gather(user) and user.args[0] is node:
                    if self._is_inverse(user.args[1]):
                        return node, user
                    stopped = NoMatch(user, "it does not undo the sort by expert")
                elif (
                    is_call(user, *_ADDS_ROWS)
                    and argument(user, 3, "source", argument(user, 3, "src")) is node
                ):
                    return node, user
                elif is_call(user, "index_put") and user.args[1:] == ((self.perm,), node):
                    if shape(user)[0] not in (shape(self.expert_ids)[0], shape(node)[0]):
                        raise NoMatch(user, "rows are put among others")
                    return node, user
                elif user not in seen:
                    seen.add(user)
                    try:
                        check_rowwise(user)
                        pending.append(user)
                    except NoMatch as reason:
                        stopped = reason
        raise stopped or NoMatch(self.matmuls[-1], "its result goes nowhere")

    def _is_inverse(self, index: fx.Node) -> bool:
        """Whether `index` is the inverse of the sorting permutation."""
        if is_call(index, "argsort"):
            return index.args[0] is self.perm
        writers = [user for user in index.users if user.target is operator.setitem and user.args[0] is index]
        return (
            is_call(index, "empty_like", "empty", "new_empty", "zeros_like", "zeros", "new_zeros")
            and len(writers) == 1
            and writers[0].args[1] is self.perm
            and is_call(writers[0].args[2], "arange")
        )

    def _unsorted(self, gathered: fx.Node) -> _Summed:
        """`rows[inverse].view(T, k, D)`, weighted here or before, summed over k."""
        split = _only_user(gathered)
        if not is_call(split, "view", "reshape", "unflatten") or rank_of(split) != 3:
            raise NoMatch(split, "rows in token order are not split into [tokens, top_k, hidden]")
        top_k = shape(split)[1]
        if not isinstance(top_k, int):
            raise NoMatch(split, "the number of experts a token is not fixed")
        total, found = _only_user(split), None
        if is_call(total, "mul"):
            weights = next((a for a in total.args if a is not split), None)
            if (
                self.weights is not None
                or weights is None
                or not _adds_last_dimension(weights)
                or shape(weights)[1:] != (top_k, 1)
            ):
                raise NoMatch(total, "it is not a product with the routing weights")
            found = weights.args[0]
            total = _only_user(total)
        dims = argument(total, 1, "dim")
        if (
            not is_call(total, "sum")
            or dims not in (1, (1,), [1], -2)
            or argument(total, 2, "keepdim", False)
            or total.kwargs.get("dtype") is not None
        ):
            raise NoMatch(total, "the pairs of a token are not plainly summed")
        return _Summed(total, top_k, found)

    def _added(self, total: fx.Node) -> _Summed:
        """`base.index_add(0, token of row, rows)` or the same with scatter_add."""
        base = self._base(total)
        index = argument(total, 2, "index")
        if is_call(total, "scatter_add"):
            index = _broadcast_index(index)
        if self.by_pair:
            top_k = _divided(index, self.perm)
            if top_k is None:
                raise NoMatch(total, "it adds rows to other tokens than those of their pairs")
            return _Summed(total, top_k, None, base)
        if not same_value(index, self.row_index):
            raise NoMatch(total, "it adds rows to other tokens than they came from")
        pairs, tokens = shape(self.expert_ids)[0], shape(self.tokens)[0]  # type: ignore[arg-type]
        top_k = self.gathered_top_k or sympy.sympify(pairs) / sympy.sympify(tokens)
        if not isinstance(top_k, int) and not top_k.is_Integer:
            raise NoMatch(total, "the number of experts a token is not fixed")
        return _Summed(total, int(top_k), None, base)

    def _require_zero(self, total: fx.Node) -> None:
        if self._base(total) is not None:
            raise NoMatch(total, "it does not sum rows into zeros")

    def _base(self, total: fx.Node) -> fx.Node | None:
        """What rows are added to, or None where it is zero."""
        base = total.args[0]
        if argument(total, 1, "dim") != 0 or argument(total, 4, "alpha", 1) != 1:
            raise NoMatch(total, "it does not add rows to rows")
        if not isinstance(base, fx.Node) or base in storages(total.graph).writers:
            raise NoMatch(total, "what it adds rows to is written in place")
        return None if is_zero(base) else base

    # -- what enters the rows

    def _leaf(self, node: fx.Node) -> fx.Node | None:
        if node in self.alike:
            return self.function.convert(self.alike[node].pieces.results[0])
        if node in self.rows_of:
            return self.function.convert(self.rows_of[node])
        if self.alike and (entered := self._of_first_expert(node)) is not None:
            return entered
        if is_call(node, *_GROUPED):
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
        elif (top_k := _divided(index, self.perm)) is not None:
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


def _divided(index: fx.Node, perm: fx.Node) -> int | None:
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
        return node.args[0], _broadcast_index(argument(node, 2, "index"))  # type: ignore[return-value]
    return None, None


def _broadcast_index(index: fx.Node) -> fx.Node:
    """The vector behind `i.reshape(-1, 1).expand(-1, D)`."""
    while is_call(index, "expand", "reshape", "view", "unsqueeze", "expand_as", "broadcast_to"):
        index = index.args[0]  # type: ignore[assignment]
    return index


def _adds_last_dimension(node: object) -> bool:
    """`w.unsqueeze(-1)`, `w[..., None]`"""
    if not is_tensor(node) or not is_call(node, "unsqueeze", "getitem") or not is_tensor(node.args[0]):  # type: ignore[attr-defined]
        return False
    source, index = node.args[:2]  # type: ignore[attr-defined]
    whole = not isinstance(index, tuple) or all(part in (None, Ellipsis, slice(None)) for part in index)
    return whole and not is_tensor(index) and shape(source) == shape(node)[:-1]  # type: ignore[arg-type]


def _only_user(node: fx.Node) -> fx.Node:
    users = list(node.users)
    if len(users) != 1:
        raise NoMatch(node, f"it is read {len(users)} times, once expected")
    return users[0]
