"""A found MoE region, and the languages of finding one: what matchers return and how they give up.

A matcher (one file a style family in `styles/`) looks for regions of its style by dataflow alone; names of
modules or nodes are never evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import fx

from disagmoe_compile.passes.metadata import describe

ParamNodes: TypeAlias = fx.Node | tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """One MoE region of the graph.

    `tokens` [T, D]; `token_ids` [P], or None where pair p belongs to token p // top_k; `expert_ids` [P] or
    [T, k]; `weights` [P] or [T, k], None where the region applies none, or [T, E] where `weights_by_expert`;
    `params`: each a parameter stacked over experts (or a view of one as [E, ...]), or the E separate parameters
    of the experts in their order. `exit` [T, D] the plain sum over pairs, added to `base` [T, D] where there is
    one. `function(rows_PD, weight_P, *params)` computes one expert's rows.

    Where experts work pair by pair, tokens are pairs, `top_k` is 1, and `exit` sums every `summed` of their rows.

    `chosen_by`: choices that routed the tokens where `expert_ids` do not say so.

    Tokens, ids, weights and exit may have several leading dimensions in place of T.
    """

    style: str
    tokens: fx.Node
    token_ids: fx.Node | None
    expert_ids: fx.Node
    weights: fx.Node | None
    params: tuple[ParamNodes, ...]
    function: fx.GraphModule
    exit: fx.Node
    num_experts: int
    top_k: int
    weights_by_expert: bool = False
    base: fx.Node | None = None
    chosen_by: tuple[fx.Node, ...] = ()
    summed: int = 1

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.top_k < 1 or self.summed < 1:
            raise ValueError(
                f"a region has experts: num_experts {self.num_experts}, top_k {self.top_k}, summed {self.summed}"
            )


class NoMatch(Exception):
    """A candidate is not a region of the style: which node stopped the match, and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{describe(node)}: {reason}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Found:
    regions: tuple[Region, ...]
    stopped: tuple[NoMatch, ...]


class Style(Protocol):
    """A style family. `find` returns the regions it recognises and the candidates that it had to give up."""

    @property
    def name(self) -> str: ...

    def find(self, graph: fx.Graph) -> Found: ...


def in_graph_order(graph: fx.Graph, regions: Iterable[Region]) -> tuple[Region, ...]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    return tuple(sorted(regions, key=lambda region: order[region.exit]))


def only_one(what: str, known: fx.Node | None, node: fx.Node) -> fx.Node:
    """`node`; raises NoMatch where another node has entered the experts as `what` before."""
    if known not in (None, node):
        raise NoMatch(node, f"a second kind of {what} enters the experts")
    return node
