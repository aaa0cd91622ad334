"""Inlines activation-checkpoint operators: `tag_activation_checkpoint(body, *operands)` hides whole layers
from the other passes.

The wish to recompute is kept on the inlined nodes as `meta["recompute"]`, for the stage policy to honour.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import output_node, placeholders, target_name

_CHECKPOINT = "tag_activation_checkpoint"


@dataclass(frozen=True, slots=True)
class InlineCheckpoint:
    name: str = "inline_checkpoint"
    requires: frozenset[Capability] = frozenset({Capability.SOURCES})
    provides: frozenset[Capability] = frozenset({Capability.NO_CHECKPOINTS})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph, matched, inserted = graph_module.graph, 0, 0
        while calls := [node for node in graph.nodes if target_name(node) == _CHECKPOINT]:
            for call in calls:
                inserted += _inline(graph_module, call)
            matched += len(calls)
        return PassReport(matched, inserted)


def _inline(graph_module: fx.GraphModule, call: fx.Node) -> int:
    """Replaces one call by the nodes of its body. Returns how many nodes it added."""
    handle, *operands = call.args
    body = graph_module.get_submodule(str(handle.target)).graph
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders(body), operands))
    added = 0
    with graph_module.graph.inserting_before(call):
        for node in body.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph_module.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**node.meta, "recompute": True}
            added += 1
    results = fx.node.map_arg(output_node(body).args[0], copies.__getitem__)
    for user in list(call.users):
        if user.target is operator.getitem and isinstance(results, tuple | list):
            user.replace_all_uses_with(results[user.args[1]])
            graph_module.graph.erase_node(user)
    if call.users:
        call.replace_all_uses_with(results)
    graph_module.graph.erase_node(call)
    if not handle.users:
        graph_module.graph.erase_node(handle)
    return added
