"""What the top-level graph must be after all passes, rule by rule; every violation names its rule and node.

alternation   stage calls are attention_0, experts_0, attention_1, ..., the last one attention
transfer      between two stages of different roles every value passes m2n_send and m2n_recv
pairing       each m2n_send is read by one m2n_recv of the same transfer, which hands on tensors of the same shapes and dtypes
endpoints     a transfer stands between the stages that it names
parameter     a parameter is read by one stage, or by several attention stages and is declared shared
mirror        (of the step graph) each stage and micro-batch that runs forward runs backward, and each forward message whose
              gradient is needed has one message back, between the same groups, the other way
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.m2n_ops import m2n_recv, m2n_send
from disagmoe_compile.passes.metadata import placeholders, source_of, value
from disagmoe_compile.passes.partition import SHARED_PARAMETERS, STAGE, AttentionStage, ExpertsStage
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Plan

GRAPH_RULES = ("alternation", "transfer", "pairing", "endpoints", "parameter")
STEP_GRAPH_RULES = ("mirror",)


@dataclass(frozen=True, slots=True)
class GraphViolation:
    """`rule` is one of `GRAPH_RULES` or `STEP_GRAPH_RULES`; `node` is the name of the node at fault."""

    rule: str
    node: str
    message: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.node}: {self.message}"


def validate_graph(graph_module: fx.GraphModule) -> list[GraphViolation]:
    """Every violation in a graph that all passes have gone over; empty for a sound one."""
    calls = [node for node in graph_module.graph.nodes if STAGE in node.meta]
    return [
        *_alternation(calls),
        *_transfer(calls),
        *_pairing(graph_module.graph),
        *_endpoints(graph_module.graph),
        *_parameter(graph_module),
    ]


def validate_step_graph(graph_module: fx.GraphModule, plan: Plan) -> list[GraphViolation]:
    """Every violation in a training step's graph (`step_graph`); empty for a sound one."""
    return [*_mirrored_compute(graph_module.graph), *_mirrored_messages(graph_module.graph, plan)]


def stage_index(call: fx.Node) -> int:
    """2b of the attention stage before boundary b, 2b + 1 of its experts."""
    stage = call.meta[STAGE]
    return 2 * stage.boundary if isinstance(stage, AttentionStage) else 2 * stage.info.boundary + 1


# ---- the forward graph


def _alternation(calls: list[fx.Node]) -> Iterator[GraphViolation]:
    for position, call in enumerate(calls):
        expected = ExpertsStage if position % 2 else AttentionStage
        if not isinstance(call.meta[STAGE], expected) or stage_index(call) != position:
            yield GraphViolation(
                "alternation", call.name, f"stage {position} of the graph cannot be stage {stage_index(call)}"
            )
    if calls and len(calls) % 2 == 0:
        yield GraphViolation("alternation", calls[-1].name, "the last stage must be an attention stage")


def _transfer(calls: list[fx.Node]) -> Iterator[GraphViolation]:
    """Stages of one role hand values to each other directly: with one group of that role they share its ranks."""
    for call in calls:
        for source in call.all_input_nodes:
            producer = _producer(source)
            if STAGE in producer.meta and stage_index(producer) % 2 != stage_index(call) % 2:
                yield GraphViolation(
                    "transfer", call.name, f"reads {source.name} of {producer.name} without a transfer"
                )


def _pairing(graph: fx.Graph) -> Iterator[GraphViolation]:
    for node in graph.nodes:
        if node.target is m2n_send:
            receives = [user for user in node.users if user.target is m2n_recv]
            if len(receives) != 1 or len(node.users) != 1:
                yield GraphViolation(
                    "pairing", node.name, f"is read {len(node.users)} times, by one m2n_recv expected"
                )
        elif node.target is m2n_recv:
            yield from _same_message(node)


def _same_message(receive: fx.Node) -> Iterator[GraphViolation]:
    send = receive.args[0] if receive.args else None
    if not isinstance(send, fx.Node) or send.target is not m2n_send:
        yield GraphViolation("pairing", receive.name, "receives what no m2n_send sent")
        return
    if send.kwargs["transfer"] != receive.kwargs["transfer"]:
        yield GraphViolation(
            "pairing",
            receive.name,
            f"receives {receive.kwargs['transfer']}, but {send.name} sends {send.kwargs['transfer']}",
        )
    sent = [_spec(value(node)) for node in send.args if isinstance(node, fx.Node)]
    received = [_spec(tensor) for tensor in value(receive) or ()]
    if sent != received:
        yield GraphViolation("pairing", receive.name, f"receives {received}, but {send.name} sends {sent}")


