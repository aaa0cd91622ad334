"""Writes in place around a region. A region reads its inputs once, where it ends, and shows nothing of its inside."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from disagmoe_compile.passes.aliasing import storage_roots, written
from disagmoe_compile.passes.regions import NoMatch, Region


def writers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """node -> a call that writes in place to its storage."""
    roots = storage_roots(graph)
    by_root = {roots[target]: node for node in graph.nodes if (target := written(node)) is not None}
    return {node: by_root[root] for node, root in roots.items() if root in by_root}


def late_write(graph: fx.Graph, region: Region, computed: Iterable[fx.Node]) -> NoMatch | None:
    """A write to what the region reads, after its first computation and before its end: it would be read too late."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    roots = storage_roots(graph)
    inputs = (region.tokens, region.token_ids, region.expert_ids, region.weights, region.base)
    read = {roots[node] for node in inputs if node is not None}
    first, last = min(position[node] for node in computed), position[region.exit]
    for node in graph.nodes:
        target = written(node)
        if target is not None and roots[target] in read and first < position[node] < last:
            return NoMatch(node, "it writes in place to what the experts read, while they run")
    return None
