"""Which tokens an expert of an unrolled loop gets and with which weight, as its authors write it.

    ids == e                                     the pairs of expert e          [T, k], or [T] with one expert a token
    one_hot(ids, E).permute(2, 1, 0)[e]          the same, slots first          [k, T]
    (ids == e).any(-1)                           its tokens                     [T]
    tok, slot = where(ids == e)                  rows of its tokens, and their slots; or nonzero, or a mask as index
    (weights * (ids == e)).sum(-1)               its weight of every token, zero where it is not chosen
    scores[:, e]                                 the same, if scores are zero by structure outside the top-k

Only the structure counts. Scores that merely happen to be zero say nothing about which experts a token needs.

Legend: T tokens, k experts a token, E experts, e one of them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from disagmoe_compile.passes.metadata import (
    argument,
    emit,
    emit_for,
    is_call,
    is_tensor,
    rank_of,
    shape,
    value,
)
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.ids import are_distinct
from disagmoe_compile.passes.styles.zeros import is_zero, routed_ids

_CASTS = (
    "to",
    "float",
    "half",
    "bfloat16",
    "double",
    "int",
    "long",
    "bool",
    "type",
    "type_as",
    "contiguous",
    "detach",
)
_PRODUCTS = ("mul", "logical_and", "and_", "bitwise_and")
_ALL = slice(None, None, None)


@dataclass(frozen=True, slots=True)
class Mask:
    """Where `ids` is `expert`. `slots`: the position of the dimension of slots, None where there is none."""

    ids: fx.Node
    expert: int
    slots: int | None

    @property
    def has_slots(self) -> bool:
        return self.slots is not None


@dataclass(frozen=True, slots=True)
class Index:
    """One entry of `where(mask)`: for each row its token, or its slot. Rows come in the order of the mask's dimensions."""

    ids: fx.Node
    expert: int
    is_token: bool
    slots_first: bool


