"""What --explain says, against predictions made again with the change it speaks of."""

from __future__ import annotations

import pytest
from sizing_cases import cluster_of, costs_of, problem_of

from disagmoe_compile.planner.sensitivity import even_split, one_more, roofs, stage_times
from disagmoe_compile.planner.size import candidate_of, size
from disagmoe_compile.planner.sizing_problem import Candidate, SizingProblem
from disagmoe_compile.planner.step_model import StepModel


def solved(problem: SizingProblem) -> tuple[StepModel, Candidate]:
    return StepModel(problem), candidate_of(size(problem, alternatives=0))


def test_stage_times_add_up_to_the_busy_seconds_of_a_step() -> None:
    problem = problem_of(costs_of(boundaries=4), pipeline_groups=1)
    model, chosen = solved(problem)
    stages, prediction = stage_times(model, chosen), model.predict(chosen)
    assert [s.name for s in stages] == ["A0", "F0", "A1", "F1", "A2", "F2", "A3", "F3", "A4"]
    for role, load in (("A", prediction.attention), ("F", prediction.ffn)):
        total = sum(s.compute_s for s in stages if s.name.startswith(role)) * chosen.layout.n_microbatches
        assert total == pytest.approx(load.compute_s)
    sent = sum(s.exchange_s for s in stages if s.name.startswith("F")) * chosen.layout.n_microbatches
    assert sent == pytest.approx(prediction.ffn.exchange_s)


def test_a_role_below_its_ridge_waits_for_its_nics() -> None:
    for token_bytes in (2, 10**7):
        problem = problem_of(costs_of(token_bytes=token_bytes))
        model, chosen = solved(problem)
        prediction = model.predict(chosen)
        for roof, load in zip(roofs(model, chosen, prediction), (prediction.attention, prediction.ffn)):
            assert (roof.intensity < roof.ridge) == (load.compute_s < load.exchange_s)


def test_only_the_side_that_limits_gains_from_one_more_device() -> None:
    problem = problem_of(costs_of(attention=4e11, token_bytes=2), cluster_of(4, 4), pipeline_groups=1)
    model, chosen = solved(problem)
    gains = {change.what: change.faster for change in one_more(problem, model, chosen)}
    m = chosen.layout.attention_group_size
    assert gains["1 GPU in each attention group"] == pytest.approx(1 / m, rel=1e-3)
    assert gains["1 NIC in each attention group"] == gains["1 NIC in each ffn group"] == pytest.approx(0)


def test_before_allocation_both_sides_have_as_much() -> None:
    problem = problem_of(costs_of(attention=4e11), cluster_of(4, 4), pipeline_groups=1)
    _, chosen = solved(problem)
    even = even_split(problem, chosen)
    assert even.layout.attention_group_size == even.layout.ffn_group_size == 8
    assert even.attention_nics == even.ffn_nics
