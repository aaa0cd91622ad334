"""A schedule in two phases: valid as a whole, and nothing of one phase in the other."""

import dataclasses

import pytest
from schedule_interpreter import run

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.schedule.two_phase import two_phase
from disagmoe_compile.plan import ActionKind, Plan, Topology, validate
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.phases import phases
from disagmoe_compile.testing.plans import example_plan

TOPOLOGIES = [
    Topology(1, 1, 1, 1, 1),
    Topology(2, 2, 1, 1, 2),
    Topology(1, 1, 2, 2, 3),
    Topology(2, 1, 2, 1, 3, tied_head=True),
]


def plan_in_two_phases(topology: Topology, n_microbatches: int) -> Plan:
    plan = example_plan(topology, n_microbatches)
    owned = [stage.index for stage in plan.stages if stage.owned_fqns]
    training = two_phase(topology, n_microbatches, plan.transfers, owned_stages=owned)
    limit = max(peak_residency(training).values())
    return dataclasses.replace(plan, training=training, resident_limit=limit)


@pytest.mark.parametrize("n_microbatches", [1, 3, 8])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_schedule_is_valid_runs_and_comes_apart_into_all_forwards_and_all_backwards(
    topology, n_microbatches
):
    plan = plan_in_two_phases(topology, n_microbatches)
    assert validate(plan) == []
    run(plan, plan.training)
    first, second = phases(plan)
    directions = {transfer.name: transfer.direction for transfer in plan.transfers}
    for group, actions in plan.training.actions.items():
        assert first[group] + second[group] == actions
        assert {a.kind for a in first[group]} & {ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT} == set()
        assert all(a.kind is not ActionKind.FORWARD for a in second[group])
        for part in (first[group], second[group]):
            moved = {
                directions[a.transfer] for a in part if a.transfer and a.kind is not ActionKind.REDUCE_GRAD
            }
            assert len(moved) <= 1


def test_a_schedule_that_mixes_the_phases_is_refused_by_name():
    with pytest.raises(PlanError, match=r"schedule af_pipe runs .* after the backward has begun"):
        phases(example_plan(Topology(2, 2, 1, 1, 2), 4))


def test_a_plan_without_training_has_no_phases():
    with pytest.raises(PlanError, match="no training schedule"):
        phases(example_plan(training=False))
