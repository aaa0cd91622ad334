"""Prediction against reality: a plan simulated with stage times measured on this machine, beside a recorded run of that plan.

Times of stages and the speed of messages come from the first half of the recorded steps (the first step, which compiles, left
out); the step and the sums per kind of action are compared with the second half. So the durations are measured and the order,
the waiting and the step are predicted: that is what the error judges.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.simulator.plan_program import Durations, Recorded, plan_program
from disagmoe_compile.simulator.program import Queueing
from disagmoe_compile.simulator.timeline import Timeline, simulate_program


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds: of the step, or spent in all actions of a kind by the mean rank in a step. `error` is relative to measured."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        return (self.predicted_s - self.measured_s) / self.measured_s if self.measured_s else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


def compare(plan: Plan, recorded: Sequence[Recorded]) -> tuple[Timeline, list[Row]]:
    """The simulated timeline and the rows, the step first. Raises InputError with fewer than three recorded training steps."""
    backwards = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    steps = sorted({one.step for one in recorded if one.action.kind in backwards})
    if len(steps) < 3:
        raise InputError(
            f"the timeline has {len(steps)} training steps; at least 3 are needed: one to warm up, one to measure stage times "
            "from, one to compare with (disagmoe train --steps 5)"
        )
    kept = steps[1:]
    half = kept[: len(kept) // 2]
    durations = Durations.of_timeline(plan, [one for one in recorded if one.step in half])
    judged = [one for one in recorded if one.step in kept[len(kept) // 2 :]]
    timeline = simulate_program(plan_program(plan, durations, queueing=Queueing.HOST))
    rows = [Row("step", float(timeline.makespan), _measured_step(judged))]
    predicted, measured = _predicted_kinds(plan, timeline), _measured_kinds(plan, judged)
    rows += [Row(kind, predicted[kind], measured[kind]) for kind in sorted(measured)]
    return timeline, rows


def _measured_step(recorded: Sequence[Recorded]) -> float:
    """Median over steps, from the first action of any rank to the last."""
    spans: defaultdict[int, list[Recorded]] = defaultdict(list)
    for one in recorded:
        spans[one.step].append(one)
    return statistics.median(max(o.end for o in s) - min(o.start for o in s) for s in spans.values())


_SHOWN = {
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.WAIT,
    ActionKind.REDUCE_GRAD,
}


def _measured_kinds(plan: Plan, recorded: Sequence[Recorded]) -> dict[str, float]:
    n = len({one.step for one in recorded}) * plan.topology.world_size
    sums: defaultdict[str, float] = defaultdict(float)
    for one in recorded:
        if one.action.kind in _SHOWN:
            sums[one.action.kind.value] += (one.end - one.start) / n
    return dict(sums)


def _predicted_kinds(plan: Plan, timeline: Timeline) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for group in timeline.groups:
        ranks = len(plan.topology.ranks_of_group(group))
        for action, start, end in timeline.events(group):
            if action.kind in _SHOWN:
                sums[action.kind.value] += float(end - start) * ranks / plan.topology.world_size
    return sums
