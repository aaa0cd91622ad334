"""What a simulated step did, action by action, and what follows from it. Simulated, never measured.

Of each group's compute, the step is cut into three parts that add up to the makespan:
    busy              an action runs
    exposed           nothing runs, and the message that the list waits for is on its way: sent, and not arrived
    bubble            nothing runs, and what is waited for does not exist yet (or there is nothing left to do)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.sharing import Number
from disagmoe_compile.plan.steps import parts_of
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.simulator.engine import Times
from disagmoe_compile.simulator.program import Placed, Program, simulate_tasks

_COMPUTE = COMPUTE_KINDS | {ActionKind.OVERLAP}
_HOLDING = frozenset({ActionKind.RECV, ActionKind.SEND, ActionKind.FREE})


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """As `runtime.timeline.Event`, of a group instead of a rank. A SEND's or RECV's event ends with its message."""

    action: str
    stream: str
    start: float
    end: float
    nbytes: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Of one group's step, in the program's unit of time; the three add up to the makespan."""

    busy: Number
    exposed: Number
    bubble: Number


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of a program. Made by `simulate_program`."""

    program: Program
    placed: Placed
    times: Times

    @property
    def makespan(self) -> Number:
        return self.times.makespan

    @property
    def groups(self) -> Sequence[Group]:
        return tuple(self.program.schedule.actions)

    def events(
        self, group: Group, kinds: Collection[ActionKind] = frozenset(ActionKind)
    ) -> Iterator[tuple[Action, Number, Number]]:
        """Every action of a group's list, or of some kinds, with its start and end."""
        start, end = self.times.start, self.times.end
        tasks, own = self.placed.task[group], self.placed.is_own[group]
        for k, action in enumerate(self.program.schedule.of(group)):
            if action.kind not in kinds:
                continue
            task = tasks[k]
            begins = start[task] if own[k] else end[task] if task >= 0 else 0
            ends = end[task] if own[k] else begins
            if action.kind is ActionKind.REDUCE_GRAD:
                move = self.placed.reduction[group, k]
                begins, ends = start[move], end[move]
            elif action.kind in (ActionKind.SEND, ActionKind.RECV):
                assert action.transfer is not None and action.microbatch is not None
                ends = max(begins, end[self.placed.message[action.transfer, action.microbatch]])
            elif action.kind is ActionKind.WAIT and own[k]:
                begins = max((end[before] for before in self.placed.tasks.after[task][:-1]), default=0)
            yield action, begins, ends

    def share(self, group: Group) -> Share:
        """How the group's compute spends the step."""
        computes: list[Interval] = []
        waits: list[Interval] = []  # for a message that is on its way, or while gradients are being summed
        for action, start, end in self.events(group, _COMPUTE | {ActionKind.REDUCE_GRAD, ActionKind.WAIT}):
            if action.kind in _COMPUTE:
                computes.append((start, end))
            elif action.kind is ActionKind.REDUCE_GRAD:
                waits.append((start, end))
            elif action.kind is ActionKind.WAIT and action.transfer is not None and end > start:
                assert action.microbatch is not None
                move = self.placed.message[action.transfer, action.microbatch]
                waits.append((max(start, self.times.start[move]), end))
        busy = _union(computes)
        spent = _measure(busy)
        exposed = _measure(_union([*busy, *waits])) - spent
        return Share(spent, exposed, self.makespan - spent - exposed)

    def busiest(self) -> Group:
        """The group whose compute is busy longest, the critical one; the first of equals."""
        return max(self.groups, key=lambda group: self.share(group).busy)

    def peak_bytes(
        self, activation: Mapping[int, Number], received: Mapping[str, Number] | None = None
    ) -> dict[Group, Number]:
        """The most that each group holds at once: `activation` of a stage from its F to its B or W, what is `received` from its
        RECV to its FREE, and what it sends (as much as is received) until it has left.
        """
        return {group: self._peak(group, activation, received or {}) for group in self.groups}

    def _peak(self, group: Group, activation: Mapping[int, Number], received: Mapping[str, Number]) -> Number:
        changes: list[tuple[Number, int, Number]] = []  # time, releases first, bytes
        posted: set[tuple[str, int | None]] = set()
        for action, start, end in self.events(group, _COMPUTE | (_HOLDING if received else frozenset())):
            for part in parts_of(action):
                kept = activation.get(part.stage, 0)
                if part.kind is ActionKind.FORWARD:
                    changes.append((start, 1, kept))
                elif part.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                    changes.append((end, 0, -kept))
            size = received.get(action.transfer, 0) if action.transfer else 0
            if not size:
                continue
            if action.kind is ActionKind.RECV:
                posted.add((str(action.transfer), action.microbatch))
                changes.append((start, 1, size))
            elif action.kind is ActionKind.SEND:
                changes += [(start, 1, size), (end, 0, -size)]
            elif action.kind is ActionKind.FREE and (action.transfer, action.microbatch) in posted:
                changes.append((start, 0, -size))
        held: Number = 0
        peak: Number = 0
        for _, _, change in sorted(changes):
            held += change
            peak = max(peak, held)
        return peak

    def trace_events(self, group: Group, nbytes: Mapping[str, Number] | None = None) -> list[SimulatedEvent]:
        """The actions that take time, as the runtime records them."""
        return [
            SimulatedEvent(
                str(action),
                str(action.stream),
                float(start),
                float(end),
                int((nbytes or {}).get(action.transfer or "", 0)),
            )
            for action, start, end in self.events(group)
            if end > start
        ]


def least_bytes(
    schedule: Schedule, activation: Mapping[int, Number], received: Mapping[str, Number]
) -> dict[Group, Number]:
    """Of `Timeline.peak_bytes` what is not being sent. A group's list runs in order, so it is the same whatever the times."""
    return {group: _least_bytes(actions, activation, received) for group, actions in schedule.actions.items()}


def _least_bytes(
    actions: Iterable[Action], activation: Mapping[int, Number], received: Mapping[str, Number]
) -> Number:
    held: Number = 0
    most: Number = 0
    posted: set[tuple[str | None, int | None]] = set()
    for action in actions:
        kind, message = action.kind, (action.transfer, action.microbatch)
        if kind is ActionKind.RECV:
            held += received.get(action.transfer or "", 0)
            posted.add(message)
        elif kind is ActionKind.FREE and message in posted:
            held -= received.get(action.transfer or "", 0)
        elif kind is ActionKind.FORWARD:
            held += activation.get(action.stage, 0)
            most = max(most, held)
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            most = max(most, held)
            held -= activation.get(action.stage, 0)
    return most


Interval = tuple[Number, Number]


def simulate_program(program: Program) -> Timeline:
    """Runs a program. Raises PlanError on a deadlock, with the cycle and the grid around it."""
    placed, times = simulate_tasks(program)
    return Timeline(program, placed, times)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def _measure(disjoint: Iterable[Interval]) -> Number:
    return sum((end - start for start, end in disjoint), start=0)
