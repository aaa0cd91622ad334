"""Writes in place around a region. A region reads its inputs once, where it ends, and shows nothing of its inside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.regions import NoMatch, Region


def late_write(graph: fx.Graph, region: Region, computed: Iterable[fx.Node]) -> NoMatch | None:
    """A write to what the region reads, after it is first read and before the region's end: it would be read too late."""
    found = storages(graph)
    inputs = (region.tokens, region.token_ids, region.expert_ids, region.weights, region.base)
    read = {found.roots[node] for node in inputs if node is not None}
    first = min([*computed, *_readers(region.exit, found.roots, read)])
    for writer, target in found.writes:
        if found.roots[target] in read and first < writer < region.exit:
            return NoMatch(writer, "it writes in place to what the experts read, while they run")
    return None


def _readers(end: fx.Node, roots: Mapping[fx.Node, fx.Node], read: Collection[fx.Node]) -> set[fx.Node]:
    """What `end` is computed from and itself reads a storage of `read`: rows gathered, pairs sorted or counted, masks."""
    readers: set[fx.Node] = set()
    pending, seen = [end], {end}
    while pending:
        node = pending.pop()
        for source in node.all_input_nodes:
            if roots[source] in read:
                readers.add(node)
            elif source not in seen:
                seen.add(source)
                pending.append(source)
    return readers
