"""Each rule of the partitioned graph has a change that breaks it, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from disagmoe_compile.passes.graph_rules import (
    GRAPH_RULES,
    STEP_GRAPH_RULES,
    stage_index,
    validate_graph,
    validate_step_graph,
)
from disagmoe_compile.passes.m2n_ops import m2n_recv, m2n_send
from disagmoe_compile.passes.metadata import source_of
from disagmoe_compile.passes.partition import SHARED_PARAMETERS, STAGE
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.passes.step_graph import step_graph
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan


@pytest.fixture
def graph_module(captured_family) -> fx.GraphModule:
    return partition_model(captured_family("qwen3_moe", 3).graph).graph_module


def calls(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if STAGE in node.meta]


def of(graph_module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.target is target]


def parameters_of(call: fx.Node) -> list[fx.Node]:
    return [a for a in call.args if isinstance(a, fx.Node) and (s := source_of(a)) and s.kind == "parameter"]


def skip_a_stage(gm: fx.GraphModule) -> str:
    call = calls(gm)[4]
    call.meta[STAGE] = replace(call.meta[STAGE], boundary=7)
    for node in of(gm, m2n_send) + of(gm, m2n_recv):  # only the order is wrong: its transfers agree with it
        transfer = node.meta["transfer"]
        ends = {end: 14 for end in ("src", "dst") if getattr(transfer, end) == 4}
        object.__setattr__(node, "meta", {**node.meta, "transfer": _moved(transfer, ends)})
    return call.name


def _moved(transfer: Any, ends: dict[str, int]) -> Any:
    moved = replace(transfer)
    for end, stage in ends.items():
        object.__setattr__(moved, end, stage)
    return moved


def cross_without_transfer(gm: fx.GraphModule) -> str:
    """An expert stage that also reads a value straight from the attention stage before it."""
    experts = calls(gm)[1]
    carried = next(n for n in gm.graph.nodes if n.target is operator.getitem and n.args == (calls(gm)[0], 4))
    carried_first = carried.prev
    assert carried_first is not None
    experts.args = (*experts.args, carried)
    return experts.name


def read_a_send_twice(gm: fx.GraphModule) -> str:
    send = of(gm, m2n_send)[0]
    with gm.graph.inserting_after(send):
        gm.graph.call_function(len, (send,))
    return send.name


def rename_a_receive(gm: fx.GraphModule) -> str:
    receive = of(gm, m2n_recv)[0]
    receive.kwargs = {"transfer": "dispatch.1"}
    return receive.name


def receive_another_dtype(gm: fx.GraphModule) -> str:
    receive = of(gm, m2n_recv)[0]
    first, *rest = receive.meta["example_value"]
    receive.meta["example_value"] = (first.to(torch.bfloat16), *rest)
    return receive.name


def receive_from_nowhere(gm: fx.GraphModule) -> str:
    """The message of the send goes to two: one of its own, and one that takes the tensors past it."""
    receive = of(gm, m2n_recv)[0]
    send = receive.args[0]
    with gm.graph.inserting_before(receive):
        other = gm.graph.call_function(m2n_recv, (send.args,), dict(receive.kwargs))
    other.meta = dict(receive.meta)
    return other.name


def send_from_another_stage(gm: fx.GraphModule) -> str:
    send = next(n for n in of(gm, m2n_send) if n.kwargs["transfer"] == "combine.0")
    transfer = send.meta["transfer"]
    send.meta["transfer"] = _moved(transfer, {"src": 3})
    return send.name


def deliver_to_another_stage(gm: fx.GraphModule) -> str:
    receive = next(n for n in of(gm, m2n_recv) if n.kwargs["transfer"] == "combine.0")
    receive.meta["transfer"] = _moved(receive.meta["transfer"], {"dst": 4})
    return receive.name


def share_with_experts(gm: fx.GraphModule) -> str:
    attention, experts = calls(gm)[0], calls(gm)[1]
    parameter = parameters_of(attention)[0]
    experts.args = (*experts.args, parameter)
    return parameter.name


def share_undeclared(gm: fx.GraphModule) -> str:
    first, second = calls(gm)[0], calls(gm)[2]
    parameter = parameters_of(first)[0]
    second.args = (*second.args, parameter)
    return parameter.name


BROKEN: list[tuple[str, Callable[[fx.GraphModule], str]]] = [
    ("alternation", skip_a_stage),
    ("transfer", cross_without_transfer),
    ("pairing", read_a_send_twice),
    ("pairing", rename_a_receive),
    ("pairing", receive_another_dtype),
    ("pairing", receive_from_nowhere),
    ("endpoints", send_from_another_stage),
    ("endpoints", deliver_to_another_stage),
    ("parameter", share_with_experts),
    ("parameter", share_undeclared),
]


def test_a_partitioned_model_keeps_every_rule(graph_module) -> None:
    assert validate_graph(graph_module) == []


@pytest.mark.parametrize(("rule", "damage"), BROKEN, ids=[f"{r}-{d.__name__}" for r, d in BROKEN])
def test_a_broken_rule_is_reported_with_its_node_and_nothing_else_is(graph_module, rule, damage) -> None:
    node = damage(graph_module)
    assert [(v.rule, v.node) for v in validate_graph(graph_module)] == [(rule, node)]


def test_every_rule_has_a_test_that_breaks_it() -> None:
    assert {rule for rule, _ in BROKEN} == set(GRAPH_RULES)


def test_a_declared_parameter_may_be_shared_by_attention_stages(graph_module) -> None:
    share_undeclared(graph_module)
    name = source_of(parameters_of(calls(graph_module)[0])[0]).name
    graph_module.meta[SHARED_PARAMETERS] |= {name}
    assert validate_graph(graph_module) == []


def test_stages_are_numbered_along_the_model(graph_module) -> None:
    assert [stage_index(call) for call in calls(graph_module)] == list(range(7))


PLAN = example_plan(Topology(2, 2, 1, 1, 2), 2)


def test_a_training_step_mirrors_its_forward() -> None:
    for plan in (PLAN, example_plan(Topology(1, 1, 2, 2, 3), 3, split_weight_gradient=False)):
        assert validate_step_graph(step_graph(plan), plan) == []


@pytest.mark.parametrize(
    ("gone", "at_fault"), [("dispatch_bwd.0", "dispatch.0"), ("combine_bwd.1", "combine.1")]
)
def test_a_message_without_its_way_back_is_reported(gone, at_fault) -> None:
    graph = step_graph(PLAN)
    damaged = next(n for n in graph.graph.nodes if n.target is m2n_send and n.meta["transfer"].name == gone)
    damaged.meta["group"] = "attention.9"
    (found,) = validate_step_graph(graph, PLAN)
    assert found.rule == STEP_GRAPH_RULES[0] and at_fault in found.message and gone in found.message


def test_a_stage_that_never_runs_backward_is_reported() -> None:
    graph = step_graph(PLAN)
    backward = next(n for n in graph.graph.nodes if n.meta.get("action") == "1W1")
    backward.meta["action"] = "1W0"
    found = validate_step_graph(graph, PLAN)
    assert {v.rule for v in found} == {"mirror"} and len(found) == 2
