"""Lowered lists of every shape run to their end, and what validation lets through runs too."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_interpreter import Failure, run

from disagmoe_compile.plan import Action, ActionKind, Group, Plan, Topology, validate
from disagmoe_compile.testing.plans import example_plan

SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOPOLOGIES = st.builds(
    Topology,
    attention_group_size=st.integers(1, 3),
    ffn_group_size=st.integers(1, 3),
    attention_groups=st.integers(1, 3),
    ffn_groups=st.integers(1, 3),
    n_boundaries=st.integers(1, 5),
    tied_head=st.booleans(),
)


@SETTINGS
@given(
    TOPOLOGIES,
    st.integers(1, 9),
    st.sampled_from(["af_pipe", "af_pipe_in_order", "gpipe"]),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
)
def test_lowered_plans_validate_clean_and_run_without_deadlock(topology, n, schedule, split, ahead, training):
    plan = example_plan(
        topology, n, schedule=schedule, split_weight_gradient=split, receive_ahead=ahead, training=training
    )
    assert validate(plan) == []
    run(plan, plan.forward_only)
    if training:
        run(plan, plan.training)


SMALL = [
    example_plan(Topology(2, 2, 1, 1, 2), 2),
    example_plan(Topology(1, 1, 2, 2, 2), 2),
    example_plan(Topology(1, 1, 2, 1, 2, tied_head=True), 2, split_weight_gradient=False),
    example_plan(Topology(1, 1, 1, 2, 2), 2, schedule="gpipe"),
]


def edited(plan: Plan, group: Group, actions: list[Action]) -> Plan:
    assert plan.training is not None
    schedule = dataclasses.replace(plan.training, actions={**plan.training.actions, group: tuple(actions)})
    return dataclasses.replace(plan, training=schedule)


@pytest.mark.parametrize("plan", SMALL[1:3])
def test_deleting_any_action_is_reported(plan):
    for group, actions in plan.training.actions.items():
        for k in range(len(actions)):
            found = validate(edited(plan, group, [*actions[:k], *actions[k + 1 :]]))
            assert found, f"deletion of {actions[k]} (step {k} of {group}) went unnoticed"


@pytest.mark.parametrize("plan", SMALL[1:3])
def test_duplicating_any_action_is_reported_except_waits_for_events(plan):
    for group, actions in plan.training.actions.items():
        for k, action in enumerate(actions):
            found = validate(edited(plan, group, [*actions[:k], action, *actions[k:]]))
            assert bool(found) == (action.after is None), action


@st.composite
def moved_plans(draw):
    """A small plan with one action moved up to 12 places, or two swapped."""
    plan = draw(st.sampled_from(SMALL))
    group = draw(st.sampled_from(plan.topology.groups))
    actions = list(plan.training.of(group))
    first = draw(st.integers(0, len(actions) - 1))
    second = min(max(0, first + draw(st.integers(-12, 12))), len(actions) - 1)
    if draw(st.booleans()):
        actions.insert(second, actions.pop(first))
    else:
        actions[first], actions[second] = actions[second], actions[first]
    return edited(plan, group, actions)


@settings(SETTINGS, max_examples=50)
@given(moved_plans())
def test_a_reordered_plan_that_validates_also_runs(plan):
    if not validate(plan):
        run(plan, plan.training, seeds=4)


def test_the_interpreter_fails_on_broken_lists():
    plan = SMALL[0]
    failures = 0
    for group, actions in plan.training.actions.items():
        for k, action in enumerate(actions):
            if action.kind in (
                ActionKind.SEND,
                ActionKind.RECV,
                ActionKind.FORWARD,
                ActionKind.BACKWARD_INPUT,
            ):
                broken = edited(plan, group, [*actions[:k], *actions[k + 1 :]])
                with pytest.raises(Failure):
                    run(broken, broken.training)
                failures += 1
    assert failures > 30


def test_the_interpreter_sees_a_race_that_lists_alone_hide():
    plan = SMALL[0]
    group = plan.topology.groups[0]
    without = [a for a in plan.training.of(group) if a.after is None or str(a.stream) != "comm_send"]
    with pytest.raises(Failure):
        run(plan, edited(plan, group, without).training, seeds=5)