@dataclass(frozen=True, slots=True)
class Weight:
    """An expert's weights of all tokens: from `weights` [T, k], or [T, E] where `by_expert`; zero outside `ids`, if any."""

    weights: fx.Node
    ids: fx.Node | None
    expert: int
    by_expert: bool
    keeps_dim: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """Reads routing where tokens have `lead` dimensions (1 for [T, D], 2 for [B, S, D])."""

    lead: int
    _kept: dict[fx.Node, fx.Node] = field(default_factory=dict)  # mask [..., E] -> ids made of it

    # -- masks

    def mask(self, node: fx.Node) -> Mask | None:
        """`ids == e` in any spelling: [T, k], [k, T], or [T]."""
        node = uncast(node)
        ids, expert = compared(node, "eq")
        if ids is not None:
            return self._mask(ids, expert)
        source, expert = column(node)
        if source is not None:
            ids = self._ids_of_mask(uncast(source))
            if ids is not None:
                return self._mask(ids, expert)
        source, expert = first_part(node)
        if source is None or self.lead != 1:
            return None
        dims = _permutation(source)
        inner = uncast(source.args[0]) if dims is not None else None
        if dims is None or not is_call(inner, "one_hot"):
            return None
        ids = same_ids(inner.args[0])  # type: ignore[union-attr, arg-type]
        slots = {(2, 0, 1): 1, (2, 1, 0): 0}.get(dims) if len(dims) == 3 else None
        return Mask(ids, expert, slots) if slots is not None or dims == (1, 0) else None

    def _ids_of_mask(self, mask: fx.Node) -> fx.Node | None:
        """ids [...] of a mask [..., E] with one expert or none in each row: a one-hot, or one times what keeps some of it.

        A row that is all zeros has the id E, of no expert.
        """
        if is_call(mask, "one_hot"):
            return mask.args[0]  # type: ignore[return-value]
        if mask in self._kept:
            return self._kept[mask]
        if not is_call(mask, *_PRODUCTS) or not _is_zero_or_one(mask):
            return None
        try:
            chosen = same_ids(routed_ids(mask))
        except NoMatch:
            return None
        experts = shape(mask)[-1]
        if rank_of(chosen) != (rank_of(mask) or 0) - 1 or not isinstance(experts, int):
            return None
        graph = mask.graph
        with graph.inserting_before(mask.next):
            own = emit_for(graph, mask, "gather", (mask, -1, emit(graph, "unsqueeze", (chosen, -1))))
            is_kept = emit_for(graph, mask, "bool", (emit(graph, "squeeze", (own, -1)),))
            self._kept[mask] = emit_for(graph, mask, torch.where, (is_kept, chosen, experts))
        return self._kept[mask]

    def _mask(self, ids: fx.Node, expert: int) -> Mask | None:
        rank = rank_of(ids)
        if rank not in (self.lead, self.lead + 1):
            return None
        return Mask(same_ids(ids), expert, self.lead if rank == self.lead + 1 else None)

    def token_mask(self, node: fx.Node) -> Mask | None:
        """[T]: whether a token goes to expert e. None also where its ids may repeat and be counted twice."""
        node = uncast(node)
        found = self.mask(node)
        if found is not None:
            return None if found.has_slots else found
        if is_call(node, "any", "sum", "amax") and is_tensor(node.args[0]):
            found = self.mask(node.args[0])  # type: ignore[arg-type]
            dim = _dim(node)
            if found is not None and found.has_slots and dim == found.slots and are_distinct(found.ids):
                return None if argument(node, 2, "keepdim", False) else Mask(found.ids, found.expert, None)
        source, expert = column(node)
        if source is not None:
            summed = uncast(source)
            is_choice = is_call(summed, "sum", "any", "amax") and is_call(uncast(summed.args[0]), "one_hot")  # type: ignore[arg-type]
            if is_choice and _dim(summed) == self.lead and not argument(summed, 2, "keepdim", False):
                ids = same_ids(uncast(summed.args[0]).args[0])  # type: ignore[arg-type]
                return Mask(ids, expert, None) if are_distinct(ids) else None
        return None

    # -- rows

    def index(self, node: fx.Node) -> Index | None:
        """What an index tensor selects, if it is the rows of one expert."""
        if self.lead != 1 or not is_tensor(node):
            return None
        if value(node).dtype.is_floating_point:
            return None
        mask = self.token_mask(node)
        if mask is not None:  # a boolean index
            return Index(mask.ids, mask.expert, True, False) if value(node).dtype is torch.bool else None
        found, position = _nonzero(node)
        if found is None:
            return None
        mask = self.token_mask(found)
        if mask is not None:
            return Index(mask.ids, mask.expert, True, False) if position == 0 else None
        mask = self.mask(found)
        if mask is None:
            return None
        return Index(mask.ids, mask.expert, position != mask.slots, mask.slots == 0)

    # -- weights

    def weight(self, node: fx.Node) -> Weight | None:
        """An expert's weight of every token, [T] or [T, 1]."""
        if is_call(node, "sum") and is_tensor(node.args[0]):
            masked = self._masked(node.args[0])  # type: ignore[arg-type]
            if masked is None or not masked[1].has_slots or _dim(node) != masked[1].slots:
                return None
            weights, mask = masked
            keeps = bool(argument(node, 2, "keepdim", False))
            return Weight(weights, mask.ids, mask.expert, False, keeps)
        source, expert = column(node)
        keeps = False
        if source is None:
            source, expert = column(node, keeps_dim=True)
            keeps = True
        if source is None or rank_of(source) != self.lead + 1 or not value(source).is_floating_point():
            return None
        try:
            ids: fx.Node | None = zero_outside(source)
        except NoMatch:
            ids = None
        return Weight(source, ids, expert, True, keeps)

    def _masked(self, node: fx.Node) -> tuple[fx.Node, Mask] | None:
        """(weights, mask) of weights [T, k] that are zero where the mask is not."""
        if is_call(node, "mul") and all(is_tensor(a) for a in node.args[:2]):
            for weights, other in (node.args[:2], node.args[1::-1]):
                mask = self.mask(other)  # type: ignore[arg-type]
                if mask is not None:
                    return self._of_same_shape(weights, mask)  # type: ignore[arg-type]
        if is_call(node, "where") and len(node.args) == 3 and is_zero(node.args[2]):
            mask = self.mask(node.args[0])  # type: ignore[arg-type]
            return None if mask is None else self._of_same_shape(node.args[1], mask)  # type: ignore[arg-type]
        if is_call(node, "masked_fill") and is_zero(argument(node, 2, "value")):
            ids, expert = compared(node.args[1], "ne")  # type: ignore[arg-type]
            if ids is not None and rank_of(ids) == self.lead + 1:
                return self._of_same_shape(node.args[0], Mask(same_ids(ids), expert, self.lead))  # type: ignore[arg-type]
            inverted = node.args[1]
            if is_call(inverted, "invert", "logical_not", "bitwise_not", "__invert__"):
                mask = self.mask(inverted.args[0])  # type: ignore[union-attr, arg-type]
                return None if mask is None else self._of_same_shape(node.args[0], mask)  # type: ignore[arg-type]
        return None

    def _of_same_shape(self, weights: fx.Node, mask: Mask) -> tuple[fx.Node, Mask] | None:
        fits = is_tensor(weights) and rank_of(weights) == rank_of(mask.ids) and mask.slots == self.lead
        return (weights, mask) if fits else None


