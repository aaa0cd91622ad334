"""A broken rule, and the table that shows where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group


@dataclass(frozen=True, slots=True)
class Violation:
    """`rule` is one of `validate.RULES`. `group` and `position` point into a schedule's list, where the fault has a place there.

    `message` is one line; `detail` may hold a table. `str` is the message behind its rule.
    """

    rule: str
    message: str
    group: Group | None = None
    position: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}"


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
        texts = [
            (">> " if (group, k) in marked else "") + f"{k} {action}"
            for k, action in enumerate(schedule.of(group))
        ]
        if around is not None:
            at = around[group]
            before = texts[max(0, at - reach) : at]
            texts = [""] * (reach - len(before)) + before + texts[at : at + reach + 1]
        columns.append([str(group), *texts])
    height = max(map(len, columns), default=0)
    widths = [max(map(len, column)) for column in columns]
    rows = (
        "  ".join(
            (column[row] if row < len(column) else "").ljust(width) for column, width in zip(columns, widths)
        )
        for row in range(height)
    )
    return "\n".join(row.rstrip() for row in rows)
