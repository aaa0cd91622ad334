"""AF-Pipe by list scheduling: whenever a group is free it runs the best of what is ready, in a rehearsal with the stages' times.

    ready      an action whose inputs have arrived
    best       by a rule (`Rule`); each is rehearsed, and the one whose step is shortest makes the lists
    cap        at most `in_flight` micro-batches are between their first F and their last W: a group never holds more activations
               than that many per stage
    I, W       a backward is split: what others wait for comes first, and W fills the gaps; whole (B) stay that of stage 0, which
               has no input gradient, and that of a tied head

The order of the lists is one that ran: it cannot deadlock, whatever the number of micro-batches, groups or stages, and whatever
the real times turn out to be. Messages of the rehearsal share links (`rehearsed_links.py`): those of one group leave one after
the other, a dispatch before the residual, as lowering orders them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from disagmoe_compile.passes.schedule.order import checked_microbatches
from disagmoe_compile.passes.schedule.rehearsed_links import RehearsedLinks
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group, Role, Topology

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

Seconds = Mapping[tuple[ActionKind, int], float]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Times that the order is made for, in any unit.

    `seconds`: of an action of a stage. `exchange`, `residual`: amount of a dispatch or combine, and of what crosses from one
    attention group to another beside it. `attention_rate`, `ffn_rate`: amount that a group of the role sends, and receives, in a
    unit of time; with the default of 1 amounts are times. `latency`: of each message.
    """

    seconds: Seconds
    exchange: float
    residual: float = 0.0
    attention_rate: float = 1.0
    ffn_rate: float = 1.0
    latency: float = 0.0

    @staticmethod
    def uniform(topology: Topology) -> Rehearsal:
        """Every stage and gradient takes as long as any other, an exchange half of it."""
        kinds = (_F, _I, _W)
        table = {(kind, stage): 1.0 for stage in range(topology.n_stages) for kind in kinds}
        return Rehearsal(table | {(_B, stage): 2.0 for stage in range(topology.n_stages)}, 0.5)


@dataclass(frozen=True, slots=True)
class Rule:
    """What goes first of what is ready: forwards or input gradients (W is always last), and of forwards the micro-batch that
    entered first or last. Of anything else the one that entered first.
    """

    forwards_first: bool
    youngest_first: bool

    def key(self, kind: ActionKind, microbatch: int) -> tuple[int, int]:
        """Least goes first."""
        if kind is _F:
            return 1 - self.forwards_first, -microbatch if self.youngest_first else microbatch
        return 2 if kind is _W else int(self.forwards_first), microbatch


RULES = (Rule(False, False), Rule(True, False), Rule(True, True))
"""Input gradients first frees memory soonest and is best where compute is the limit; where links are, forwards first keeps them
fuller.
"""


def list_schedule(
    topology: Topology, n_microbatches: int, *, in_flight: int, rehearsal: Rehearsal | None = None
) -> Schedule:
    """Compute-only schedule of a training step, the shortest by rehearsal. Raises ValueError on a size below 1."""
    return list_schedules(topology, n_microbatches, in_flight=in_flight, rehearsal=rehearsal)[0]


def list_schedules(
    topology: Topology, n_microbatches: int, *, in_flight: int, rehearsal: Rehearsal | None = None
) -> tuple[Schedule, ...]:
    """One for each rule that gives lists of its own, the shortest by rehearsal first: the next may hold less."""
    checked_microbatches(n_microbatches, in_flight)
    times = rehearsal or Rehearsal.uniform(topology)
    runs = [_Run(topology, n_microbatches, in_flight, times, rule) for rule in RULES]
    ranked = sorted(runs, key=lambda run: run.makespan())
    distinct = [run for i, run in enumerate(ranked) if run.lists() not in [r.lists() for r in ranked[:i]]]
    return tuple(Schedule("af_pipe_list", lowered=False, actions=run.lists()) for run in distinct)