def _is_zero_or_one(node: fx.Node) -> bool:
    """Whether every element is certainly 0 or 1."""
    node = uncast(node)
    if is_call(node, "one_hot") or value(node).dtype is torch.bool:
        return True
    return is_call(node, *_PRODUCTS) and all(is_tensor(a) and _is_zero_or_one(a) for a in node.args[:2])  # type: ignore[arg-type]


def uncast(node: fx.Node) -> fx.Node:
    while is_call(node, *_CASTS) and is_tensor(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def same_ids(ids: fx.Node) -> fx.Node:
    """Through casts between whole numbers."""
    while is_call(ids, *_CASTS) and is_tensor(ids.args[0]) and _is_whole(ids) and _is_whole(ids.args[0]):
        ids = ids.args[0]  # type: ignore[assignment]
    return ids


def _is_whole(node: object) -> bool:
    dtype = value(node).dtype  # type: ignore[arg-type]
    return not dtype.is_floating_point and dtype is not torch.bool


def compared(node: object, name: str) -> tuple[fx.Node | None, int]:
    """(ids, e) of `ids == e` (or `!=`), with e a plain number."""
    if isinstance(node, fx.Node) and is_call(node, name) and len(node.args) == 2:
        for ids, expert in (node.args, node.args[::-1]):
            is_number = isinstance(expert, int) and not isinstance(expert, bool)
            if is_number and is_tensor(ids) and not value(ids).dtype.is_floating_point:  # type: ignore[arg-type]
                return ids, expert  # type: ignore[return-value]
    return None, -1


def column(node: fx.Node, *, keeps_dim: bool = False) -> tuple[fx.Node | None, int]:
    """(source, e) of `source[..., e]`; with `keeps_dim` of `source[..., e : e + 1]` and `source[..., e, None]`."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None, -1
    if is_call(node, "select") and not keeps_dim and is_tensor(source):
        dim, expert = argument(node, 1, "dim"), argument(node, 2, "index")
        return (source, expert) if dim in (-1, (rank_of(source) or 0) - 1) else (None, -1)
    if is_call(node, "narrow") and keeps_dim and argument(node, 3, "length") == 1:
        dim, expert = argument(node, 1, "dim"), argument(node, 2, "start")
        return (source, expert) if dim in (-1, (rank_of(source) or 0) - 1) else (None, -1)
    if node.target is not operator.getitem:
        return None, -1
    if not is_tensor(source):
        splits = ("split", "chunk", "tensor_split") if keeps_dim else ("unbind",)
        return _part(source, node.args[1], *splits)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if keeps_dim and index and index[-1] is None:
        index = index[:-1]
    elif keeps_dim:
        last = index[-1]
        is_one = isinstance(last, slice) and isinstance(last.start, int) and last.step in (None, 1)
        if not is_one or last.stop != last.start + 1:
            return None, -1
        index = (*index[:-1], last.start)
    rest = index[:-1]
    whole = rest == (Ellipsis,) or (len(index) == rank_of(source) and all(part == _ALL for part in rest))
    if not whole or not isinstance(index[-1], int) or rank_of(source) == 1:
        return None, -1
    return source, index[-1]


def first_part(node: fx.Node) -> tuple[fx.Node | None, int]:
    """(source, e) of `source[e]` along the first dimension."""
    if is_call(node, "select") and argument(node, 1, "dim") == 0:
        return node.args[0], argument(node, 2, "index")  # type: ignore[return-value]
    if node.target is operator.getitem and is_tensor(node.args[0]) and isinstance(node.args[1], int):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None, -1


def _part(call: fx.Node, index: Any, *names: str) -> tuple[fx.Node | None, int]:
    """(source, e) of part e of a source cut into single columns."""
    if not is_call(call, *names) or not isinstance(index, int) or not is_tensor(call.args[0]):
        return None, -1
    source: fx.Node = call.args[0]  # type: ignore[assignment]
    dim = argument(call, 1 if is_call(call, "unbind") else 2, "dim", 0)
    size = value(source).shape[-1]
    cuts = argument(call, 1, "split_size" if is_call(call, "split") else "chunks")
    is_single = is_call(call, "unbind") or cuts == (1 if is_call(call, "split") else size)
    return (source, index) if dim in (-1, (rank_of(source) or 0) - 1) and is_single else (None, -1)


def zero_outside(scores: fx.Node) -> fx.Node:
    """The ids [T, k] (or [T]) outside of which `scores` [T, E] are zero by structure. Raises NoMatch."""
    return same_ids(routed_ids(scores))


def _nonzero(node: fx.Node) -> tuple[fx.Node | None, int]:
    """(mask, i) where `node` is entry i of where(mask), or column i of nonzero(mask)."""
    if node.target is operator.getitem and not is_tensor(node.args[0]):
        call, position = node.args
        is_tuple = is_call(call, "where") and len(call.args) == 1 and not call.kwargs  # type: ignore[union-attr]
        is_tuple = is_tuple or (is_call(call, "nonzero") and argument(call, 1, "as_tuple", False))  # type: ignore[arg-type]
        return (call.args[0], position) if is_tuple else (None, -1)  # type: ignore[union-attr, return-value]
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_call(source, "nonzero", "argwhere"):
        return None, -1
    mask: fx.Node = source.args[0]  # type: ignore[assignment]
    if is_call(node, "squeeze", "flatten", "view", "reshape") and rank_of(mask) == 1 and rank_of(node) == 1:
        return mask, 0
    if node.target is operator.getitem and isinstance(node.args[1], tuple) and node.args[1][0] == _ALL:
        position = node.args[1][1]
        return (mask, position) if isinstance(position, int) and position >= 0 else (None, -1)
    return None, -1


def _permutation(node: fx.Node) -> tuple[int, ...] | None:
    """Where each dimension of the result comes from."""
    if is_call(node, "permute"):
        dims = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        return tuple(d % len(dims) for d in dims)  # type: ignore[operator]
    rank = rank_of(node) or 0
    if is_call(node, "t") or (is_call(node, "transpose") and rank == 2):
        return (1, 0)
    if is_call(node, "transpose") and rank == 3 and {d % 3 for d in node.args[1:3]} == {0, 2}:  # type: ignore[operator]
        return (2, 1, 0)
    return None


def _dim(node: fx.Node) -> int | None:
    """The one dimension that a reduction reduces."""
    dims = argument(node, 1, "dim")
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    rank = rank_of(node.args[0]) or 0  # type: ignore[arg-type]
    return listed[0] % rank if len(listed) == 1 and isinstance(listed[0], int) and rank else None
