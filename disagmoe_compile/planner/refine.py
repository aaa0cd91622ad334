"""Algorithm 1 of the paper: local search around the solver's plan on a profile, e.g. measured step time.

    1. enumerate the plans within `tie` of the best predicted rate; the most balanced one is the seed
    2. K trials: a random neighbour within radius r of the best plan so far is profiled, and kept if it is faster

A neighbour differs by at most r in the ranks of a group (what attention gains the experts lose), by a factor of up to 2^r in the
micro-batches in flight, and may recompute where the best does not and the other way round. It fits the memory by prediction.
Plans are profiled once. The result is the fastest plan profiled, the seed among them, so it is never worse than the seed. Same
random seed, same trials: only the profile may differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.layout_search import best_of_layout, upper_bounds, with_best_nics
from disagmoe_compile.planner.sizing_problem import Candidate, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_model import StepModel

Profile = Callable[[Candidate], float]
"""Seconds of a step of a plan; infinite where it does not run."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One profiled plan, and whether it became the best. Batches may differ: compared are seconds a sequence."""

    candidate: Candidate
    step_s: float
    is_best: bool

    @property
    def seconds_per_sequence(self) -> float:
        return self.step_s / self.candidate.layout.global_batch_size


@dataclass(frozen=True, slots=True)
class Refinement:
    """`best`: of the whole trajectory; the first trial is the seed."""

    best: Trial
    trajectory: tuple[Trial, ...]
    ties: int


def refine(
    problem: SizingProblem,
    profile: Profile,
    *,
    start: Candidate,
    trials: int = 16,
    radius: int = 2,
    tie: float = 1e-3,
    seed: int = 0,
) -> Refinement:
    """`start`: the solver's plan. Raises InputError for impossible settings, or a profile that is not a positive number."""
    if trials < 0 or radius < 1 or tie < 0:
        raise InputError(
            f"trials and tie must be at least 0 and radius at least 1, got {trials}, {tie} and {radius}"
        )
    model = StepModel(problem)
    tied = ties(problem, model, start, tie)
    first = min(tied, key=lambda c: (-model.predict(c).balance, c))
    generator = random.Random(seed)
    best = Trial(first, _profiled(profile, first), is_best=True)
    trajectory = [best]
    seen = {first}
    while len(trajectory) <= trials:
        around = [c for c in neighbours(problem, model, best.candidate, radius) if c not in seen]
        if not around:
            break
        candidate = generator.choice(around)
        seen.add(candidate)
        trial = Trial(candidate, _profiled(profile, candidate), is_best=False)
        if trial.seconds_per_sequence < best.seconds_per_sequence:
            best = trial = replace(trial, is_best=True)
        trajectory.append(trial)
    return Refinement(best, tuple(trajectory), len(tied))


def ties(problem: SizingProblem, model: StepModel, start: Candidate, tie: float) -> list[Candidate]:
    """The best plan of each layout whose predicted rate is within `tie` of that of `start`, `start` first."""
    least = model.predict(start).tokens_per_s * (1 - tie)
    found = [start]
    for layout, bound in upper_bounds(problem, model, problem.layouts()).items():
        if bound >= least and layout != start.layout:
            plan = best_of_layout(problem, model, layout)
            if plan is not None and plan[1].tokens_per_s >= least:
                found.append(plan[0])
    return found


def neighbours(
    problem: SizingProblem, model: StepModel, centre: Candidate, radius: int
) -> Sequence[Candidate]:
    """Plans within `radius` that go together and fit the memory, sorted."""
    found = set()
    for layout in _near_layouts(problem, centre.layout, radius):
        for policy in _near_policies(problem, layout, centre.policy, radius):
            candidate = with_best_nics(problem, model, layout, policy)
            if candidate != centre and model.fits(model.predict(candidate)):
                found.add(candidate)
    return sorted(found)


def _near_layouts(problem: SizingProblem, centre: Layout, radius: int) -> Iterator[Layout]:
    for layout in problem.layouts():
        same = layout.family == centre.family
        if same and abs(layout.attention_group_size - centre.attention_group_size) <= radius:
            yield layout


def _near_policies(problem: SizingProblem, layout: Layout, centre: Policy, radius: int) -> Iterator[Policy]:
    for policy in problem.policies(layout.pipeline_groups):
        low, high = sorted((policy.in_flight, centre.in_flight))
        if high <= low * 2**radius and problem.go_together(layout, policy):
            yield policy


def _profiled(profile: Profile, candidate: Candidate) -> float:
    seconds = profile(candidate)
    if not seconds > 0:
        raise InputError(f"a profile must return a positive number of seconds, got {seconds!r}")
    return seconds