def _spec(tensor: torch.Tensor) -> str:
    # By expression: comparing live sizes would fix them.
    return f"{tensor.dtype}[{', '.join(str(size) for size in tensor.shape)}]"


def _endpoints(graph: fx.Graph) -> Iterator[GraphViolation]:
    for node in graph.nodes:
        if node.target is m2n_send:
            transfer = node.meta["transfer"]
            sources = {stage_index(p) for a in node.all_input_nodes if STAGE in (p := _producer(a)).meta}
            if sources != {transfer.src}:
                yield GraphViolation(
                    "endpoints",
                    node.name,
                    f"{transfer.name} leaves stage {transfer.src}, not {sorted(sources)}",
                )
        elif node.target is m2n_recv:
            transfer = node.meta["transfer"]
            readers = {stage_index(call) for item in node.users for call in item.users if STAGE in call.meta}
            if not readers <= {transfer.dst}:
                yield GraphViolation(
                    "endpoints",
                    node.name,
                    f"{transfer.name} is for stage {transfer.dst}, not {sorted(readers)}",
                )


def _parameter(graph_module: fx.GraphModule) -> Iterator[GraphViolation]:
    declared = graph_module.meta.get(SHARED_PARAMETERS, frozenset())
    for node in placeholders(graph_module.graph):
        source = source_of(node)
        if source is None or source.kind is not InputKind.PARAMETER:
            continue
        readers = sorted({stage_index(user) for user in node.users if STAGE in user.meta})
        if len({reader % 2 for reader in readers}) > 1:
            yield GraphViolation(
                "parameter", node.name, f"`{source.name}` is read by both roles: stages {readers}"
            )
        elif len(readers) > 1 and source.name not in declared:
            yield GraphViolation(
                "parameter", node.name, f"`{source.name}` is read by stages {readers} and not declared shared"
            )


def _producer(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


# ---- the training step


def _mirrored_compute(graph: fx.Graph) -> Iterator[GraphViolation]:
    done: defaultdict[tuple[int, int], Counter[ActionKind]] = defaultdict(Counter)
    forwards: dict[tuple[int, int], fx.Node] = {}
    for node in graph.nodes:
        action = _action(node)
        if action is None or action.microbatch is None:
            continue
        done[action.stage, action.microbatch][action.kind] += 1
        if action.kind is ActionKind.FORWARD:
            forwards[action.stage, action.microbatch] = node
    for key, node in forwards.items():
        kinds = done[key]
        whole, split = kinds[ActionKind.BACKWARD], kinds[ActionKind.BACKWARD_WEIGHT]
        if whole + split != 1:
            yield GraphViolation("mirror", node.name, f"runs forward and {whole + split} times backward")


def _mirrored_messages(graph: fx.Graph, plan: Plan) -> Iterator[GraphViolation]:
    back_of = {t.backward_of: t for t in plan.transfers if t.backward_of is not None}
    sends = [node for node in graph.nodes if node.target is m2n_send]
    count = Counter((n.meta["transfer"].name, _microbatch(n), n.meta["group"]) for n in sends)
    receivers = {
        (n.meta["transfer"].name, _microbatch(n)): n.meta["group"]
        for n in graph.nodes
        if n.target is m2n_recv
    }
    for node in sends:
        transfer, microbatch = node.meta["transfer"], _microbatch(node)
        back = back_of.get(transfer.name)
        if back is None:
            continue
        receiver = receivers.get((transfer.name, microbatch), "no group")
        if (back.src, back.dst) != (transfer.dst, transfer.src) or count[
            back.name, microbatch, receiver
        ] != 1:
            yield GraphViolation(
                "mirror", node.name, f"{transfer.name} has no {back.name} back from {receiver}"
            )


def _action(node: fx.Node) -> Action | None:
    text = node.meta.get("action")
    return Action.parse(text) if text and text != "seed" else None


def _microbatch(node: fx.Node) -> int | None:
    action = _action(node)
    return None if action is None else action.microbatch
