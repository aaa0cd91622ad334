"""The training step as a graph: every action once, in an order that keeps every list, sends before what they bring."""

from __future__ import annotations

import dataclasses

import pytest

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.m2n_ops import m2n_recv, m2n_send
from disagmoe_compile.passes.step_graph import loss_seed, step_graph
from disagmoe_compile.plan.ir import Direction
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan

PLANS = [example_plan(Topology(2, 2, 1, 1, 2), 2), example_plan(Topology(1, 1, 2, 2, 3), 4)]


@pytest.fixture(scope="module", params=PLANS, ids=["one group", "two groups"])
def plan_and_graph(request):
    return request.param, step_graph(request.param)


def acting(graph_module):
    return [n for n in graph_module.graph.nodes if n.op == "call_function" and n.target is not loss_seed]


def test_every_action_is_a_node_in_the_order_of_its_list(plan_and_graph):
    plan, graph_module = plan_and_graph
    for group, actions in plan.training.actions.items():
        listed = [n.meta["action"] for n in acting(graph_module) if n.meta["group"] == str(group)]
        assert listed == [str(action) for action in actions]


def test_every_receive_reads_its_send(plan_and_graph):
    _, graph_module = plan_and_graph
    receives = [n for n in acting(graph_module) if n.target is m2n_recv]
    sends = [n for n in acting(graph_module) if n.target is m2n_send]
    assert len(receives) == len(sends) > 0
    for node in receives:
        (send,) = node.args
        assert send.target is m2n_send and send.meta["transfer"] == node.meta["transfer"]
        assert send.meta["group"] != node.meta["group"]


def test_forward_and_mirrored_transfers_are_both_there(plan_and_graph):
    _, graph_module = plan_and_graph
    transfers = {n.meta["transfer"] for n in acting(graph_module) if n.target is m2n_send}
    backward = {t for t in transfers if t.direction is Direction.BACKWARD}
    assert {t.backward_of for t in backward} <= {t.name for t in transfers - backward}
    assert len(backward) == len(transfers - backward)


def test_streams_are_those_of_the_actions(plan_and_graph):
    plan, graph_module = plan_and_graph
    streams = {str(a): a.stream for actions in plan.training.actions.values() for a in actions}
    assert all(n.meta["stream"] is streams[n.meta["action"]] for n in acting(graph_module))


def test_the_seed_reaches_every_weight_gradient(plan_and_graph):
    _, graph_module = plan_and_graph
    reached = set()
    for node in graph_module.graph.nodes:
        if node.target is loss_seed or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    weights = [n for n in acting(graph_module) if n.target.__name__ in ("weight_gradient", "backward_stage")]
    assert weights and all(node in reached for node in weights)


def test_graph_runs_dry(plan_and_graph):
    plan, graph_module = plan_and_graph
    assert len(graph_module()) == len(plan.topology.groups)


def test_groups_that_wait_for_each_other_are_refused():
    plan = PLANS[0]
    group, actions = next(iter(plan.training.actions.items()))
    first_wait = next(
        a for a in actions if a.kind == "WAIT" and a.transfer and a.transfer.startswith("combine")
    )
    stuck = (first_wait, *(a for a in actions if a is not first_wait))
    schedule = dataclasses.replace(plan.training, actions={**plan.training.actions, group: stuck})
    with pytest.raises(PlanError, match="wait for each other"):
        step_graph(dataclasses.replace(plan, training=schedule))
