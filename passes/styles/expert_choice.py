"""Slots that every expert fills with its best tokens (expert choice): which token is in a slot is in the ids.

    weights, ids = scores.T.topk(C)      slots = tokens[ids]       exit = zeros(T, D).index_add(0, ids.flatten(), out * weights)

A region of `slots.py` is extended to the tokens that are gathered and the sum into tokens. Nothing has to be known of
the ids, except that both use the same.

Legend: T tokens, E experts, C slots an expert, D hidden size.
"""

from __future__ import annotations

import sympy
from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import argument, emit_for, is_call, is_gather, is_tensor, rank_of, shape
from disagmoe_compile.passes.regions import NoMatch, Region
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes
from disagmoe_compile.passes.styles.moves import moved
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.slot_pieces import ExpertsLeaf
from disagmoe_compile.passes.styles.slots import SlotMatch, expert_of_slots

_ADDS = ("index_add", "scatter_add")


def with_expert_choice(graph: fx.Graph, slots: SlotMatch) -> Region:
    """The region from the tokens to their sums around `slots`. Raises NoMatch."""
    return _Match(graph, slots).region()


class _Match:
    def __init__(self, graph: fx.Graph, slots: SlotMatch) -> None:
        self.graph, self.slots, self.layout = graph, slots, slots.layout
        self.function = PairFunction(graph, self._leaf, self.layout.sizes)
        self.of_experts = ExpertsLeaf(self.function)
        self.tokens: fx.Node | None = None
        self.ids: fx.Node | None = None
        self.ids_axes: Axes = ()
        self.weights: fx.Node | None = None

    def region(self) -> Region:
        total = self._total()
        base, index = total.args[0], argument(total, 2, "index")
        source = argument(total, 3, "source", argument(total, 3, "src"))
        if (
            argument(total, 1, "dim") != 0
            or argument(total, 4, "alpha", 1) != 1
            or not is_call(base, "zeros", "zeros_like", "new_zeros")
            or base in storages(self.graph).writers
            or rank_of(total) != 2
        ):
            raise NoMatch(total, "it does not sum rows into zeros")
        pairs: Axes = (tuple(name for axis in self.layout.axes if axis != ONE for name in axis), ROW)
        result = self.function.convert(source, pairs)
        if self.tokens is None or self.ids is None:
            raise NoMatch(total, "its rows are not gathered from tokens")
        if is_call(total, "scatter_add"):
            while is_call(index, "expand", "expand_as", "unsqueeze", "broadcast_to") or _adds_dimension(
                index
            ):
                index = index.args[0]
        if (
            rank_of(index) != 1
            or self._source(index, pairs[:1]) != self._source(self.ids, self.ids_axes)
            or shape(total)[0] != shape(self.tokens)[0]
        ):
            raise NoMatch(total, "it adds rows to other tokens than they came from")
        with self.graph.inserting_before(total):
            token_ids = emit_for(self.graph, self.ids, "reshape", (self.ids, -1))
        share = sympy.sympify(shape(index)[0]) / sympy.sympify(shape(self.tokens)[0])
        return Region(
            style="expert_choice",
            tokens=self.tokens,
            token_ids=token_ids,
            expert_ids=expert_of_slots(self.graph, total, self.layout.rows, self.layout),
            weights=self.weights,
            params=tuple(self.function.params),
            function=self.function.finish(result),
            exit=total,
            num_experts=self.layout.num_experts,
            top_k=max(1, int(share)) if share.is_number else 1,
        )

    def _total(self) -> fx.Node:
        """The call that sums the experts' rows into tokens."""
        reached = {self.slots.exit}
        for node in self.graph.nodes:
            if is_tensor(node) and reached & set(node.all_input_nodes):
                if is_call(node, *_ADDS):
                    return node
                reached.add(node)
                if len(reached) > 32:
                    break
        raise NoMatch(self.slots.exit, "its rows are not added to their tokens")

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        entered = self.of_experts(node, axes)
        if entered is not None:
            return entered
        names = tuple(name for axis in axes if isinstance(axis, tuple) for name in axis)
        if node in self.slots.inside or names != tuple(
            name for axis in self.layout.axes if axis != ONE for name in axis
        ):
            return None
        if ROW not in axes:
            if self.weights not in (None, node):
                raise NoMatch(node, "a second kind of weights enters the experts")
            self.weights = node
            return self.function.weight(axes)
        if is_gather(node) or is_call(node, "index_select"):
            ids: fx.Node = node.args[1] if is_gather(node) else argument(node, 2, "index")  # type: ignore[assignment]
            if axes[-1] != ROW or rank_of(node.args[0]) != 2 or argument(node, 1, "dim", 0) not in (0, ids):  # type: ignore[arg-type]
                raise NoMatch(node, "it does not gather tokens [T, D]")
            known = self.tokens is None or self.tokens is node.args[0]
            if not known or (
                self.ids is not None and self._source(ids, axes[:-1]) != self._source(self.ids, self.ids_axes)
            ):
                raise NoMatch(node, "a second kind of tokens enters the experts")
            self.tokens, self.ids, self.ids_axes = node.args[0], ids, axes[:-1]  # type: ignore[assignment]
            return self.function.rows
        return None

    def _source(self, ids: fx.Node, axes: Axes) -> tuple[fx.Node, Axes]:
        """The ids before what only moves them, with their axes there."""
        source = moved(ids, axes, self.layout.sizes)
        return (ids, axes) if source is None else self._source(*source)


def _adds_dimension(index: fx.Node) -> bool:
    parts = index.args[1] if len(index.args) > 1 and isinstance(index.args[1], tuple) else ()
    return None in parts and not any(is_tensor(part) for part in parts)
