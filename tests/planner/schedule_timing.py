"""A small event simulation of our schedules: compute in list order, exchanges one after the other on a group's send link."""

from __future__ import annotations

from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.topology import Group, Topology


def makespan(
    topology: Topology, n_microbatches: int, in_flight: int, *, a: float, f: float, exchange: float
) -> float:
    """Of a training step; `a`, `f`: forward of a stage, backward twice that; `exchange`: one direction. The head is free."""
    schedule = af_pipe(topology, n_microbatches, interleave=in_flight)
    lists = {group: list(schedule.of(group)) for group in topology.groups}
    last = topology.n_stages - 1
    clock = dict.fromkeys(lists, 0.0)
    link = dict.fromkeys(lists, 0.0)
    arrived: dict[tuple[bool, int, int | None], float] = {}

    def ready(group: Group) -> float | None:
        action = lists[group][0]
        if action.kind is ActionKind.BACKWARD_WEIGHT or (
            action.kind is ActionKind.FORWARD and action.stage == 0
        ):
            return clock[group]
        is_forward = action.kind is ActionKind.FORWARD
        when = arrived.get((is_forward, action.stage, action.microbatch))
        return None if when is None else max(clock[group], when)

    while any(lists.values()):
        starts = {g: start for g, todo in lists.items() if todo and (start := ready(g)) is not None}
        group = min(starts, key=lambda g: starts[g])
        action = lists[group].pop(0)
        base = 0.0 if action.stage == last else f if action.stage % 2 else a
        parts = 2 if action.kind is ActionKind.BACKWARD else 1
        clock[group] = end = starts[group] + base * parts
        step = 1 if action.kind is ActionKind.FORWARD else -1
        if action.kind is ActionKind.FORWARD and action.stage == last:
            arrived[False, last, action.microbatch] = end
        elif action.kind is not ActionKind.BACKWARD_WEIGHT and action.stage + step >= 0:
            link[group] = max(link[group], end) + exchange
            arrived[step > 0, action.stage + step, action.microbatch] = link[group]
    return max(clock.values())
