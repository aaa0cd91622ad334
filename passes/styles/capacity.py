"""Slots whose pairs are certain: each holds at most one routed pair, so that only the routed rows need to be sent.

    GShard      slots = einsum("tec,td->ecd", dispatch, tokens)        exit = einsum("tec,ecd->td", combine, out)
    padded      zeros(E, C, D)[ids, slot] = rows of the pairs          exit = (out[ids, slot] * weights).view(T, k, D).sum(1)

A region of `slots.py` is extended to the tokens before its slots and to the sum behind them if all of this is certain
from how the masks and slot numbers are computed (`positions.py`): a pair that is kept has a slot of its own, is read
back from that slot, and a pair that is not kept has a weight of zero by structure. Dropped pairs then are pairs of no
expert. Otherwise the region stays one of slots. A kept pair whose weight is exactly 0.0 still counts as routed.

Legend: T tokens, k experts a token, E experts, C slots an expert, D hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import storage_roots, storages, written
from disagmoe_compile.passes.metadata import argument, emit_for, is_call, is_tensor, rank_of, shape, value
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch, Region
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes, Axis
from disagmoe_compile.passes.styles.ids import are_distinct
from disagmoe_compile.passes.styles.moves import moved
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.positions import (
    CHOICE,
    EXPERT,
    SLOT,
    TOKEN,
    Factors,
    Kept,
    Router,
    Slot,
    certainly_at_least,
    same,
)
from disagmoe_compile.passes.styles.products import Product, read_product
from disagmoe_compile.passes.styles.slot_pieces import ExpertsLeaf
from disagmoe_compile.passes.styles.slots import SlotMatch, is_maximum_with_position
from disagmoe_compile.passes.styles.sums import PairSum, pair_sums
from disagmoe_compile.passes.styles.zero_weight import require_zero

_MOST_STEPS = 4  # from an expert's rows to the weighted values of their tokens
_EXPERT_SLOT: Axes = ((EXPERT,), (SLOT,))


def with_capacity(graph: fx.Graph, slots: SlotMatch) -> Region:
    """The region of routed pairs around `slots`. Raises NoMatch where it is not certain."""
    return _Match(graph, slots).region()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where pairs are written to or read from: their slot, and which are kept as far as that is said there."""

    slot: Slot
    kept: Kept | None


