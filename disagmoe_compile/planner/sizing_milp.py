"""The best plan of a sizing problem, with proof: a mixed-integer program (`sizing_program.py`), solved, and computed again.

Before it is built, a few promising layouts are predicted, and those layouts left out whose own bound is below what these reach
(`layout_search.py`). Its answer is a choice of integers. It is predicted again in float64, from the step model itself; a choice
that does not hold there, or is not as fast as the program says by more than its tolerance, is cut off and the program solved
again. Where the time limit comes before any solution, the best plan predicted beforehand is the answer, with the bound that is
known without the solver.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.planner.highs import InfeasibleModel, OutOfTime, solve_model
from disagmoe_compile.planner.layout_search import best_of_layout, promising, with_best_nics
from disagmoe_compile.planner.sizing_problem import Candidate, GroupSizes, Layout, Policy, SizingProblem
from disagmoe_compile.planner.sizing_program import SizingProgram
from disagmoe_compile.planner.step_model import Prediction, StepModel

RATE_TOLERANCE = 1e-5
"""Relative; of the solver's rate against the one predicted from its integers. Its own feasibility tolerance is 1e-6."""
MOST_CUTS = 50


@dataclass(frozen=True, slots=True)
class Best:
    """The best choice, and what the solver proved: no choice has more than `bound` tokens a second."""

    candidate: Candidate
    prediction: Prediction
    bound_tokens_per_s: float
    solver: str
    status: str


def solve_milp(
    problem: SizingProblem,
    model: StepModel,
    *,
    time_limit_s: float,
    excluded: Collection[GroupSizes] = (),
) -> Best | None:
    """The best choice with (p, M, N) not in `excluded`; None where nothing satisfies all constraints.

    Raises OutOfTime where the time limit came before any plan was known.
    """
    hopeful = promising(problem, model, [s for s in problem.layouts() if s.sizes not in excluded])
    cuts: set[tuple[Layout, Policy]] = set()
    while len(cuts) <= MOST_CUTS:
        program = SizingProgram(problem, model, hopeful.layouts, cuts)
        if not program.is_possible:
            return None
        try:
            solution = solve_model(program.linear, time_limit_s=time_limit_s)
        except InfeasibleModel:
            return None
        except OutOfTime as late:
            if hopeful.best is None:
                raise
            return Best(*hopeful.best, hopeful.bound, late.solver, late.ended)
        layout, policy = program.chosen(solution)
        found = _predicted_again(problem, model, layout, policy)
        if found is not None:
            candidate, prediction = found
            claimed = program.tokens_per_s(solution.objective)
            if claimed <= prediction.tokens_per_s * (1 + RATE_TOLERANCE):
                bound = max(program.tokens_per_s(solution.bound), prediction.tokens_per_s)
                return Best(candidate, prediction, bound, solution.solver, solution.status)
        cuts.add((layout, policy))
    raise DisagMoEError(
        f"HiGHS named {MOST_CUTS} choices that do not hold when computed again; its tolerances do not fit this problem: report it"
    )


def _predicted_again(
    problem: SizingProblem, model: StepModel, layout: Layout, policy: Policy
) -> tuple[Candidate, Prediction] | None:
    """The best plan of the layout, from the step model; None where the solver's policy does not hold there."""
    if not model.fits(model.predict(with_best_nics(problem, model, layout, policy))):
        return None
    return best_of_layout(problem, model, layout) if problem.go_together(layout, policy) else None
