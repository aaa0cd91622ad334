"""Regions that gather a copy of an expert's weights for every pair and multiply in one batch (Hugging Face's
`batched_mm`, and einsums over `w[ids]`).

    hidden = act(einsum("td,tkdh->tkh", tokens, w1[ids]))         rows = tokens.repeat_interleave(k, 0)
    exit   = einsum("tkh,tkhd,tk->td", hidden, w2[ids], weights)  exit = (bmm(w[ids.view(-1)], rows) * w).view(T, k, D).sum(1)

Pair (t, j) is computed by expert `ids[t, j]` whatever the ids are, so nothing needs to be known about the router. A
region may have several leading dimensions in place of T. Where every token has one expert (ids [T], nothing is summed)
the region ends at the last operation with an expert's weights.

Legend: T tokens, k experts a token, P = T * k pairs, D hidden size, H expert hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import fx

from disagmoe_compile.passes.metadata import (
    argument,
    emit_for,
    is_call,
    is_gather,
    is_tensor,
    rank_of,
    shape,
    value,
)
from disagmoe_compile.passes.regions import Found, NoMatch, Region, only_one
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes, Axis
from disagmoe_compile.passes.styles.ids import is_not_negative
from disagmoe_compile.passes.styles.moves import moved
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.parameters import (
    is_parameter,
    is_stacked,
    parameter_leaf,
    stacked_parameter,
)
from disagmoe_compile.passes.styles.sums import pair_sums

_CHOICE = "choice"
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "squeeze")


@dataclass(frozen=True, slots=True)
class Gathered:
    name: str = "gathered"

    def find(self, graph: fx.Graph) -> Found:
        by_ids: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            taken = weights_taken(node)
            if taken is not None:
                by_ids[_base(taken[1])].append(node)
        regions, stopped = [], []
        for ids, gathers in by_ids.items():
            if not any(_takes_matrices(gather) for gather in gathers):
                continue
            reasons = []
            for read in _readings(graph, ids, gathers):
                try:
                    regions.append(read.region())
                    break
                except NoMatch as reason:
                    reasons.append(reason)
            else:
                stopped += reasons[:1]
        return Found(tuple(regions), tuple(stopped))


def _takes_matrices(gather: fx.Node) -> bool:
    source, _ = weights_taken(gather)  # type: ignore[misc]
    return (rank_of(source) or 0) >= 3


def _readings(graph: fx.Graph, ids: fx.Node, gathers: list[fx.Node]) -> Iterator[_Match]:
    """Ids [T, k], and ids [T] of one expert a token."""
    if (rank_of(ids) or 0) >= 2 and isinstance(shape(ids)[-1], int):
        yield _Match(graph, ids, gathers, has_choices=True)
    if rank_of(ids):
        yield _Match(graph, ids, gathers, has_choices=False)


def weights_taken(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(stacked parameter, ids) where `node` takes one slice of the parameter for each id."""
    if is_gather(node):
        source, ids = node.args
    elif is_call(node, "index_select") and argument(node, 1, "dim") == 0:
        source, ids = node.args[0], argument(node, 2, "index")
    elif is_call(node, "embedding"):
        source, ids = argument(node, 1, "weight"), node.args[0]
    else:
        return None
    if not is_tensor(ids) or value(ids).dtype.is_floating_point or not is_stacked(source):
        return None
    return source, ids


