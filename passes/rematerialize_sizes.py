"""Computes sizes from the model's inputs instead of from tensors on the way.

`y.view(x.shape)` makes a stage depend on an earlier stage's tensor for its shape alone; a size cannot be sent. Every
size in the graph is an expression of the inputs' sizes, so each reader can compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.aliasing import remove_dead
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import describe, expression, is_computed_size, placeholders, value
from disagmoe_compile.passes.sizes import NoExpression, SizeBuilder, symbol_sources


@dataclass(frozen=True, slots=True)
class RematerializeSizes:
    name: str = "rematerialize_sizes"
    requires: frozenset[Capability] = frozenset({Capability.CANONICAL_EXPERTS})
    provides: frozenset[Capability] = frozenset({Capability.SIZES})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        sizes = [node for node in graph.nodes if is_computed_size(node)]
        skipped, matched = [], 0
        before = len(graph.nodes)
        builder = _builder(graph)
        # Sizes depend on the inputs alone, so they can stand ahead of everything that reads them.
        start = placeholders(graph)[-1].next
        for node in sizes:
            try:
                with graph.inserting_before(start):
                    replacement = _sized(builder, value(node))
            except (NoExpression, KeyError) as reason:
                skipped.append(f"{describe(node)}: no expression of the inputs' sizes for {reason}")
                continue
            matched += 1
            for user in list(node.users):
                args, kwargs = _replaced((user.args, user.kwargs), node, replacement)
                user.args, user.kwargs = args, kwargs
        inserted = len(graph.nodes) - before
        remove_dead(graph)
        return PassReport(matched, inserted, tuple(skipped))


def _builder(graph: fx.Graph) -> SizeBuilder:
    sources = symbol_sources(graph)

    def symbol_node(symbol: sympy.Symbol) -> fx.Node:
        node, dim = sources[symbol]
        if dim is None:
            return node
        size = graph.call_method("size", (node, dim))
        size.meta["example_value"] = value(node).shape[dim]
        return size

    return SizeBuilder(graph, symbol_node)


def _sized(builder: SizeBuilder, found: Any) -> Any:
    if isinstance(found, torch.Size):
        return tuple(builder.build(expression(size)) for size in found)
    return builder.build(expression(found))


def _replaced(arguments: Any, node: fx.Node, replacement: Any) -> Any:
    return fx.node.map_arg(arguments, lambda found: replacement if found is node else found)
