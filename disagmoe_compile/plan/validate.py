"""Which of the rules (`violation.RULES`) a plan breaks. No plan runs unvalidated.

Memory, deadlocks and races are judged only on schedules whose actions are all there and in place (placement, completeness,
matching). For S actions, X of them WAITs, and G groups the cost is O(S + X * G).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan import completeness, ordering, structure
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.completeness import Case
from disagmoe_compile.plan.ir import Plan, Schedule
from disagmoe_compile.plan.steps import number_steps
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.plan.violation import Violation, grid_around

_SHOWN = (
    5  # violations in the one-line message of the error, and with a grid; all of them are in its `violations`
)


@collector_paused()
def validate(plan: Plan) -> list[Violation]:
    """Every violation of the plan and of both its schedules; empty for a plan that may run."""
    found = [
        *structure.check_stages(plan),
        *structure.check_workload(plan),
        *structure.check_transfers(plan),
    ]
    if any(violation.rule in ("stages", "transfers") for violation in found):
        return found  # schedules name stages and transfers: nothing sensible can be said of them
    for schedule, is_training in ((plan.training, True), (plan.forward_only, False)):
        if schedule is not None:
            found += _with_grids(schedule, _check_schedule(plan, schedule, is_training))
    return found


def check(plan: Plan) -> None:
    """Raise PlanError unless the plan keeps every rule; its `violations` has every one that is broken, with its table.

    The message is one line; a traceback also shows the first table, in which the failing step is marked.
    """
    found = validate(plan)
    if not found:
        return
    shown = "; ".join(map(str, found[:_SHOWN])) + (
        f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    )
    texts = [
        f"{violation}\n{violation.detail}" if violation.detail else str(violation) for violation in found
    ]
    error = PlanError(f"the plan breaks {len(found)} rule{'s' * (len(found) > 1)}: {shown}", texts)
    for violation in [one for one in found if one.detail][:1]:
        error.add_note(f"{violation}\n{violation.detail}")
    raise error


def _with_grids(schedule: Schedule, violations: Iterable[Violation]) -> list[Violation]:
    """The first few show their step in the grid of all groups."""
    found = list(violations)
    for index, one in enumerate(found[:_SHOWN]):
        if one.group is not None and one.position is not None and not one.detail:
            found[index] = replace(one, detail=grid_around(schedule, one.group, one.position))
    return found


def _check_schedule(plan: Plan, schedule: Schedule, is_training: bool) -> Iterator[Violation]:
    if not schedule.lowered:
        yield Violation("lowered", f"{schedule.name} is a compute-only schedule: lower it before it runs")
        return
    if set(schedule.actions) != set(plan.topology.groups):
        groups = ", ".join(map(str, sorted(schedule.actions)))
        expected = ", ".join(map(str, plan.topology.groups))
        yield Violation("lowered", f"{schedule.name} is for groups {groups}, the topology has {expected}")
        return
    routes = Routes(plan.transfers)
    case = Case(plan, schedule, routes, number_steps(schedule, routes), is_training)
    structural = [
        *completeness.check_placement(case),
        *completeness.check_completeness(case),
        *completeness.check_matching(case),
    ]
    yield from structural
    yield from ordering.check_waits(case)
    yield from completeness.check_reductions(case)
    yield from completeness.check_overlaps(case)
    dependencies = list(ordering.dependencies(case))
    yield from ordering.check_lists(case, dependencies)
    if not structural:
        yield from completeness.check_residency(case)
        yield from ordering.check_deadlock(case)
        yield from ordering.check_streams(case, dependencies)
