"""AF-Pipe by list scheduling: whenever a group is free it runs the best of what is ready, in a rehearsal with the stages' times.

    ready      an action whose inputs have arrived
    best       by a rule (`Rule`); each is rehearsed, and the one whose step is shortest makes the lists
    cap        at most `in_flight` micro-batches are between their first F and their last W: a group never holds more activations
               than that many per stage
    evenly     some rules let the next one in only while about half of those are in their forward: micro-batches that go forward
               all together come back all together, and what a forward loads most is idle in the meantime
    I, W       a backward is split: what others wait for comes first, and W fills the gaps; whole (B) stay that of stage 0, which
               has no input gradient, and that of a tied head

The order of the lists is one that ran: it cannot deadlock, whatever the number of micro-batches, groups or stages, and whatever
the real times turn out to be. Messages of the rehearsal share links, and gradients are summed over replicas, as in the simulator
(`rehearsed_links.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from disagmoe_compile.passes.schedule.order import checked_microbatches
from disagmoe_compile.passes.schedule.rehearsal import Rehearsal
from disagmoe_compile.passes.schedule.rehearsed_links import Channel, Happen, RehearsedLinks
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.ir import Direction, Schedule
from disagmoe_compile.plan.sharing import Leg, Link
from disagmoe_compile.plan.topology import Group, Topology

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

Heap = list[tuple[int, int]]
"""What is ready: urgency, least first, and number."""


class First(StrEnum):
    """What goes first of what is ready. Weight gradients are always last."""

    GRADIENTS = "input gradients"
    FORWARDS = "forwards"
    TURNS = "the one that did not run last"


@dataclass(frozen=True, slots=True)
class Rule:
    """Of forwards goes first the micro-batch that entered first, or last; of input gradients the micro-batch that entered first,
    or what has the farthest way to go. Of weight gradients the micro-batch that entered first. `evenly`: at most half of the
    micro-batches in flight, and one, are in their forward.
    """

    first: First
    youngest_first: bool = False
    farthest_first: bool = False
    evenly: bool = False


RULES = (
    Rule(First.FORWARDS, youngest_first=True, farthest_first=True),
    Rule(First.GRADIENTS),
    Rule(First.FORWARDS, youngest_first=True),
    Rule(First.TURNS, youngest_first=True, farthest_first=True),
    Rule(First.FORWARDS, youngest_first=True, evenly=True),
    Rule(First.FORWARDS, youngest_first=True, farthest_first=True, evenly=True),
)
"""Input gradients first frees memory soonest and is best where compute is the limit; where links are, forwards first keeps them
fuller. In turns, as 1F1B, keeps both ways going where a message takes as long as a stage.
"""
APART = 1.05
"""How many times as long as the best rule's a step of the first rule may be: 1.03 in 8 cases of Qwen3-235B on 128 H800."""


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
    takes longer than `limit`; nor of any where the first takes `APART` times as long. Raises ValueError on a size below 1.
    """
    checked_microbatches(n_microbatches, in_flight)
    times = rehearsal or Rehearsal.uniform(topology)

    def run(rule: Rule, limit: float) -> Rehearsed | None:
        return _Run(topology, n_microbatches, in_flight, times, rule).rehearsed(limit)

    first = run(RULES[0], APART * limit)
    if first is None:
        return ()
    tried = [first, *(run(rule, limit) for rule in RULES[1:])]
    ranked = sorted(
        (one for one in tried if one is not None and one.makespan <= limit), key=lambda one: one.makespan
    )
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
        self.forwards = in_flight // 2 + 1 if rule.evenly else in_flight  # that may begin
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
        self.sends = [self._sends(direction) for direction in (Direction.FORWARD, Direction.BACKWARD)]
        self.needs = [self._needs(sends) for sends in self.sends]
        self.links = RehearsedLinks(times.links, times.latency, self._at, self._arrives)
        self.ready: list[tuple[Heap, Heap, Heap]] = [([], [], []) for _ in self.groups]
        self.preferred = [0 if rule.first is First.FORWARDS else 1 for _ in self.groups]
        self.ran: list[list[int]] = [[] for _ in self.groups]
        self.is_busy = [False] * len(self.groups)
        # what is left: seconds that each group has yet to compute, and each link to move, of what is not yet begun or queued
        self.to_compute = [0.0] * len(self.groups)
        for stage, group in enumerate(self.group_of):
            self.to_compute[group] += n_microbatches * sum(row[stage] for row in self.seconds)
        self.loads = [[self._load(messages) for messages in sends] for sends in self.sends]
        self.to_move: dict[Link, float] = dict.fromkeys(times.links, 0.0)
        for link, seconds in (load for loads in self.loads for stage in loads for load in stage):
            self.to_move[link] += n_microbatches * seconds
        self.limit, self.is_late = math.inf, False
        self.entered, self.open_weights = 0, [self.stages] * n_microbatches
        self.open_sums = dict.fromkeys(times.sums, n_microbatches)
        self.there: dict[int, int] = {}  # messages of a pass that needs more
        self.events: list[tuple[float, int, Happen, Any]] = []
        self.count, self.ended = 0, 0.0

    def _sends(self, direction: Direction) -> list[list[tuple[Channel, tuple[Leg, ...], int]]]:
        """Of a pass of each stage what it sends, and to which."""
        return [
            [
                (Channel(self.group_of[stage], self.group_of[message.to]), message.legs, message.to)
                for message in self.times.messages.get((direction, stage), ())
            ]
            for stage in range(self.stages)
        ]

    def _needs(self, sends: list[list[tuple[Channel, tuple[Leg, ...], int]]]) -> list[int]:
        """How many messages a pass of each stage waits for."""
        needs = [0] * self.stages
        for _, _, to in (message for messages in sends for message in messages):
            needs[to] += 1
        return needs

    def _load(self, messages: list[tuple[Channel, tuple[Leg, ...], int]]) -> list[tuple[Link, float]]:
        """Seconds of each link."""
        legs = [leg for _, legs, _ in messages for leg in legs]
        return [(link, float(leg.amount) / self.times.links[link]) for leg in legs for link in leg.links]

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
        self._enter()
        self.is_late = max(*self.to_compute, *self.to_move.values()) > self.limit
        now, events, workers = 0.0, self.events, range(len(self.groups))
        while True:
            for worker in workers:
                if not self.is_busy[worker] and any(self.ready[worker]):
                    self._start(worker, now)
            if not events:
                return self.ended
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

    def _enter(self) -> None:
        """Let micro-batches in while the caps allow."""
        while self.free and self.forwards and self.entered < self.n:
            self.free -= 1
            self.forwards -= 1
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
        needed = self.needs[rest // self.n][stage]
        if needed > 1:
            there = self.there.pop(number, 0) + 1
            if there < needed:
                self.there[number] = there
                return
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
        self.is_busy[worker], self.ended = False, now
        if part < 2:
            self._send(rest, part, stage, now)
            if part == 0:
                if stage == self.stages - 1:
                    self.forwards += 1
                    self._enter()
                    self._is_ready(number + self.n * self.stages)
                return
            if self.kinds[1][stage] is _I:
                self._is_ready(number + self.n * self.stages)
                return
        self._has_weights(stage, microbatch, now)

    def _send(self, rest: int, part: int, stage: int, now: float) -> None:
        for link, seconds in self.loads[part][stage]:
            self.is_late |= now + self.to_move[link] > self.limit
            self.to_move[link] -= seconds
        for channel, legs, to in self.sends[part][stage]:
            self.links.send(channel, legs, rest * self.stages + to, now)

    def _has_weights(self, stage: int, microbatch: int, now: float) -> None:
        """A weight gradient is made: the last one of a stage is summed with the others, that of a micro-batch lets another in."""
        if stage in self.open_sums:
            self.open_sums[stage] -= 1
            if not self.open_sums[stage]:
                self.links.move(self.times.sums[stage], now, self._is_summed, stage)
        self.open_weights[microbatch] -= 1
        if not self.open_weights[microbatch]:
            self.free += 1
            self._enter()

    def _is_summed(self, stage: int, now: float) -> None:
        self.ended = now
