"""Regions that run every expert on every token and rely on routing weights of zero (Llama 4; einsums over all experts).

    scores_TE = full(-inf).scatter(1, ids, values).sigmoid()       all but the top-k are zero by structure (`zeros.py`)
    rows      = tokens.repeat(E, 1) * scores.T.reshape(-1, 1)      hidden = act(einsum("td,edh->teh", tokens, w1))
    exit      = bmm(act(bmm(rows.view(E, T, D), W1)), W2).sum(0)   exit   = einsum("teh,ehd,te->td", hidden, w2, scores)

Sparse only if both hold: the zeros come from the ids of a top-k, not from numbers that happen to be small; and a weight
of zero gives a row of zeros, whatever the token and the parameters (so no biases where weights are at the input).

Legend: T tokens, k experts a token, D hidden size, H expert hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import is_tensor, rank_of, shape, value
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import Found, NoMatch, Region, only_one
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.parameters import is_parameter, is_stacked, parameter_leaf
from disagmoe_compile.passes.styles.products import read_product
from disagmoe_compile.passes.styles.slots import Origin, origin
from disagmoe_compile.passes.styles.sums import pair_sums
from disagmoe_compile.passes.styles.zero_weight import require_zero
from disagmoe_compile.passes.styles.zeros import routed_ids

_EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class MaskedDense:
    name: str = "masked_dense"

    def find(self, graph: fx.Graph) -> Found:
        regions, stopped = [], []
        done: set[fx.Node] = set()
        for node in graph.nodes:
            lead = None if node in done else _every_token(graph, node)
            if lead is None:
                continue
            match = _Match(graph, node, *lead)
            done |= match.inside
            try:
                regions.append(match.region())
            except NoMatch as reason:
                stopped.append(reason)
        return Found(tuple(regions), tuple(stopped))


def _every_token(graph: fx.Graph, node: fx.Node) -> tuple[tuple[Dim, ...], int] | None:
    """(sizes of the tokens' dimensions, number of experts) where `node` multiplies tokens with all experts' matrices."""
    product = read_product(node)
    if product is None or len(product.terms) != 2:
        return None
    weights = [term for term in product.terms if is_stacked(term.node)]
    if len(weights) != 1 or len(weights[0].letters) != 3:
        return None
    (rows,) = [term for term in product.terms if term is not weights[0]]
    expert, *matrix = weights[0].letters
    experts = shape(weights[0].node)[0]
    lead = [letter for letter in rows.letters if letter not in matrix and letter != expert]
    if not lead or expert not in product.letters or not isinstance(experts, int):
        return None
    if origin(graph, rows.node) is not Origin.TOKENS:
        return None
    return tuple(product.size_of(letter) for letter in lead), experts


class _Match:
    """One candidate: everything computed from tokens times the matrices of all experts. Raises NoMatch."""

    def __init__(self, graph: fx.Graph, first: fx.Node, lead: tuple[Dim, ...], experts: int) -> None:
        self.graph, self.first, self.lead, self.num_experts = graph, first, lead, experts
        self.token_axes: Axes = tuple((f"token{i}",) for i in range(len(lead)))
        self.sizes: dict[str, Dim] = {f"token{i}": size for i, size in enumerate(lead)} | {_EXPERT: experts}
        self.inside = self._inside()
        self._reset()

    def _reset(self) -> None:
        self.function = PairFunction(self.graph, self._leaf, self.sizes)
        self.tokens: fx.Node | None = None
        self.scores: fx.Node | None = None

    def region(self) -> Region:
        reason: NoMatch | None = None
        for node in self.graph.nodes:
            if node not in self.inside or node is self.first:
                continue
            for pair_sum in pair_sums(node):
                if pair_sum.size != self.num_experts:
                    continue
                self._reset()
                try:
                    return self._region(node, pair_sum.convert(self.function, self.token_axes, (_EXPERT,)))
                except NoMatch as stopped:
                    reason = stopped
            if self._is_per_token(node):
                raise reason or NoMatch(node, "the experts of a token are not plainly summed")
        raise reason or NoMatch(
            self.first, "what every expert computes of every token is never summed over experts"
        )

    def _region(self, exit_node: fx.Node, result: Converted) -> Region:
        if self.tokens is None or self.scores is None:
            raise NoMatch(exit_node, "no routing scores enter the experts")
        ids = routed_ids(self.scores)
        function = self.function.finish(result)
        require_zero(exit_node, function, self.tokens, value(self.scores).dtype, self.function.params)
        top_k = shape(ids)[-1] if rank_of(ids) == rank_of(self.scores) else 1
        if not isinstance(top_k, int):
            raise NoMatch(ids, "the number of experts a token is not fixed")
        if shape(ids)[: len(self.lead)] != self.lead or (rank_of(ids) or 0) > len(self.lead) + 1:
            raise NoMatch(ids, "its experts are chosen for other tokens than those that enter")
        return Region(
            style="masked_dense",
            tokens=self.tokens,
            token_ids=None,
            expert_ids=ids,
            weights=self.scores,
            params=tuple(self.function.params),
            function=function,
            exit=exit_node,
            num_experts=self.num_experts,
            top_k=top_k,
            weights_by_expert=True,
        )

    def _inside(self) -> set[fx.Node]:
        """What is computed from the first product, up to the values of a token."""
        pending, inside = [self.first], {self.first}
        while pending:
            node = pending.pop()
            for user in node.users:
                if user not in inside and (is_tensor(user) or is_tensor(node)):
                    inside.add(user)
                    if not self._is_per_token(user):
                        pending.append(user)
        return inside

    def _is_per_token(self, node: fx.Node) -> bool:
        return rank_of(node) == len(self.lead) + 1 and shape(node)[:-1] == self.lead

    # -- what enters

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        if is_parameter(node):
            return parameter_leaf(self.function, node, axes)
        if node in self.inside:
            return None
        pairs = tuple(axis for axis in axes if axis not in (ROW, ONE))
        if pairs == self.token_axes and axes[len(pairs) :] == (ROW,):
            self.tokens = only_one("tokens", self.tokens, node)
            return self.function.rows
        if axes == (*self.token_axes, (_EXPERT,)):
            self.scores = only_one("routing scores", self.scores, node)
            return self.function.weight(axes)
        return None