class _Match:
    def __init__(self, graph: fx.Graph, slots: SlotMatch) -> None:
        self.graph, self.slots = graph, slots
        if tuple(axis for axis in slots.layout.axes if axis != ONE) != _EXPERT_SLOT:
            raise NoMatch(slots.first, "its slots are not [experts, slots]")
        self.ids = _only_ids(slots)
        self.token_axes: Axes = ((TOKEN,),)
        self.has_choices = rank_of(self.ids) == 2 and shape(self.ids)[1] != 1
        self.pair_axes: Axes = ((TOKEN,), (CHOICE,)) if self.has_choices else ((TOKEN,),)
        names = [axis[0] for axis in self.pair_axes]
        self.sizes: dict[str, Dim] = {**slots.layout.sizes, **dict(zip(names, shape(self.ids)))}
        self.written = storages(graph).writers
        self.router = Router(self._is_ids, self.sizes, self.written)
        self.roots = storage_roots(graph)
        self.results = self._results()
        self._reset()

    def _reset(self) -> None:
        self.function = PairFunction(self.graph, self._leaf, self.sizes)
        self.of_experts = ExpertsLeaf(self.function)
        self.tokens: fx.Node | None = None
        self.weights: tuple[tuple[fx.Node, Axes], ...] = ()
        self.weight_dtype: torch.dtype | None = None
        self.kept: Kept | None = None
        self.filled: _Place | None = None
        self.read: _Place | None = None

    def region(self) -> Region:
        reason: NoMatch | None = None
        for node in self.results:
            for read in self._readings(node):
                self._reset()
                try:
                    return self._region(node, read())
                except NoMatch as stopped:
                    reason = stopped
        raise reason or NoMatch(self.slots.exit, "its rows are not summed back to tokens")

    def _results(self) -> list[fx.Node]:
        """What is computed from the experts' rows, up to the first values of a token, in graph order.

        Where a token has one expert nothing is summed: weights may follow the first of them.
        """
        n_tokens = shape(self.ids)[0]
        reached, found = {self.slots.exit}, []
        self.after_experts = reached
        for node in self.graph.nodes:
            if is_tensor(node) and reached & set(node.all_input_nodes):
                is_per_token = rank_of(node) == 2 and shape(node)[0] == n_tokens
                if is_per_token:
                    found.append(node)
                if not is_per_token or (not self.has_choices and len(found) < _MOST_STEPS):
                    reached.add(node)
        return found

    def _readings(self, node: fx.Node) -> list[Callable[[], Converted]]:
        readings: list[Callable[[], Converted]] = []
        product = read_product(node)
        if product is not None and len(product.terms) == 2:
            readings.append(lambda: self._combined(node, product))
        size, choice = (self.sizes[CHOICE], (CHOICE,)) if self.has_choices else (1, ONE)
        readings += [partial(self._summed, one, choice) for one in pair_sums(node) if one.size == size]
        if not self.has_choices:
            readings.append(lambda: self.function.convert(node, (*self.token_axes, ROW)))
        return readings

    def _summed(self, one: PairSum, choice: Axis) -> Converted:
        return one.convert(
            self.function, self.token_axes, choice
        )  # the function of this reading, not of the first

    def _region(self, exit_node: fx.Node, result: Converted) -> Region:
        if self.tokens is None or self.filled is None or self.read is None:
            raise NoMatch(exit_node, "it is not certain which pair is in which slot")
        self._require_own_slots(exit_node)
        top_k = shape(self.ids)[1] if self.has_choices else 1
        if not isinstance(top_k, int):
            raise NoMatch(self.ids, "the number of experts a token is not fixed")
        if not are_distinct(self.ids) and top_k > 1:
            raise NoMatch(self.ids, "a token may have the same expert twice")
        function = self.function.finish(result)
        if self.kept is not None:
            require_zero(exit_node, function, self.tokens, self.weight_dtype, self.function.params)
        return Region(
            style="capacity",
            tokens=self.tokens,
            token_ids=None,
            expert_ids=self._expert_ids(exit_node),
            weights=self._weight(exit_node),
            params=tuple(self.function.params),
            function=function,
            exit=exit_node,
            num_experts=self.slots.layout.num_experts,
            top_k=top_k,
        )

    # -- what must hold

    def _require_own_slots(self, node: fx.Node) -> None:
        assert self.filled is not None and self.read is not None
        filled, read, kept = self.filled.slot, self.read.slot, self.kept
        if kept is None:
            drops = self.filled.kept or filled.exact_below is not None or read.exact_below is not None
            if drops:
                raise NoMatch(node, "pairs beyond the capacity are not certainly weighted with zero")
            return
        # A kept pair beyond the last slot is an index error in the model itself.
        for slot in (filled, read):
            if slot.exact_below is not None and not certainly_at_least(slot.exact_below, kept.limit):
                raise NoMatch(node, "kept pairs do not have the slot of their position")
        fills_dropped = self.filled.kept is None and filled.otherwise is not None
        if fills_dropped and not certainly_at_least(filled.otherwise, kept.limit):  # type: ignore[arg-type]
            raise NoMatch(node, "a pair beyond the capacity overwrites the slot of one that is kept")
        if self.filled.kept is not None and not same(self.filled.kept.limit, kept.limit):
            raise NoMatch(node, "other pairs are sent to the experts than are read back")

    def _is_ids(self, node: fx.Node, axes: Axes) -> bool:
        while node not in self.written:
            if node is self.ids:
                return tuple(axis for axis in axes if axis != ONE) == self.pair_axes
            try:
                source = moved(node, axes, self.sizes)
            except NoMatch:
                return False
            if source is None:
                return False
            node, axes = source
        return False

    # -- what enters

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        entered = self.of_experts(node, axes)
        if entered is not None:
            return entered
        names = _flat(axes)
        if axes == (*_EXPERT_SLOT, ROW) and node not in self.slots.inside:
            return self._dispatched(node)
        is_after = node in self.after_experts or node in self.results
        if names == _flat(self.token_axes) and axes[-1:] == (ROW,) and not is_after:
            if self.tokens not in (None, node):
                raise NoMatch(node, "a second kind of tokens enters the experts")
            self.tokens = node
            return self.function.rows
        if names == _flat(self.pair_axes):
            if ROW not in axes and not is_after:
                return self._weighted(node, self.router.factors(node, axes), axes)
            if node.target is operator.getitem and isinstance(node.args[1], tuple):
                return self._read_back(node, axes)
        return None

    def _combined(self, node: fx.Node, product: Product) -> Converted:
        """`einsum("tec,ecd->td", combine, out)`: the rows of the experts, times a mask that says which are whose."""
        for mask, rows in (product.terms, product.terms[::-1]):
            if len(product.letters) != 2 or product.letters[0] not in mask.letters:
                continue
            summed = [letter for letter in rows.letters if letter not in product.letters]
            axis_of: dict[Any, Any] = {product.letters[0]: (TOKEN,), product.letters[1]: ROW}
            if len(summed) == 2:
                axis_of |= {summed[0]: (EXPERT,), summed[1]: (SLOT,)}
            else:
                axis_of |= dict.fromkeys(summed, (EXPERT, SLOT))
            result = self.function.convert(rows.node, tuple(axis_of[letter] for letter in rows.letters))
            found = self.router.factors(mask.node, tuple(axis_of[letter] for letter in mask.letters))
            self.read = self._place(node, found)
            if not found.weights:
                self.kept = found.kept
                return result
            weight = self._weighted(mask.node, found, ())
            column = self.function.call("call_method", "unsqueeze", (weight.node, -1))
            product_node = self.function.call("call_function", torch.mul, (result.node, column))
            return Converted(product_node, per_pair=True)
        raise NoMatch(node, "it does not sum the rows of the experts back to tokens")

    def _place(self, node: fx.Node, found: Factors) -> _Place:
        if not found.has_expert or found.slot is None:
            raise NoMatch(node, "it is not certain which pair is in which slot")
        if found.slot.otherwise is not None and found.kept is None:
            raise NoMatch(node, "pairs beyond the capacity are not certainly masked")
        return _Place(found.slot, found.kept)

    def _weighted(self, node: fx.Node, found: Factors, axes: Axes) -> Converted:
        if self.weights and self.weights != found.weights:
            raise NoMatch(node, "a second kind of weights enters the experts")
        if found.changed_by is not None:
            raise NoMatch(found.changed_by, "it changes the weights")
        if any(_flat(own) != _flat(self.pair_axes) for _, own in found.weights) or not found.weights:
            raise NoMatch(node, "its weights are not one for each pair")
        self.weights, self.weight_dtype = found.weights, value(node).dtype
        self.kept = self.kept or found.kept
        return self.function.weight(axes)

    def _dispatched(self, node: fx.Node) -> Converted | None:
        """What the slots hold: rows of pairs."""
        product = read_product(node)
        if product is not None and len(product.terms) == 2 and len(product.summed) == 1:
            (summed,) = product.summed
            axis_of: dict[Any, Any] = dict(zip(product.letters, (*_EXPERT_SLOT, ROW), strict=True))
            axis_of[summed] = (TOKEN,)
            for mask, rows in (product.terms, product.terms[::-1]):
                if len(mask.letters) == 3 and len(rows.letters) == 2:
                    found = self.router.factors(mask.node, tuple(axis_of[letter] for letter in mask.letters))
                    if found.weights:
                        raise NoMatch(node, "rows are weighted as they are dispatched")
                    self.filled = self._place(node, found)
                    return self.function.convert(rows.node, tuple(axis_of[letter] for letter in rows.letters))
        buffer = node
        if _is_slice(node):
            buffer = node.args[0]  # type: ignore[assignment]
        writers = [
            w for w in self.graph.nodes if (target := written(w)) and self.roots[target] is self.roots[buffer]
        ]
        if writers:
            return self._written(node, writers)
        return None

    def _written(self, node: fx.Node, writers: list[fx.Node]) -> Converted:
        """`zeros(E, C, D)[ids, slot] = rows`"""
        (writer, *more) = writers
        root = self.roots[writer.args[0]]  # type: ignore[index]
        index = writer.args[1] if writer.target is operator.setitem else None
        if more or not is_call(root, "zeros", "new_zeros", "zeros_like") or writer.args[0] is not root:
            raise NoMatch(writer, "the slots are not filled by one write to zeros")
        if not isinstance(index, tuple) or len(index) != 2 or not all(map(is_tensor, index)):
            raise NoMatch(writer, "it does not write to [expert, slot]")
        rows: fx.Node = writer.args[2]  # type: ignore[assignment]
        lead = self._layout_of_pairs(rows, shape(rows)[:-1])
        if not self._is_ids(index[0], lead):
            raise NoMatch(writer, "it does not write to [expert, slot]")
        self.filled = _Place(self.router.slot(index[1], lead), None)
        return self.function.convert(rows, (*lead, ROW))

    def _read_back(self, node: fx.Node, axes: Axes) -> Converted | None:
        """`out[ids, slot]`"""
        out, index = node.args
        if len(index) != 2 or not all(map(is_tensor, index)):  # type: ignore[arg-type]
            return None
        lead = axes[:-1]
        if not self._is_ids(index[0], lead):  # type: ignore[index, arg-type]
            raise NoMatch(node, "it reads rows of other experts than the ids say")
        self.read = _Place(self.router.slot(index[1], lead), None)  # type: ignore[index, arg-type]
        return self.function.convert(out, (*_EXPERT_SLOT, ROW))  # type: ignore[arg-type]

    def _layout_of_pairs(self, node: fx.Node, lead: tuple[Dim, ...]) -> Axes:
        if lead == shape(self.ids):
            return (*self.pair_axes, *[ONE] * (len(lead) - len(self.pair_axes)))
        if len(lead) == 1:
            return (tuple(name for axis in self.pair_axes for name in axis),)
        raise NoMatch(node, "its rows are not those of the routed pairs")

    # -- nodes that the graph does not have

    def _expert_ids(self, exit_node: fx.Node) -> fx.Node:
        """The pair's expert; E where the pair is dropped."""
        if self.kept is None or certainly_at_least(self.kept.limit, self.sizes[TOKEN]):
            return self.ids  # a token has an expert once, so no expert has more pairs than there are tokens
        if _flat(self.kept.axes) != _flat(self.pair_axes):
            raise NoMatch(self.kept.node, "its pairs are in another order than the ids")
        with self.graph.inserting_before(exit_node):
            kept = emit_for(self.graph, self.kept.node, "reshape", (self.kept.node, -1))
            ids = emit_for(self.graph, self.ids, "reshape", (self.ids, -1))
            experts = self.slots.layout.num_experts
            return emit_for(self.graph, self.kept.node, torch.where, (kept, ids, experts))

    def _weight(self, exit_node: fx.Node) -> fx.Node | None:
        if not self.weights:
            return None
        with self.graph.inserting_before(exit_node):
            flat = [emit_for(self.graph, weight, "reshape", (weight, -1)) for weight, _ in self.weights]
            total = flat[0]
            for weight in flat[1:]:
                total = emit_for(self.graph, weight, torch.mul, (total, weight))
            if value(total).dtype == self.weight_dtype:
                return total
            return emit_for(self.graph, total, "to", (total, self.weight_dtype))


