"""Puts m2n_send and m2n_recv around every experts module: dispatch.b on the way in, combine.b on the way out.

What attention hands on to the next attention part (residuals) crosses ranks only under several attention
groups, which the graph does not know; the lowered schedule adds those transfers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.m2n_ops import m2n_recv, m2n_send
from disagmoe_compile.passes.metadata import value
from disagmoe_compile.passes.partition import STAGE, ExpertsStage
from disagmoe_compile.plan.ir import Direction, Splits, TensorSpec, TokenDim, Transfer, TransferKind

_DISPATCHED = ("tokens", "token_ids", "expert_ids", "weights")


@dataclass(frozen=True, slots=True)
class InsertTransfers:
    name: str = "insert_transfers"
    requires: frozenset[Capability] = frozenset({Capability.PARTITIONED})
    provides: frozenset[Capability] = frozenset({Capability.TRANSFERS})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        calls = [node for node in graph.nodes if isinstance(node.meta.get(STAGE), ExpertsStage)]
        before = len(graph.nodes)
        for call in calls:
            boundary = call.meta[STAGE].info.boundary
            stage = 2 * boundary + 1
            with graph.inserting_before(call):
                dispatched = list(call.args[: len(_DISPATCHED)])
                specs = tuple(
                    _spec(n, name, "rows" if i == 0 else "pairs")
                    for i, (n, name) in enumerate(zip(dispatched, _DISPATCHED))
                )
                dispatch = _transfer(TransferKind.DISPATCH, boundary, stage - 1, stage, specs)
                call.args = (*_exchange(graph, dispatched, dispatch), *call.args[len(_DISPATCHED) :])
            readers = list(call.users)
            with graph.inserting_after(call):
                # inserting_after puts each new node behind `call`; a marker keeps them in order.
                marker = graph.call_function(m2n_send, (call,), {"transfer": f"combine.{boundary}"})
            with graph.inserting_before(marker.next):
                combine = _transfer(
                    TransferKind.COMBINE, boundary, stage, stage + 1, (_spec(call, "rows", "rows"),)
                )
                marker.meta = {"transfer": combine, "example_value": (value(call),)}
                (received,) = _receive(graph, marker, [call], combine)
            for reader in readers:
                reader.replace_input_with(call, received)
        return PassReport(matched=len(calls), inserted=len(graph.nodes) - before)


def _exchange(graph: fx.Graph, nodes: Sequence[fx.Node], transfer: Transfer) -> list[fx.Node]:
    send = graph.call_function(m2n_send, tuple(nodes), {"transfer": transfer.name})
    send.meta = {"transfer": transfer, "example_value": tuple(value(node) for node in nodes)}
    return _receive(graph, send, nodes, transfer)


def _receive(graph: fx.Graph, send: fx.Node, nodes: Sequence[fx.Node], transfer: Transfer) -> list[fx.Node]:
    recv = graph.call_function(m2n_recv, (send,), {"transfer": transfer.name})
    recv.meta = {"transfer": transfer, "example_value": tuple(value(node) for node in nodes)}
    items = []
    for position, node in enumerate(nodes):
        item = graph.call_function(operator.getitem, (recv, position))
        item.meta = {"example_value": value(node)}
        items.append(item)
    return items


def _transfer(
    kind: TransferKind, boundary: int, src: int, dst: int, payload: tuple[TensorSpec, ...]
) -> Transfer:
    return Transfer(f"{kind.value}.{boundary}", kind, Direction.FORWARD, src, dst, payload, Splits.ROUTED)


def _spec(node: fx.Node, name: str, rows: str) -> TensorSpec:
    """The payload tensor, with the size of the captured batch as the bound of its routed dimension."""
    tensor = value(node)
    bound = tensor.shape[0]
    hint = bound.node.hint if isinstance(bound, torch.SymInt) else bound
    bound = int(hint) if hint is not None and math.isfinite(hint) else 0
    rest = tuple(int(size) for size in tensor.shape[1:])
    return TensorSpec(name, (TokenDim(rows, bound), *rest), str(tensor.dtype).removeprefix("torch."))
