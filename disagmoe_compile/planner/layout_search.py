"""Plans of one layout from the step model alone: the best of each, a bound on any of them, and which layouts may hold the best.

The solver needs none of it to be right. It is what keeps its program small, what a search of alternatives goes by, and the plan
that is left where the solver ran out of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from disagmoe_compile.planner.sizing_problem import Candidate, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_model import Prediction, StepModel

PLANS_TO_PREDICT = 80

Plan = tuple[Candidate, Prediction]


@dataclass(frozen=True, slots=True)
class Promising:
    """`layouts` that may have the best plan; no plan of any has more than `bound` tokens a second. `best`: of those predicted."""

    layouts: list[Layout]
    bound: float
    best: Plan | None


def promising(problem: SizingProblem, model: StepModel, layouts: list[Layout]) -> Promising:
    """Without those that cannot be the best: an upper bound on their rate is below the rate of some plan that fits."""
    bounds = upper_bounds(problem, model, layouts)
    reached: Plan | None = None
    plans = 0
    for layout in sorted(layouts, key=lambda s: -bounds[s]):
        if plans >= PLANS_TO_PREDICT or bounds[layout] <= _rate(reached):
            break
        found = best_of_layout(problem, model, layout)
        if found is not None:
            plans += 1
            reached = max(reached, found, key=_rate)
    kept = [s for s in layouts if bounds[s] >= _rate(reached) * (1 - 1e-9)]
    return Promising(kept, max(bounds.values(), default=0.0), reached)


def _rate(plan: Plan | None) -> float:
    return 0.0 if plan is None else plan[1].tokens_per_s


def upper_bounds(problem: SizingProblem, model: StepModel, layouts: Iterable[Layout]) -> dict[Layout, float]:
    """Of each layout tokens a second that none of its plans exceeds."""
    return {layout: _upper_bound(problem, model, layout) for layout in layouts}


def _upper_bound(problem: SizingProblem, model: StepModel, layout: Layout) -> float:
    """Tokens a second with recompute only where even one micro-batch in flight needs it, and the most in flight.

    Where NICs are free, they are shared out in fractions. 0 where no policy fits.
    """
    policies = [k for k in problem.policies(layout.pipeline_groups) if problem.go_together(layout, k)]
    nics = next(problem.nics_of_groups(layout), None)
    if nics is None:
        return 0.0
    if problem.options.free_nics:
        nics = model.even_nics(layout, problem.nics_of_pair(layout.pipeline_groups))
    lean = [k for k in policies if k.in_flight == min(k.in_flight for k in policies)]
    fitting = {
        role: [k for k in lean if held(layout, k) <= problem.memory_bytes]
        for role, held in (("attention", model.attention_bytes), ("ffn", model.ffn_bytes))
    }
    if not all(fitting.values()):
        return 0.0
    policy = Policy(
        recompute_attention=min(k.recompute_attention for k in fitting["attention"]),
        recompute_ffn=min(k.recompute_ffn for k in fitting["ffn"]),
        shard_optimizer=False,
        in_flight=max(k.in_flight for k in policies),
    )
    return model.predict(Candidate(layout, policy, *nics)).tokens_per_s


def best_of_layout(
    problem: SizingProblem, model: StepModel, layout: Layout
) -> tuple[Candidate, Prediction] | None:
    """Of all policies that fit the fastest one, with its best NICs; among equally fast ones the simplest."""
    found = []
    for policy in problem.policies(layout.pipeline_groups):
        if problem.go_together(layout, policy):
            nics = next(problem.nics_of_groups(layout))
            if model.fits(model.predict(Candidate(layout, policy, *nics))):  # NICs do not change the memory
                candidate = with_best_nics(problem, model, layout, policy)
                found.append((candidate, model.predict(candidate)))
    if not found:
        return None
    best = max(prediction.tokens_per_s for _, prediction in found)
    tied = [f for f in found if f[1].tokens_per_s >= best * (1 - 1e-9)]
    return min(tied, key=lambda f: f[0].policy)


def with_best_nics(problem: SizingProblem, model: StepModel, layout: Layout, policy: Policy) -> Candidate:
    """Of all ways to share out the NICs the fastest; then the most even one."""

    def preference(candidate: Candidate) -> tuple[float, float]:
        uneven = abs(candidate.attention_nics - candidate.ffn_nics)
        return model.predict(candidate).pace_s, uneven

    if not problem.options.free_nics:
        return Candidate(layout, policy, *next(problem.nics_of_groups(layout)))
    pair = problem.nics_of_pair(layout.pipeline_groups)
    choices = _nics_of_attention(model, layout, policy, pair)
    return min((Candidate(layout, policy, nics, pair - nics) for nics in choices), key=preference)


def _nics_of_attention(model: StepModel, layout: Layout, policy: Policy, pair: int) -> set[int]:
    """Whole numbers from 1 to `pair` - 1 with the fastest and, of these, the most even split among them.

    The pace is the largest of a constant, one term that falls and one that rises with the number: least beside where the two
    meet, and equally low between where each of them would exceed it.
    """
    alone = model.predict(Candidate(layout, policy, 1, 1))
    attention, ffn = alone.attention.exchange_s, alone.ffn.exchange_s
    meet = model.even_nics(layout, pair)[0]
    beside = {min(max(nics, 1), pair - 1) for nics in (math.floor(meet), math.ceil(meet))}
    pace = min(model.predict(Candidate(layout, policy, nics, pair - nics)).pace_s for nics in beside)
    if pace <= 0:
        return {pair // 2}
    least, most = math.ceil(attention / pace), pair - math.ceil(ffn / pace)
    even = {min(max(nics, least, 1), max(most, 1), pair - 1) for nics in (pair // 2, pair - pair // 2)}
    return beside | even
