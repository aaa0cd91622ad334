"""AF-Pipe by list scheduling: whenever a group is free it runs the best of what is ready, in a rehearsal with the stages' times.

    ready      an action whose inputs have arrived
    best       by a rule (`Rule`); each is rehearsed, and the one whose step is shortest makes the lists
    cap        at most `in_flight` micro-batches are between their first F and their last W: a group never holds more activations
               than that many per stage
    I, W       a backward is split: what others wait for comes first, and W fills the gaps; whole (B) stay that of stage 0, which
               has no input gradient, and that of a tied head

The order of the lists is one that ran: it cannot deadlock, whatever the number of micro-batches, groups or stages, and whatever
the real times turn out to be. Messages of the rehearsal share links (`rehearsed_links.py`): those of one group leave one after
the other, a dispatch before the residual, as lowering orders them. Sums of gradients over replicas are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from disagmoe_compile.passes.schedule.order import checked_microbatches
from disagmoe_compile.passes.schedule.rehearsed_links import Happen, RehearsedLinks, Way
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group, Role, Topology

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

Seconds = Mapping[tuple[ActionKind, int], float]
Heap = list[tuple[int, int]]
"""What is ready: urgency, least first, and number."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Times that the order is made for, in any unit.

    `seconds`: of an action of a stage. `exchange`, `residual`: amount of a dispatch or combine, and of what crosses from one
    attention group to another beside it; `copied`: of an exchange inside the FFN group's nodes. `attention_rate`, `ffn_rate`:
    amount that a group of the role sends, and receives, in a unit of time, `inside_rate` inside an FFN group's nodes; with the
    default of 1 amounts are times. `latency`: of each message.
    """

    seconds: Seconds
    exchange: float
    residual: float = 0.0
    attention_rate: float = 1.0
    ffn_rate: float = 1.0
    copied: float = 0.0
    inside_rate: float = 1.0
    latency: float = 0.0

    @staticmethod
    def uniform(topology: Topology) -> Rehearsal:
        """Every stage and gradient takes as long as any other, an exchange half of it."""
        kinds = (_F, _I, _W)
        table = {(kind, stage): 1.0 for stage in range(topology.n_stages) for kind in kinds}
        return Rehearsal(table | {(_B, stage): 2.0 for stage in range(topology.n_stages)}, 0.5)


class First(StrEnum):
    """What goes first of what is ready. Weight gradients are always last."""

    GRADIENTS = "input gradients"
    FORWARDS = "forwards"
    TURNS = "the one that did not run last"


@dataclass(frozen=True, slots=True)
class Rule:
    """Of forwards goes first the micro-batch that entered first, or last; of input gradients the micro-batch that entered first,
    or what has the farthest way to go. Of weight gradients the micro-batch that entered first.
    """

    first: First
    youngest_first: bool = False
    farthest_first: bool = False


RULES = (
    Rule(First.GRADIENTS),
    Rule(First.FORWARDS),
    Rule(First.FORWARDS, youngest_first=True),
    Rule(First.TURNS, farthest_first=True),
    Rule(First.TURNS, youngest_first=True, farthest_first=True),
)
"""Input gradients first frees memory soonest and is best where compute is the limit; where links are, forwards first keeps them
fuller. In turns, as 1F1B, keeps both ways going where a message takes as long as a stage.
"""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """An order, and how long its rehearsal took. `passes`: of each group, as (kind, stage, micro-batch)."""

    makespan: float
    passes: Mapping[Group, Sequence[tuple[ActionKind, int, int]]]

    def schedule(self) -> Schedule:
        """Compute-only."""
        actions = {group: tuple(Action(*one) for one in passes) for group, passes in self.passes.items()}
        return Schedule("af_pipe_list", lowered=False, actions=actions)

    def held(self, activation: Mapping[int, float]) -> dict[Group, float]:
        """The most that each group holds at once, where a stage holds `activation` of a micro-batch from F to B or W."""
        return {group: _held(passes, activation) for group, passes in self.passes.items()}


def _held(passes: Sequence[tuple[ActionKind, int, int]], activation: Mapping[int, float]) -> float:
    now = most = 0.0
    for kind, stage, _ in passes:
        if kind is _F:
            now += activation[stage]
            most = max(most, now)
        elif kind is not _I:
            now -= activation[stage]
    return most


def list_schedule(
    topology: Topology, n_microbatches: int, *, in_flight: int, rehearsal: Rehearsal | None = None
) -> Schedule:
    """Compute-only schedule of a training step, the shortest by rehearsal. Raises ValueError on a size below 1."""
    return rehearse(topology, n_microbatches, in_flight=in_flight, rehearsal=rehearsal)[0].schedule()


def rehearse(
    topology: Topology,
    n_microbatches: int,
    *,
    in_flight: int,
    rehearsal: Rehearsal | None = None,
    limit: float = math.inf,
) -> tuple[Rehearsed, ...]:
    """An order for each rule that gives one of its own, the shortest first: the next may hold less. None of a rule whose step
    takes longer than `limit`. Raises ValueError on a size below 1.
    """
    checked_microbatches(n_microbatches, in_flight)
    times = rehearsal or Rehearsal.uniform(topology)
    tried = [_Run(topology, n_microbatches, in_flight, times, rule).rehearsed(limit) for rule in RULES]
    ranked = sorted((one for one in tried if one is not None), key=lambda one: one.makespan)
    return tuple(
        one for i, one in enumerate(ranked) if one.passes not in [before.passes for before in ranked[:i]]
    )


class _Run:
    """One rehearsal. A pass is a number, from which its parts follow:

    number = (part * n + micro-batch) * stages + stage      part: 0 forward, 1 input gradient or whole backward, 2 weight gradient
    """

    def __init__(
        self, topology: Topology, n_microbatches: int, in_flight: int, times: Rehearsal, rule: Rule
    ) -> None:
        self.n, self.free, self.rule, self.times = n_microbatches, in_flight, rule, times
        self.stages, self.groups = topology.n_stages, list(topology.groups)
        number = {group: i for i, group in enumerate(self.groups)}
        self.group_of = [number[topology.group_of_stage(s)] for s in range(self.stages)]
        # a tied head adds to stage 0's gradients: no W of it may be left when those are summed over the replicas
        whole = {0, self.stages - 1} if topology.tied_head else {0}
        backwards = [_B if s in whole else _I for s in range(self.stages)]
        self.kinds = [[_F] * self.stages, backwards, [_W] * self.stages]
        self.seconds = [
            [0.0 if kind is _W and s in whole else times.seconds[kind, s] for s, kind in enumerate(kinds)]
            for kinds in self.kinds
        ]
        self.sends = [self._sends(step) for step in (1, -1)]
        self.needs = [self._needs(step) for step in (1, -1)]
        rates = [times.attention_rate if g.role is Role.ATTENTION else times.ffn_rate for g in self.groups]
        inside = [times.inside_rate] * len(rates)
        self.links = RehearsedLinks(rates, inside, times.latency, self._at, self._arrives)
        self.ready: list[tuple[Heap, Heap, Heap]] = [([], [], []) for _ in self.groups]
        self.preferred = [0 if rule.first is First.FORWARDS else 1 for _ in self.groups]
        self.ran: list[list[int]] = [[] for _ in self.groups]
        self.is_busy = [False] * len(self.groups)
        # of each group the seconds that it has yet to compute, and those that what it has yet to send takes
        self.to_compute = [0.0] * len(self.groups)
        self.to_send = [0.0] * len(self.groups)
        self.sending = [[0.0] * self.stages, [0.0] * self.stages]
        for stage, group in enumerate(self.group_of):
            self.to_compute[group] += n_microbatches * sum(row[stage] for row in self.seconds)
            for sends, sending in zip(self.sends, self.sending):
                sending[stage] = sum(way.amount for way, _ in sends[stage]) / rates[group]
                self.to_send[group] += n_microbatches * sending[stage]
        self.limit, self.is_late = math.inf, False
        self.entered, self.open_weights = 0, [self.stages] * n_microbatches
        self.half_there: set[int] = set()
        self.events: list[tuple[float, int, Happen, Any]] = []
        self.count = 0

    def _sends(self, step: int) -> list[list[tuple[Way, int]]]:
        """Of a pass of each stage (way, stage): to the next one, and from an attention stage the residual to the one after it, if
        that is on another group.
        """
        found: list[list[tuple[Way, int]]] = []
        for stage in range(self.stages):
            ways: list[tuple[Way, int]] = []
            if 0 <= stage + step < self.stages:
                experts = self.group_of[stage if stage % 2 else stage + step]
                exchange = Way(self.group_of[stage + step], self.times.exchange, experts, self.times.copied)
                ways.append((exchange, stage + step))
            if self._crosses(stage, stage + 2 * step):
                ways.append((Way(self.group_of[stage + 2 * step], self.times.residual), stage + 2 * step))
            found.append(ways)
        return found

    def _needs(self, step: int) -> list[bool]:
        """Whether a pass of each stage waits for a residual as well."""
        return [self._crosses(stage - 2 * step, stage) for stage in range(self.stages)]

    def _crosses(self, src: int, dst: int) -> bool:
        is_stage = 0 <= src < self.stages and 0 <= dst < self.stages
        return is_stage and src % 2 == 0 and self.group_of[src] != self.group_of[dst]

    def rehearsed(self, limit: float = math.inf) -> Rehearsed | None:
        """Rehearses the step; None as soon as some group has more left to compute or to send than `limit` allows."""
        self.limit = limit
        makespan = self._makespan()
        if makespan > limit:
            return None
        passes = {group: [self._pass(one) for one in ran] for group, ran in zip(self.groups, self.ran)}
        return Rehearsed(makespan, passes)

    @collector_paused()
    def _makespan(self) -> float:
        """Infinite where it is known to exceed the limit."""
        self._enter(0.0)
        self.is_late = max(*self.to_compute, *self.to_send) > self.limit
        now, events, workers = 0.0, self.events, range(len(self.groups))
        while True:
            for worker in workers:
                if not self.is_busy[worker] and any(self.ready[worker]):
                    self._start(worker, now)
            if not events:
                return now
            if self.is_late:
                return math.inf
            now = events[0][0]
            while events and events[0][0] == now:
                _, _, happen, what = heapq.heappop(events)
                happen(what, now)

    def _pass(self, number: int) -> tuple[ActionKind, int, int]:
        rest, stage = divmod(number, self.stages)
        part, microbatch = divmod(rest, self.n)
        return self.kinds[part][stage], stage, microbatch

    def _at(self, time: float, happen: Happen, what: Any, /) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, happen, what))

    def _enter(self, now: float) -> None:
        """Let micro-batches in while the cap allows."""
        while self.free and self.entered < self.n:
            self.free -= 1
            self._is_ready(self.entered * self.stages)
            self.entered += 1

    def _is_ready(self, number: int) -> None:
        rest, stage = divmod(number, self.stages)
        part, urgency = divmod(rest, self.n)  # the micro-batch: least goes first
        if part == 0 and self.rule.youngest_first:
            urgency = -urgency
        elif part == 1 and self.rule.farthest_first:
            urgency -= stage * self.n
        heapq.heappush(self.ready[self.group_of[stage]][part], (urgency, number))

    def _arrives(self, number: int, now: float) -> None:
        """A message for a pass, which is ready with the last of those that it needs."""
        rest, stage = divmod(number, self.stages)
        if self.needs[rest // self.n][stage]:
            if number not in self.half_there:
                self.half_there.add(number)
                return
            self.half_there.remove(number)
        self._is_ready(number)

    def _start(self, worker: int, now: float) -> None:
        ready, preferred = self.ready[worker], self.preferred[worker]
        _, number = heapq.heappop(ready[preferred] or ready[1 - preferred] or ready[2])
        rest, stage = divmod(number, self.stages)
        part = rest // self.n
        if part < 2 and self.rule.first is First.TURNS:
            self.preferred[worker] = 1 - part
        seconds = self.seconds[part][stage]
        self.ran[worker].append(number)
        self.is_busy[worker] = True
        self.is_late |= now + self.to_compute[worker] > self.limit
        self.to_compute[worker] -= seconds
        self._at(now + seconds, self._ends, number)

    def _ends(self, number: int, now: float) -> None:
        rest, stage = divmod(number, self.stages)
        part, microbatch = divmod(rest, self.n)
        worker = self.group_of[stage]
        self.is_busy[worker] = False
        if part < 2:
            self.is_late |= now + self.to_send[worker] > self.limit
            self.to_send[worker] -= self.sending[part][stage]
            for way, to in self.sends[part][stage]:
                self.links.send(worker, way, rest * self.stages + to, now)
            if part == 0:
                if stage == self.stages - 1:
                    self._is_ready(number + self.n * self.stages)
                return
            if self.kinds[1][stage] is _I:
                self._is_ready(number + self.n * self.stages)
                return
        self.open_weights[microbatch] -= 1
        if not self.open_weights[microbatch]:
            self.free += 1
            self._enter(now)
