"""Every rule that a plan must keep, and what it breaks. No plan runs unvalidated.

    stages         numbered 0..2B, alternating; a parameter has one owner, on the group of all its users
    transfers      each boundary has exactly its transfers, between the right stages, mirrored for the backward
    workload       ranks x micro-batches hold the global batch, in micro-batches no larger than they must be
    experts        no FFN rank without an expert
    lowered        both schedules are lowered, for the groups of the topology
    placement      each action on the group of its stage, naming what exists
    completeness   each stage and micro-batch: F once, and B once or I and W once
    matching       each message sent once, received once
    wait           one WAIT on either side of a message, between RECV and use; a WAIT for a compute event after that compute
    free           one FREE on either side, after the last use
    size-order     a RECV after the action that fixes its sizes
    order          backward after forward, W after I, hand-overs inside a group, SEND after compute
    reduce-grad    one REDUCE_GRAD per owning stage with replicas, after its last gradient
    memory         activations held at once within `resident_limit`
    deadlock       host order with rendezvous reaches the end
    race           what one stream makes and another uses is ordered by queues and WAITs

Memory, deadlocks and races are judged only on schedules whose actions are all there and in place (placement, completeness,
matching). For S actions, X of them WAITs, and G groups the cost is O(S + X * G).
"""

from __future__ import annotations

from collections.abc import Iterator

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan import completeness, ordering, structure
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.completeness import Case
from disagmoe_compile.plan.ir import Plan, Schedule
from disagmoe_compile.plan.steps import number_steps
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.plan.violation import Violation

_SHOWN = 5  # violations in the one-line message of the error; all of them are in its `violations`


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
            found += _check_schedule(plan, schedule, is_training)
    return found


def check(plan: Plan) -> None:
    """Raise PlanError unless the plan keeps every rule; its `violations` has every one that is broken, with its table."""
    found = validate(plan)
    if not found:
        return
    shown = "; ".join(map(str, found[:_SHOWN])) + (
        f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    )
    texts = [
        f"{violation}\n{violation.detail}" if violation.detail else str(violation) for violation in found
    ]
    raise PlanError(f"the plan breaks {len(found)} rule{'s' * (len(found) > 1)}: {shown}", texts)


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
