"""A choice of the planner, simulated: as a profile for Algorithm 1, with the NICs that the choice gives each side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.refine import Refinement, refine
from disagmoe_compile.planner.sizing_problem import (
    Candidate,
    Layout,
    Policy,
    SizingOptions,
    SizingProblem,
    TrainingWorkload,
)
from disagmoe_compile.planner.step_costs import Dedup, model_costs
from disagmoe_compile.simulator.planned import planned_model, simulated_steps
from disagmoe_compile.simulator.results import af_result


@pytest.fixture(scope="module")
def problem() -> SizingProblem:
    """Four layers on 8 GPUs: a step simulates in milliseconds."""
    spec = find_model("DeepSeek-MoE-16B")
    costs = model_costs(replace(spec, layers=spec.layers[:5]), seq_length=1024)
    options = SizingOptions(pipeline_groups=1, recompute="none", shared_experts_on="attention")
    return SizingProblem(
        costs, find_cluster("h800"), TrainingWorkload(1024, sequences_per_gpu=2, micro_batch_size=1), options
    )


def choice(attention: int = 4, *, in_flight: int = 2, nics: tuple[float, float] | None = None) -> Candidate:
    layout = Layout(1, attention, 8 - attention, 1, 16 // attention, False)
    return Candidate(layout, Policy(False, False, False, in_flight), *(nics or (attention, 8 - attention)))


def test_a_profile_is_the_simulated_step_of_the_same_choice(problem: SizingProblem) -> None:
    model = planned_model(problem.costs, problem.cluster, choice(), Dedup.RANK)
    assert simulated_steps(problem)(choice()) == af_result(model).step_s
    assert model.choice.in_flight == 2 and model.choice.attention_group_size == 4


def test_fewer_nics_than_gpus_make_the_step_longer(problem: SizingProblem) -> None:
    seconds = simulated_steps(problem)
    assert seconds(choice(nics=(1, 1))) > seconds(choice(nics=(4, 4))) == seconds(choice())


def test_refinement_on_simulated_steps_repeats_itself_and_never_ends_above_its_seed(
    problem: SizingProblem,
) -> None:
    def run() -> Refinement:
        return refine(problem, simulated_steps(problem), start=choice(), trials=8, tie=0.0, seed=1)

    found = run()
    assert found == run()
    assert len({t.step_s for t in found.trajectory}) > 4
    assert found.best.seconds_per_sequence == min(t.seconds_per_sequence for t in found.trajectory)
