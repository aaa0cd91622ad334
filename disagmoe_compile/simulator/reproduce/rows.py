"""A figure as rows, each with our number, the paper's where we know it, and a verdict.

reproduced       within TOLERANCE of the paper's number
direction only   the same way (larger or smaller than the row's `neutral` value), not the same size
not reproduced   neither
no number known  the paper's number is not known to us
out of memory    a system that the row is about has no choice that fits in memory: its number is what it would be with memory that
                 it does not have, and a comparison with it has none
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.15
"""Relative. Chosen before any figure was run."""


@dataclass(frozen=True, slots=True)
class Row:
    """`what` is compared; `series` and `x` place it in the plot. `neutral`: the value that would mean "no effect". `too_large`:
    the systems that do not fit in memory; with them `ours` may be NaN, and otherwise not.
    """

    what: str
    series: str
    x: float
    ours: float
    paper: float | None = None
    neutral: float | None = None
    reason: str = ""
    too_large: Sequence[str] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.ours) and not self.too_large:
            raise ValueError(f"row {self.what!r} has no number, and no system of it lacks memory")

    @property
    def verdict(self) -> str:
        if self.too_large:
            return "out of memory"
        if self.paper is None:
            return "no number known"
        if abs(self.ours - self.paper) <= TOLERANCE * abs(self.paper):
            return "reproduced"
        if self.neutral is not None and (self.ours - self.neutral) * (self.paper - self.neutral) > 0:
            return "direction only"
        return "not reproduced"

    @property
    def why_not(self) -> str:
        """The reason for any verdict but `reproduced`."""
        if self.too_large:
            return f"does not fit in memory: {', '.join(self.too_large)}"
        return self.reason if self.verdict in ("direction only", "not reproduced") else ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "series": self.series,
            "x": self.x,
            "ours": None if math.isnan(self.ours) else self.ours,
            "paper": self.paper,
            "verdict": self.verdict,
            "reason": self.why_not,
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """`notes` hold for the whole figure."""

    name: str
    title: str
    x_label: str
    y_label: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "simulated": True,
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }
