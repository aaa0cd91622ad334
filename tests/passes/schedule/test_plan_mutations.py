"""No damage to a valid plan passes unnoticed: what the validator lets through runs on an independent interpreter."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_interpreter import run

from disagmoe_compile.plan import Action, ActionKind, Group, Plan, Topology, validate
from disagmoe_compile.testing.plans import GENERATORS, example_plan


class Drawn(Plan):
    """A plan that hypothesis can print."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self.topology}, {self.workload.n_microbatches} micro-batches, {self.options}"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Small valid plans over group sizes, depths on both sides, boundaries and micro-batches."""
    topology = Topology(
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )  # fmt: skip
    plan = example_plan(
        topology,
        draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(sorted(GENERATORS))),
        split_weight_gradient=draw(st.booleans()),
        receive_ahead=draw(st.integers(1, 2)),
    )
    return Drawn(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})


def with_list(plan: Plan, group: Group, actions: list[Action]) -> Plan:
    assert plan.training is not None
    schedule = dataclasses.replace(plan.training, actions={**plan.training.actions, group: tuple(actions)})
    return dataclasses.replace(plan, training=schedule)


def pick(data: st.DataObject, plan: Plan) -> tuple[Group, list[Action], int]:
    """A group, its list, and a position in it."""
    assert plan.training is not None
    busy = [group for group, actions in sorted(plan.training.actions.items()) if actions]
    group = data.draw(st.sampled_from(busy))
    actions = list(plan.training.of(group))
    return group, actions, data.draw(st.integers(0, len(actions) - 1))


def noticed_or_harmless(plan: Plan) -> bool:
    """Whether the validator objects; if it does not, the interpreter, which shares no code with it, must run the plan."""
    if validate(plan):
        return True
    assert plan.training is not None
    run(plan, plan.training, seeds=2)
    return True


fuzz = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(plans(), st.data())
def test_a_missing_action_is_noticed(plan: Plan, data: st.DataObject) -> None:
    group, actions, position = pick(data, plan)
    del actions[position]
    assert validate(with_list(plan, group, actions))


@fuzz
@given(plans(), st.data())
def test_a_repeated_action_is_noticed_unless_it_waits_again(plan: Plan, data: st.DataObject) -> None:
    group, actions, position = pick(data, plan)
    repeated = actions[position]
    actions.insert(data.draw(st.integers(0, len(actions))), repeated)
    damaged = with_list(plan, group, actions)
    if repeated.kind is ActionKind.WAIT and repeated.after is not None:
        assert noticed_or_harmless(damaged)
    else:
        assert validate(damaged)


@fuzz
@given(plans(), st.data())
def test_an_action_of_another_group_is_noticed(plan: Plan, data: st.DataObject) -> None:
    assert plan.training is not None
    group, actions, position = pick(data, plan)
    other = data.draw(st.sampled_from([g for g in sorted(plan.training.actions) if g != group]))
    others = list(plan.training.of(other))
    others.insert(data.draw(st.integers(0, len(others))), actions[position])
    assert validate(with_list(plan, other, others))


@fuzz
@given(plans(), st.data())
def test_an_action_for_another_microbatch_or_stage_is_noticed(plan: Plan, data: st.DataObject) -> None:
    group, actions, position = pick(data, plan)
    action = actions[position]
    change = data.draw(st.sampled_from(["stage", "microbatch"]))
    if change == "microbatch" and action.microbatch is None:
        change = "stage"
    shifted = getattr(action, change) + data.draw(st.sampled_from([-1, 1]))
    if shifted < 0:
        shifted = getattr(action, change) + 1
    actions[position] = dataclasses.replace(action, **{change: shifted})
    damaged = with_list(plan, group, actions)
    if (
        action.kind is ActionKind.WAIT and action.after is not None
    ):  # one for a later action of an ordered stream waits too
        assert noticed_or_harmless(damaged)
    else:
        assert validate(damaged)


@fuzz
@given(plans(), st.data())
def test_what_is_moved_is_noticed_or_still_runs(plan: Plan, data: st.DataObject) -> None:
    group, actions, position = pick(data, plan)
    action = actions.pop(position)
    actions.insert(data.draw(st.integers(0, len(actions))), action)
    assert noticed_or_harmless(with_list(plan, group, actions))


@fuzz
@given(plans(), st.data())
def test_a_changed_transfer_is_noticed(plan: Plan, data: st.DataObject) -> None:
    transfer = data.draw(st.sampled_from(plan.transfers))
    change = data.draw(st.sampled_from(["gone", "src", "dst"]))
    if change == "gone":
        changed = tuple(t for t in plan.transfers if t is not transfer)
    else:
        try:
            moved = dataclasses.replace(transfer, **{change: getattr(transfer, change) + 2})
        except ValueError:
            return  # noticed before there is a plan
        changed = tuple(moved if t is transfer else t for t in plan.transfers)
    assert validate(dataclasses.replace(plan, transfers=changed))


@pytest.mark.parametrize("topology", [Topology(2, 2, 1, 1, 2), Topology(1, 2, 2, 1, 3)])
def test_undamaged_plans_run_on_the_interpreter(topology: Topology) -> None:
    plan = example_plan(topology, 3)
    assert validate(plan) == []
    assert plan.training is not None
    run(plan, plan.training, seeds=3)
