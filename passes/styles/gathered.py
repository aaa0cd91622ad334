"""Regions that gather a copy of an expert's weights for every pair and multiply in one batch (Hugging Face's
`batched_mm`, and einsums over `w[ids]`).

    hidden = act(einsum("td,tkdh->tkh", tokens, w1[ids]))         rows = tokens.repeat_interleave(k, 0)
    exit   = einsum("tkh,tkhd,tk->td", hidden, w2[ids], weights)  exit = (bmm(w[ids.view(-1)], rows) * w).view(T, k, D).sum(1)

Pair (t, j) is computed by expert `ids[t, j]` whatever the ids are, so nothing needs to be known about the router. A
region may have several leading dimensions in place of T.

Legend: T tokens, k experts a token, P = T * k pairs, D hidden size, H expert hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_gather, is_tensor, rank_of, shape, value
from disagmoe_compile.passes.regions import Found, NoMatch, Region
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes
from disagmoe_compile.passes.styles.ids import is_not_negative
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.parameters import (
    is_parameter,
    is_stacked,
    parameter_leaf,
    stacked_parameter,
)
from disagmoe_compile.passes.styles.sums import pair_sums

_CHOICE = "choice"
_RESHAPES = ("view", "reshape", "flatten", "contiguous")


@dataclass(frozen=True, slots=True)
class Gathered:
    name: str = "gathered"

    def find(self, graph: fx.Graph) -> Found:
        by_ids: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            taken = weights_taken(node)
            if taken is not None and (rank_of(taken[0]) or 0) >= 3:
                by_ids[_base(taken[1])].append(node)
        regions, stopped = [], []
        for ids, gathers in by_ids.items():
            try:
                regions.append(_Match(graph, ids, gathers).region())
            except NoMatch as reason:
                stopped.append(reason)
        return Found(tuple(regions), tuple(stopped))


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

    def __init__(self, graph: fx.Graph, ids: fx.Node, gathers: list[fx.Node]) -> None:
        self.graph, self.ids, self.gathers = graph, ids, gathers
        if (rank_of(ids) or 0) < 2 or not isinstance(shape(ids)[-1], int):
            raise NoMatch(
                gathers[0], "the ids are not [tokens, experts a token] with a fixed number of experts"
            )
        *lead, self.top_k = shape(ids)
        self.token_axes = tuple((f"token{i}",) for i in range(len(lead)))
        self.sizes = {f"token{i}": size for i, size in enumerate(lead)} | {_CHOICE: self.top_k}
        self._reset()

    def _reset(self) -> None:
        self.function = PairFunction(self.graph, self._leaf, self.sizes)
        self.tokens: fx.Node | None = None
        self.weights: fx.Node | None = None
        self.num_experts: int | None = None

    def region(self) -> Region:
        reason: NoMatch | None = None
        for node in self._results():
            for pair_sum in pair_sums(node):
                if pair_sum.size != self.top_k:
                    continue
                self._reset()
                try:
                    return self._region(node, pair_sum.convert(self.function, self.token_axes, (_CHOICE,)))
                except NoMatch as stopped:
                    reason = stopped
            if self.top_k > 1 and self._is_per_token(node):
                raise reason or NoMatch(node, "the pairs of a token are not plainly summed")
        raise reason or NoMatch(
            self.gathers[0], "what is computed with these weights is never summed over pairs"
        )

    def _region(self, exit_node: fx.Node, result: Converted) -> Region:
        if self.tokens is None or self.num_experts is None or not result.per_pair:
            raise NoMatch(exit_node, "no tokens are multiplied with the gathered weights")
        if not is_not_negative(self.ids):
            raise NoMatch(self.ids, "ids may be negative, and would count experts from the end")
        if (rank_of(exit_node) or 0) > 2 and rank_of(self.tokens) != rank_of(exit_node):
            raise NoMatch(exit_node, "its tokens are laid out differently from the tokens that enter")
        return Region(
            style="gathered",
            tokens=self.tokens,
            token_ids=None,
            expert_ids=self.ids,
            weights=self.weights,
            params=tuple(self.function.params),
            function=self.function.finish(result),
            exit=exit_node,
            num_experts=self.num_experts,
            top_k=int(self.top_k),
        )

    def _results(self) -> list[fx.Node]:
        """What is computed from the gathered weights, in graph order, up to the values of a token."""
        pending, reached = list(self.gathers), set(self.gathers)
        while pending:
            for user in pending.pop().users:
                if user not in reached and is_tensor(user):
                    reached.add(user)
                    if self.top_k == 1 or not self._is_per_token(user):
                        pending.append(user)
        return [node for node in self.graph.nodes if node in reached and node not in self.gathers]

    def _is_per_token(self, node: fx.Node) -> bool:
        lead = shape(self.ids)[:-1]
        return rank_of(node) == len(lead) + 1 and shape(node)[:-1] == lead

    # -- what enters

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        taken = weights_taken(node)
        if taken is not None:
            return self._expert_slice(node, *taken, axes)
        if is_parameter(node):
            return parameter_leaf(self.function, node, axes)
        if ("expert",) in axes:
            return None
        if any(_CHOICE in axis for axis in axes if axis not in (ROW, ONE)):
            if all(axis != ROW for axis in axes) and self._flat(axes) == (
                *self._flat(self.token_axes),
                _CHOICE,
            ):
                self.weights = self._one("weights", self.weights, node)
                return self.function.weight(axes)
            return None
        if axes[-1:] == (ROW,) and self._flat(axes[:-1]) == self._flat(self.token_axes):
            self.tokens = self._one("tokens", self.tokens, node)
            return self.function.rows
        return None

    def _expert_slice(self, node: fx.Node, source: fx.Node, ids: fx.Node, axes: Axes) -> Converted:
        rank = rank_of(ids) or 0
        same_order = self._flat(axes[:rank]) == (*self._flat(self.token_axes), _CHOICE)
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

    @staticmethod
    def _one(what: str, known: fx.Node | None, node: fx.Node) -> fx.Node:
        if known not in (None, node):
            raise NoMatch(node, f"a second kind of {what} enters the experts")
        return node


def _base(ids: fx.Node) -> fx.Node:
    """The ids as [T, k], behind flattening."""
    while (
        is_call(ids, *_RESHAPES)
        and is_tensor(ids.args[0])
        and (rank_of(ids.args[0]) or 0) >= (rank_of(ids) or 0)
    ):  # type: ignore[arg-type]
        ids = ids.args[0]  # type: ignore[assignment]
    return ids
