"""Every choice of a sizing problem, one after the other: the oracle that the solver is held against, for small problems."""

from __future__ import annotations

from collections.abc import Iterator

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.sizing_problem import Candidate, SizingProblem
from disagmoe_compile.planner.step_model import Prediction, StepModel

MOST_CHOICES = 1_000_000


def candidates(problem: SizingProblem) -> Iterator[Candidate]:
    """All choices of layouts, policies and NICs that go together, whether they fit the memory or not."""
    for layout in problem.layouts():
        for policy in problem.policies(layout.pipeline_groups):
            if problem.go_together(layout, policy):
                for attention, ffn in problem.nics_of_groups(layout):
                    yield Candidate(layout, policy, attention, ffn)


def ranked(problem: SizingProblem, model: StepModel | None = None) -> list[tuple[Prediction, Candidate]]:
    """All choices that fit, most tokens a second first. Raises InputError where there are more than MOST_CHOICES to look at."""
    model = model or StepModel(problem)
    found = []
    for count, candidate in enumerate(candidates(problem)):
        if count >= MOST_CHOICES:
            raise InputError(
                f"more than {MOST_CHOICES} choices: an exhaustive search is for small problems; fix some sizes"
            )
        prediction = model.predict(candidate)
        if model.fits(prediction):
            found.append((prediction, candidate))
    return sorted(found, key=lambda pair: (-pair[0].tokens_per_s, pair[1]))