@dataclass(slots=True)
class _Worker:
    """A group: what is ready, and what it did."""

    ready: list[tuple[tuple[int, int], int, ActionKind, int]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    is_busy: bool = False


class _Run:
    def __init__(
        self, topology: Topology, n_microbatches: int, in_flight: int, times: Rehearsal, rule: Rule
    ) -> None:
        self.topology, self.n, self.times, self.rule = topology, n_microbatches, times, rule
        self.last = topology.n_stages - 1
        self.workers = {group: _Worker() for group in topology.groups}
        self.group_of = [topology.group_of_stage(s) for s in range(topology.n_stages)]
        self.links = RehearsedLinks(
            {
                g: times.attention_rate if g.role is Role.ATTENTION else times.ffn_rate
                for g in topology.groups
            },
            times.latency,
            self._at,
        )
        self.slots = in_flight
        self.entered = 0
        self.open_weights = [topology.n_stages] * n_microbatches
        self.awaited: dict[tuple[ActionKind, int, int], int] = {}
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    @collector_paused()
    def makespan(self) -> float:
        """Rehearses the step."""
        self._at(0.0, self._enter)
        now = 0.0
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                heapq.heappop(self.events)[2](now)
            for worker in self.workers.values():
                if worker.ready and not worker.is_busy:
                    self._start(worker, now)
        return now

    def lists(self) -> dict[Group, tuple[Action, ...]]:
        return {group: tuple(worker.actions) for group, worker in self.workers.items()}

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, happen))

    def _enter(self, now: float) -> None:
        """Let micro-batches in while the cap allows."""
        while self.slots and self.entered < self.n:
            self.slots -= 1
            self._ready(_F, 0, self.entered)
            self.entered += 1

    def _ready(self, kind: ActionKind, stage: int, microbatch: int) -> None:
        key = self.rule.key(kind, microbatch)
        heapq.heappush(self.workers[self.group_of[stage]].ready, (key, stage, kind, microbatch))

    def _start(self, worker: _Worker, now: float) -> None:
        _, stage, kind, microbatch = heapq.heappop(worker.ready)
        worker.actions.append(Action(kind, stage, microbatch))
        worker.is_busy = True

        def happen(end: float) -> None:
            worker.is_busy = False
            self._ended(kind, stage, microbatch, end)

        self._at(now + self.times.seconds[kind, stage], happen)

    def _ended(self, kind: ActionKind, stage: int, microbatch: int, now: float) -> None:
        if kind is _F:
            if stage == self.last:
                # a tied head adds to stage 0's gradients: no W of it may be left when those are summed over the replicas
                self._ready(_B if self.topology.tied_head else _I, stage, microbatch)
            else:
                self._send(stage, +1, microbatch, now)
            return
        if kind is not _W and stage:
            self._send(stage, -1, microbatch, now)
        if kind is _I:
            self._ready(_W, stage, microbatch)
            return
        self.open_weights[microbatch] -= 1
        if not self.open_weights[microbatch]:
            self.slots += 1
            self._enter(now)

    def _send(self, stage: int, step: int, microbatch: int, now: float) -> None:
        """To the stage after this one, or before it, and from an attention stage the residual to the next one, if that is on
        another group: it waits for both.
        """
        self._message(stage, stage + step, step, self.times.exchange, microbatch, now)
        other = stage + 2 * step
        if stage % 2 == 0 and 0 <= other <= self.last and self.group_of[other] != self.group_of[stage]:
            self._message(stage, other, step, self.times.residual, microbatch, now)

    def _message(self, src: int, dst: int, step: int, amount: float, microbatch: int, now: float) -> None:
        kind = _F if step > 0 else _I if dst else _B
        key = (kind, dst, microbatch)
        if key not in self.awaited:
            before = dst - 2 * step
            crosses = (
                dst % 2 == 0 and 0 <= before <= self.last and self.group_of[before] != self.group_of[dst]
            )
            self.awaited[key] = 1 + crosses

        def arrives(_: float) -> None:
            self.awaited[key] -= 1
            if not self.awaited[key]:
                del self.awaited[key]
                self._ready(kind, dst, microbatch)

        self.links.send(self.group_of[src], self.group_of[dst], amount, now, arrives)
