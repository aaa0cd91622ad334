"""The mixed-integer program against a search of every choice."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from sizing_cases import sizing_problems

from disagmoe_compile.planner import layout_search
from disagmoe_compile.planner.exhaustive import ranked
from disagmoe_compile.planner.sizing_milp import solve_milp
from disagmoe_compile.planner.sizing_problem import SizingProblem
from disagmoe_compile.planner.step_model import StepModel


def check_against_search(problem: SizingProblem) -> None:
    model = StepModel(problem)
    every = ranked(problem, model)
    best = solve_milp(problem, model, time_limit_s=60)
    if not every:
        assert best is None
        return
    assert best is not None
    assert model.fits(best.prediction)
    assert best.status == "optimal"
    assert best.prediction.tokens_per_s == pytest.approx(every[0][0].tokens_per_s, rel=1e-7)
    assert best.bound_tokens_per_s == pytest.approx(best.prediction.tokens_per_s, rel=1e-6)
    assert best.candidate in [candidate for _, candidate in every]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizing_problems())
def test_equals_a_search_of_every_choice(problem: SizingProblem) -> None:
    check_against_search(problem)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizing_problems())
def test_equals_a_search_of_every_choice_on_thousands(problem: SizingProblem) -> None:
    check_against_search(problem)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizing_problems())
def test_needs_no_plans_predicted_beforehand(problem: SizingProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search, "PLANS_TO_PREDICT", 0)
        check_against_search(problem)
