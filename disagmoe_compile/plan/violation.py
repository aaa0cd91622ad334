"""The rules of a plan, a broken one, and the table that shows where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group

RULES = {
    "stages": "numbered 0..2B, alternating; a parameter has one owner, on the group of all its users",
    "transfers": "each boundary has exactly its transfers, between the right stages, mirrored for the backward",
    "workload": "ranks x micro-batches hold the global batch, in micro-batches no larger than they must be",
    "experts": "no FFN rank without an expert",
    "lowered": "both schedules are lowered, for the groups of the topology",
    "placement": "each action on the group of its stage, naming what exists",
    "completeness": "each stage and micro-batch: F once, and B once or I and W once",
    "matching": "each message sent once, received once",
    "wait": "one WAIT on either side of a message, between RECV and use; a WAIT for a compute event after that compute",
    "free": "one FREE on either side, after the last use",
    "size-order": "a RECV after the action that fixes its sizes",
    "order": "backward after forward, W after I, hand-overs inside a group, SEND after compute",
    "reduce-grad": "one REDUCE_GRAD per owning stage with replicas, after its last gradient",
    "memory": "activations held at once within `resident_limit`",
    "deadlock": "host order with rendezvous reaches the end",
    "race": "what one stream makes and another uses is ordered by queues and WAITs",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """`rule` is one of `RULES`. `group` and `position` point into a schedule's list, where the fault has a place there.

    `message` is one line; `detail` may hold a table. `str` is the message behind its rule.
    """

    rule: str
    message: str
    group: Group | None = None
    position: int | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"{self.rule!r} is no rule of a plan; there are {', '.join(RULES)}")

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}"


def grid_around(schedule: Schedule, group: Group, position: int) -> str:
    """The grid of all groups at about the time of one step, which is marked: at the same fraction of each group's list."""
    length = max(1, len(schedule.of(group)))
    around = {one: len(schedule.of(one)) * position // length for one in schedule.actions}
    return grid(schedule, {(group, position)}, around)


def grid(
    schedule: Schedule,
    marked: Collection[tuple[Group, int]] = (),
    around: Mapping[Group, int] | None = None,
    reach: int = 6,
) -> str:
    """The schedule as a table, one column a group and one row a step; marked steps stand behind `>>`.

    `around` shows only the groups in it, each `reach` steps before and after the given one, aligned on it.
    """
    groups = sorted(schedule.actions if around is None else around)
    columns: list[list[str]] = []
    for group in groups:
        actions = schedule.of(group)
        steps, padding = range(len(actions)), 0
        if around is not None:
            at = around[group]
            steps, padding = steps[max(0, at - reach) : at + reach + 1], max(0, reach - at)
        texts = [(">> " if (group, k) in marked else "") + f"{k} {actions[k]}" for k in steps]
        columns.append([str(group), *[""] * padding, *texts])
    height = max(map(len, columns), default=0)
    widths = [max(map(len, column)) for column in columns]
    rows = (
        "  ".join(
            (column[row] if row < len(column) else "").ljust(width) for column, width in zip(columns, widths)
        )
        for row in range(height)
    )
    return "\n".join(row.rstrip() for row in rows)
