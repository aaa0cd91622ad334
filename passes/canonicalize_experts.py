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
from disagmoe_compile.passes.metadata import emit, rank_of, shape, value
from disagmoe_compile.passes.regions import ParamNodes, Region


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
    names = ("tokens", "token_ids", "expert_ids", "weights", "base")
    moved = {name: replaced[getattr(region, name)] for name in names if getattr(region, name) in replaced}
    return replace(region, **moved)


def _replace(
    graph_module: fx.GraphModule, boundary: int, region: Region, functions: dict[str, str]
) -> fx.Node:
    """The node that takes the place of the region's exit."""
    graph = graph_module.graph
    # Equal layers share one function module.
    code = region.function.code
    if code not in functions:
        functions[code] = f"expert_function_{len(functions)}"
        graph_module.add_submodule(functions[code], region.function)
    with graph.inserting_before(region.exit):
        expert_P = _flat(graph, region.expert_ids)
        token_P = region.token_ids
        if token_P is None:
            token_P = _token_of_each_pair(graph, expert_P, region.top_k)
        weight_P = _weight_of_each_pair(graph, region, expert_P)
        params = [_param(graph, nodes) for nodes in region.params]
        function = graph.get_attr(functions[code])
        node = graph.call_function(
            experts,
            (_rows(graph, region.tokens), token_P, expert_P, weight_P, *params),
            {"function": function, "num_experts": region.num_experts},
        )
        node.meta = {**region.exit.meta, "example_value": _rows_value(graph, region)}
        result = node if rank_of(region.exit) == 2 else _like_tokens(graph, node, region.tokens)
        if region.summed > 1:
            choices = emit(graph, "unflatten", (result, 0, (-1, region.summed)))
            result = emit(graph, "sum", (choices, 1))
        if region.base is not None:
            result = emit(graph, torch.add, (region.base, result))
    layer = metadata.layer_of(region.exit)
    node.meta[metadata.EXPERTS] = ExpertsInfo(boundary, region.style, region.num_experts, region.top_k, layer)
    region.exit.replace_all_uses_with(result)
    return result


def _rows(graph: fx.Graph, tokens: fx.Node) -> fx.Node:
    """[T, D], whatever the leading dimensions."""
    return tokens if rank_of(tokens) == 2 else emit(graph, "reshape", (tokens, -1, shape(tokens)[-1]))


def _rows_value(graph: fx.Graph, region: Region) -> torch.Tensor:
    """[T, D_out], also where the exit has several leading dimensions, sums the rows, or has a number of them that is unknown."""
    tensor, tokens = value(region.exit), value(region.tokens)
    if tensor.dim() == 2 and shape(region.exit)[0] == shape(region.tokens)[0]:
        return tensor  # type: ignore[no-any-return]
    with metadata.fake_mode_of(graph), torch.enable_grad():
        rows = tensor.new_empty((tokens.reshape(-1, tokens.shape[-1]).shape[0], tensor.shape[-1]))
        return rows.requires_grad_(tensor.requires_grad)


def _like_tokens(graph: fx.Graph, rows: fx.Node, tokens: fx.Node) -> fx.Node:
    """[T, D] with the leading dimensions of the tokens."""
    leading = [
        size if isinstance(size, int) else emit(graph, "size", (tokens, dim))
        for dim, size in enumerate(shape(tokens)[:-1])
    ]
    return emit(graph, "reshape", (rows, *leading, shape(rows)[-1]))


def _flat(graph: fx.Graph, pairs: fx.Node) -> fx.Node:
    return pairs if rank_of(pairs) == 1 else emit(graph, "reshape", (pairs, -1))


def _token_of_each_pair(graph: fx.Graph, expert_P: fx.Node, top_k: int) -> fx.Node:
    pairs = emit(graph, "size", (expert_P, 0))
    every_pair = emit(graph, torch.arange, (pairs,), {"device": value(expert_P).device})
    return emit(graph, torch.floor_divide, (every_pair, top_k)) if top_k > 1 else every_pair


def _weight_of_each_pair(graph: fx.Graph, region: Region, expert_P: fx.Node) -> fx.Node:
    if region.weights is None:
        return emit(graph, torch.ones_like, (expert_P,), {"dtype": value(region.tokens).dtype})
    weights = region.weights
    if region.weights_by_expert:
        ids = region.expert_ids
        if rank_of(ids) != rank_of(weights):  # one expert a token
            ids = emit(graph, "unsqueeze", (ids, -1))
        weights = emit(graph, "gather", (weights, -1, ids))
    return _flat(graph, weights)


def _param(graph: fx.Graph, nodes: ParamNodes) -> fx.Node:
    """[E, ...]: a placeholder, or one call that reads placeholders alone, so that it can move into the experts' stage."""
    if isinstance(nodes, tuple):
        return emit(graph, torch.stack, (nodes,))
    if nodes.op == "placeholder":
        return nodes
    parameter = nodes
    while parameter.op != "placeholder":
        parameter = parameter.args[0]  # type: ignore[assignment]
    return emit(graph, "reshape", (parameter, *shape(nodes)))
