"""Replaces each found region by one `experts` call over routed pairs (see `experts_op.py`); the graph still
computes the same.

The region's own nodes (sort, histogram, grouped matmuls, inverse permutation) lose their last reader and go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.aliasing import remove_dead
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.experts_op import experts
from disagmoe_compile.passes.metadata import emit, rank_of, value
from disagmoe_compile.passes.regions import Region


@dataclass(frozen=True, slots=True)
class ExpertsInfo:
    """Kept on the canonical node as `meta[metadata.EXPERTS]`."""

    boundary: int
    style: str
    num_experts: int
    top_k: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class CanonicalizeExperts:
    name: str = "canonicalize_experts"
    requires: frozenset[Capability] = frozenset({Capability.REGIONS_KNOWN})
    provides: frozenset[Capability] = frozenset({Capability.CANONICAL_EXPERTS})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        regions: tuple[Region, ...] = graph_module.meta["disagmoe_regions"]
        functions: dict[str, str] = {}
        before = len(graph_module.graph.nodes)
        replaced: dict[fx.Node, fx.Node] = {}
        for boundary, region in enumerate(regions):
            region = _follow(region, replaced)
            replaced[region.exit] = _replace(graph_module, boundary, region, functions)
        inserted = len(graph_module.graph.nodes) - before
        removed = remove_dead(graph_module.graph)
        # Regions point to nodes that are gone now; only how many there were still matters.
        graph_module.meta["disagmoe_regions"] = tuple(region.style for region in regions)
        notes = (f"{len(functions)} distinct expert functions", f"{removed} nodes removed")
        return PassReport(matched=len(regions), inserted=inserted, notes=notes)


def _follow(region: Region, replaced: dict[fx.Node, fx.Node]) -> Region:
    """A region that reads the exit of an earlier one now reads the canonical node in its place."""
    names = ("tokens", "token_ids", "expert_ids", "weights")
    moved = {name: replaced[getattr(region, name)] for name in names if getattr(region, name) in replaced}
    return replace(region, **moved)


def _replace(
    graph_module: fx.GraphModule, boundary: int, region: Region, functions: dict[str, str]
) -> fx.Node:
    graph = graph_module.graph
    # Equal layers share one function module.
    code = region.function.code
    if code not in functions:
        functions[code] = f"expert_function_{len(functions)}"
        graph_module.add_submodule(functions[code], region.function)
    with graph.inserting_before(region.exit):
        expert_P = region.expert_ids
        if rank_of(expert_P) == 2:
            expert_P = emit(graph, "reshape", (expert_P, -1))
        token_P = region.token_ids
        if token_P is None:
            pairs = emit(graph, "size", (expert_P, 0))
            every_pair = emit(graph, torch.arange, (pairs,), {"device": value(expert_P).device})
            if region.top_k > 1:
                token_P = emit(graph, torch.floor_divide, (every_pair, region.top_k))
            else:
                token_P = every_pair
        weight_P = region.weights
        if weight_P is None:
            weight_P = emit(graph, torch.ones_like, (expert_P,), {"dtype": value(region.tokens).dtype})
        elif rank_of(weight_P) == 2:
            if region.weights_by_expert:
                weight_P = emit(graph, "gather", (weight_P, 1, region.expert_ids))
            weight_P = emit(graph, "reshape", (weight_P, -1))
        function = graph.get_attr(functions[code])
        node = graph.call_function(
            experts,
            (region.tokens, token_P, expert_P, weight_P, *region.params),
            {"function": function, "num_experts": region.num_experts},
        )
    node.meta = {**region.exit.meta, "example_value": value(region.exit)}
    layer = metadata.layer_of(region.exit)
    node.meta[metadata.EXPERTS] = ExpertsInfo(boundary, region.style, region.num_experts, region.top_k, layer)
    region.exit.replace_all_uses_with(node)
    return node
