"""Says on which stream each node of the top-level graph runs, and which event of another stream it waits for.

Compute is on `forward`, m2n_send on `comm_send`, m2n_recv on `comm_recv`. Each stream is an ordered queue;
`meta["waits_for"]` names the nodes of other streams whose completion the node needs: deleting one of them
would be a race.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import is_call
from disagmoe_compile.plan.action import Stream


@dataclass(frozen=True, slots=True)
class AssignStreams:
    name: str = "assign_streams"
    requires: frozenset[Capability] = frozenset({Capability.TRANSFERS})
    provides: frozenset[Capability] = frozenset({Capability.STREAMS})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        waits = 0
        nodes = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
        for node in nodes:
            node.meta["stream"] = _stream(node)
            producers = [
                producer for source in node.all_input_nodes if (producer := _producer(source)) is not None
            ]
            others = [p.name for p in producers if p.meta["stream"] is not node.meta["stream"]]
            node.meta["waits_for"] = tuple(dict.fromkeys(others))
            waits += len(node.meta["waits_for"])
        return PassReport(matched=len(nodes), notes=(f"{waits} waits between streams",))


def _stream(node: fx.Node) -> Stream:
    if is_call(node, "m2n_send"):
        return Stream.COMM_SEND
    if is_call(node, "m2n_recv"):
        return Stream.COMM_RECV
    if node.target is operator.getitem and is_call(node.args[0], "m2n_recv"):
        return Stream.COMM_RECV  # taking an arrived tensor out of its message launches nothing
    return Stream.FORWARD


def _producer(node: fx.Node) -> fx.Node | None:
    """The call behind getitems; None for an input of the model, which is there from the start."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return None if node.op == "placeholder" else node