def _only_ids(slots: SlotMatch) -> fx.Node:
    """The ids of the one choice that fills the slots."""
    choices = [node for node in slots.chosen_by if not is_call(node, "one_hot")]
    if len(choices) != 1 or not (
        is_call(choices[0], "topk", "argmax") or is_maximum_with_position(choices[0])
    ):
        raise NoMatch(slots.first, "its slots are not filled by one top-k of the experts")
    (choice,) = choices
    if is_call(choice, "argmax"):
        return choice
    found = [user for user in choice.users if user.target is operator.getitem and user.args[1] == 1]
    is_one_a_token = len(found) == 1 and rank_of(found[0]) == 1 and argument(choice, 1, "dim") in (-1, 1)
    if (
        len(found) != 1
        or not (rank_of(found[0]) == 2 or is_one_a_token)
        or shape(choice.args[0])[-1] != slots.layout.num_experts
    ):  # type: ignore[arg-type]
        raise NoMatch(choice, "its ids are not experts [tokens, top_k]")
    return found[0]


def _is_slice(node: fx.Node) -> bool:
    """`buffer[:, :C]`: the first slots of every expert."""
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    whole, *rest = node.args[1]
    first = rest[0] if rest else None
    tail = all(part == slice(None) for part in rest[1:])
    return (
        whole == slice(None)
        and isinstance(first, slice)
        and first.start in (None, 0)
        and first.step in (None, 1)
        and tail
    )


def _flat(axes: Axes) -> tuple[str, ...]:
    """Names of the pair axes in order, however they are flattened."""
    return tuple(name for axis in axes if isinstance(axis, tuple) for name in axis)