class _Match:
    """The region of everything gathered with one tensor of ids [T, k]. Raises NoMatch where it is none."""

    def __init__(self, graph: fx.Graph, ids: fx.Node, gathers: list[fx.Node], has_choices: bool) -> None:
        self.graph, self.ids, self.gathers = graph, ids, gathers
        lead = shape(ids)[:-1] if has_choices else shape(ids)
        self.lead, self.top_k = lead, int(shape(ids)[-1]) if has_choices else 1  # type: ignore[arg-type]
        self.token_axes: Axes = tuple((f"token{i}",) for i in range(len(lead)))
        self.choice: Axis = (_CHOICE,) if self.top_k > 1 else ONE
        self.sizes = {f"token{i}": size for i, size in enumerate(lead)} | {_CHOICE: self.top_k}
        self.inside = self._inside()
        self._reset()

    def _reset(self) -> None:
        self.function = PairFunction(self.graph, self._leaf, self.sizes)
        self.tokens: fx.Node | None = None
        self.weights: fx.Node | None = None
        self.num_experts: int | None = None

    def region(self) -> Region:
        reason: NoMatch | None = None
        for node in self.inside:
            for pair_sum in pair_sums(node):
                if pair_sum.size != self.top_k:
                    continue
                self._reset()
                try:
                    return self._region(node, pair_sum.convert(self.function, self.token_axes, self.choice))
                except NoMatch as stopped:
                    reason = stopped
            if self.top_k > 1 and self._is_per_token(node):
                raise reason or NoMatch(node, "the pairs of a token are not plainly summed")
        for node in self._last_of_one_expert() if self.top_k == 1 else ():
            self._reset()
            try:
                return self._region(node, self.function.convert(node, (*self.token_axes, ROW)))
            except NoMatch as stopped:
                reason = stopped
        raise reason or NoMatch(
            self.gathers[0], "what is computed with these weights is never summed over pairs"
        )

    def _region(self, exit_node: fx.Node, result: Converted) -> Region:
        if self.tokens is None or self.num_experts is None or not result.per_pair:
            raise NoMatch(exit_node, "no tokens are multiplied with the gathered weights")
        if (rank_of(exit_node) or 0) > 2 and rank_of(self.tokens) != rank_of(exit_node):
            raise NoMatch(exit_node, "its tokens are laid out differently from the tokens that enter")
        return Region(
            style="gathered",
            tokens=self.tokens,
            token_ids=None,
            expert_ids=self._counted_from_the_start(self.num_experts),
            weights=self.weights,
            params=tuple(self.function.params),
            function=self.function.finish(result),
            exit=exit_node,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )

    def _counted_from_the_start(self, num_experts: int) -> fx.Node:
        """The ids; -1, which takes the last expert's weights but would be no expert of a pair, as E - 1."""
        if is_not_negative(self.ids):
            return self.ids
        first = next(node for node in self.graph.nodes if node in self.gathers)
        with self.graph.inserting_before(first):
            return emit_for(self.graph, self.ids, torch.remainder, (self.ids, num_experts))

    def _inside(self) -> list[fx.Node]:
        """What is computed from the gathered matrices, in graph order, up to the values of a token."""
        pending = [gather for gather in self.gathers if _takes_matrices(gather)]
        reached = set(pending)
        while pending:
            for user in pending.pop().users:
                if user not in reached and (is_tensor(user) or is_call(user, "chunk", "split")):
                    reached.add(user)
                    if self.top_k == 1 or not self._is_per_token(user):
                        pending.append(user)
        return [node for node in self.graph.nodes if node in reached and node not in self.gathers]

    def _last_of_one_expert(self) -> Iterator[fx.Node]:
        """Values of a token, from the last operation with its expert's weights on."""
        of_experts = [n for n in self.inside if any(source in self.gathers for source in n.all_input_nodes)]
        while of_experts:
            last = of_experts.pop()
            per_token = filter(self._is_per_token, self.inside[self.inside.index(last) :])
            yield from islice(per_token, 2)
            if any(source in self.gathers and _takes_matrices(source) for source in last.all_input_nodes):
                return

    def _is_per_token(self, node: fx.Node) -> bool:
        return is_tensor(node) and rank_of(node) == len(self.lead) + 1 and shape(node)[:-1] == self.lead

    # -- what enters

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        taken = weights_taken(node)
        if taken is not None:
            return self._expert_slice(node, *taken, axes)
        if is_parameter(node):
            return parameter_leaf(self.function, node, axes)
        if ("expert",) in axes or node in self.inside:
            return None
        names = self._flat(axes)
        if ONE in axes and self._is_move(node, axes):
            return None  # of the same tokens or weights, with a dimension more
        if ROW not in axes and names == self._flat((*self.token_axes, self.choice)):
            if not value(node).is_floating_point():
                raise NoMatch(node, "it takes part in the experts' rows, and is no weight")
            self.weights = only_one("weights", self.weights, node)
            return self.function.weight(axes)
        if axes[-1:] == (ROW,) and axes.count(ROW) == 1 and names == (*self._flat(self.token_axes), ROW):
            self.tokens = only_one("tokens", self.tokens, node)
            return self.function.rows
        return None

    def _is_move(self, node: fx.Node, axes: Axes) -> bool:
        try:
            return moved(node, axes, self.sizes) is not None
        except NoMatch:
            return False

    def _expert_slice(self, node: fx.Node, source: fx.Node, ids: fx.Node, axes: Axes) -> Converted:
        rank = rank_of(ids) or 0
        same_order = self._flat(axes[:rank]) == self._flat((*self.token_axes, self.choice))
        if _base(ids) is not self.ids or not same_order or any(axis != ROW for axis in axes[rank:]):
            raise NoMatch(node, "it takes weights of other experts than the ids of its pairs say")
        experts = shape(source)[0]
        if not isinstance(experts, int) or self.num_experts not in (None, experts):
            raise NoMatch(node, "the number of experts is not the same fixed number everywhere")
        self.num_experts = experts
        return stacked_parameter(self.function, source)

    @staticmethod
    def _flat(axes: Axes) -> tuple[str, ...]:
        """Names of the pair axes in order, however they are flattened."""
        return tuple(
            name for axis in axes if axis != ONE for name in ((axis,) if isinstance(axis, str) else axis)
        )


def _base(ids: fx.Node) -> fx.Node:
    """The ids as [T, k], behind flattening."""
    while (
        is_call(ids, *_RESHAPES)
        and is_tensor(ids.args[0])
        and (rank_of(ids.args[0]) or 0) >= (rank_of(ids) or 0)
    ):  # type: ignore[arg-type]
        ids = ids.args[0]  # type: ignore[assignment]
    return ids
