"""AF-Pipe by list scheduling: whenever a group is free it runs the best of what is ready, in a rehearsal with the stages' times.

    ready      an action whose inputs have arrived: I before F before W; of equal kind the micro-batch that entered first
    cap        at most `in_flight` micro-batches are between their first F and their last W: a group never holds more activations
               than that many per stage
    I, W       a backward is split: what others wait for comes first, and W fills the gaps; whole (B) stay that of stage 0, which
               has no input gradient, and that of a tied head

The order of the lists is one that ran: it cannot deadlock, whatever the number of micro-batches, groups or stages, and whatever
the real times turn out to be. In the rehearsal a message takes its time on the sending group's way out and the receiving group's
way in, one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from disagmoe_compile.passes.schedule.order import checked_microbatches
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group, Topology

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
_RANK = {_I: 0, _B: 0, _F: 1, _W: 2}

Seconds = Mapping[tuple[ActionKind, int], float]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Times that the order is made for, in any unit: of an action of a stage, of one exchange."""

    seconds: Seconds
    exchange: float

    @staticmethod
    def uniform(topology: Topology) -> Rehearsal:
        """Every stage and gradient takes as long as any other, an exchange half of it."""
        kinds = (_F, _I, _W)
        table = {(kind, stage): 1.0 for stage in range(topology.n_stages) for kind in kinds}
        return Rehearsal(table | {(_B, stage): 2.0 for stage in range(topology.n_stages)}, 0.5)


def list_schedule(
    topology: Topology, n_microbatches: int, *, in_flight: int, rehearsal: Rehearsal | None = None
) -> Schedule:
    """Compute-only schedule of a training step. Raises ValueError on a size below 1."""
    checked_microbatches(n_microbatches, in_flight)
    run = _Run(topology, n_microbatches, in_flight, rehearsal or Rehearsal.uniform(topology))
    return Schedule("af_pipe_list", lowered=False, actions=run.lists())


@dataclass(slots=True)
class _Worker:
    """A group: what is ready, what it did, and until when it and its links are taken."""

    ready: list[tuple[int, int, int, ActionKind]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    is_busy: bool = False
    out_until: float = 0.0
    in_until: float = 0.0


class _Run:
    def __init__(self, topology: Topology, n_microbatches: int, in_flight: int, times: Rehearsal) -> None:
        self.topology, self.n, self.times = topology, n_microbatches, times
        self.last = topology.n_stages - 1
        self.workers = {group: _Worker() for group in topology.groups}
        self.of_stage = [self.workers[topology.group_of_stage(s)] for s in range(topology.n_stages)]
        self.slots = in_flight
        self.entered = 0
        self.open_weights = [topology.n_stages] * n_microbatches
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    def lists(self) -> dict[Group, tuple[Action, ...]]:
        self._enter(0.0)
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
            while self.events and self.events[0][0] == now:
                heapq.heappop(self.events)[2](now)
            for worker in self.workers.values():
                self._start(worker, now)
        return {group: tuple(worker.actions) for group, worker in self.workers.items()}

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, happen))

    def _enter(self, now: float) -> None:
        """Let micro-batches in while the cap allows."""
        while self.slots and self.entered < self.n:
            self.slots -= 1
            self._at(now, self._becomes_ready(_F, 0, self.entered))
            self.entered += 1

    def _becomes_ready(self, kind: ActionKind, stage: int, microbatch: int) -> Callable[[float], None]:
        def happen(now: float) -> None:
            heapq.heappush(self.of_stage[stage].ready, (_RANK[kind], microbatch, stage, kind))

        return happen

    def _start(self, worker: _Worker, now: float) -> None:
        if worker.is_busy or not worker.ready:
            return
        _, microbatch, stage, kind = heapq.heappop(worker.ready)
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
                self._becomes_ready(_B if self.topology.tied_head else _I, stage, microbatch)(now)
            else:
                self._send(_F, stage, stage + 1, microbatch, now)
            return
        if kind is not _W and stage:
            following = stage - 1
            self._send(_I if following else _B, stage, following, microbatch, now)
        if kind is _I:
            self._becomes_ready(_W, stage, microbatch)(now)
            return
        self.open_weights[microbatch] -= 1
        if not self.open_weights[microbatch]:
            self.slots += 1
            self._enter(now)

    def _send(self, kind: ActionKind, src: int, dst: int, microbatch: int, now: float) -> None:
        sender, receiver = self.of_stage[src], self.of_stage[dst]
        start = max(now, sender.out_until, receiver.in_until)
        sender.out_until = receiver.in_until = start + self.times.exchange
        self._at(start + self.times.exchange, self._becomes_ready(kind, dst, microbatch))
