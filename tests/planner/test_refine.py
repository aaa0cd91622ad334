"""Algorithm 1: deterministic by seed, never worse than its seed, and it finds what the prediction missed."""

from __future__ import annotations

import pytest
from sizing_cases import cluster_of, costs_of, problem_of

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.refine import Refinement, neighbours, refine, ties
from disagmoe_compile.planner.size import candidate_of, size
from disagmoe_compile.planner.sizing_problem import Candidate
from disagmoe_compile.planner.step_model import StepModel

PROBLEM = problem_of(costs_of(boundaries=2), cluster_of(4, 4), pipeline_groups=1, micro_batch_size=1)
MODEL = StepModel(PROBLEM)


@pytest.fixture(scope="module")
def start() -> Candidate:
    return candidate_of(size(PROBLEM, alternatives=0))


def predicted(candidate: Candidate) -> float:
    return MODEL.predict(candidate).step_s


def favours_attention(candidate: Candidate) -> float:
    """A machine on which a plan is faster the more ranks do attention."""
    return predicted(candidate) / candidate.layout.attention_group_size**8


def test_the_same_seed_gives_the_same_trajectory(start: Candidate) -> None:
    def run(seed: int) -> Refinement:
        return refine(PROBLEM, favours_attention, start=start, trials=12, seed=seed)

    assert run(3) == run(3)
    assert any(run(seed).trajectory != run(3).trajectory for seed in range(4, 8))


@pytest.mark.parametrize("seed", range(5))
def test_the_result_is_never_worse_than_the_seed(start: Candidate, seed: int) -> None:
    def rough(candidate: Candidate) -> float:
        return predicted(candidate) * (1 + hash((seed, candidate)) % 97 / 97)

    found = refine(PROBLEM, rough, start=start, trials=10, seed=seed)
    assert found.trajectory[0].is_best
    assert found.best.seconds_per_sequence == min(t.seconds_per_sequence for t in found.trajectory)


def test_a_machine_unlike_the_prediction_moves_the_plan(start: Candidate) -> None:
    found = refine(PROBLEM, favours_attention, start=start, trials=60, radius=2)
    assert found.best.candidate.layout.attention_group_size > start.layout.attention_group_size


def test_no_plan_is_profiled_twice_and_all_fit(start: Candidate) -> None:
    found = refine(PROBLEM, predicted, start=start, trials=30)
    tried = [t.candidate for t in found.trajectory]
    assert len(set(tried)) == len(tried) == 31
    assert all(MODEL.fits(MODEL.predict(c)) for c in tried)


def test_without_trials_the_result_is_the_most_balanced_tie(start: Candidate) -> None:
    found = refine(PROBLEM, predicted, start=start, trials=0, tie=0.2)
    tied = ties(PROBLEM, MODEL, start, 0.2)
    assert (found.ties, len(found.trajectory)) == (len(tied), 1)
    assert MODEL.predict(found.best.candidate).balance == max(MODEL.predict(c).balance for c in tied)


def test_a_plan_that_does_not_run_is_no_best(start: Candidate) -> None:
    first = refine(PROBLEM, predicted, start=start, trials=0).best.candidate
    found = refine(PROBLEM, lambda c: 1.0 if c == first else float("inf"), start=start, trials=5)
    assert found.best.candidate == first


def test_neighbours_stay_within_the_radius(start: Candidate) -> None:
    for one in neighbours(PROBLEM, MODEL, start, 1):
        assert abs(one.layout.attention_group_size - start.layout.attention_group_size) <= 1
        assert one.policy.in_flight in [start.policy.in_flight * f for f in (0.5, 1, 2)]


def test_a_profile_of_nonsense_is_refused(start: Candidate) -> None:
    with pytest.raises(InputError, match="positive number of seconds"):
        refine(PROBLEM, lambda candidate: float("nan"), start=start)
    with pytest.raises(InputError, match="radius"):
        refine(PROBLEM, predicted, start=start, radius=0)
