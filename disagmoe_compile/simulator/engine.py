"""Discrete events: tasks, what each comes after, and what each takes.

A task starts when everything it comes after has ended. It takes a `delay`, or moves amounts over links that it shares with others
(`plan/sharing.py`) and then takes its delay (a message's latency). Order in a queue is nothing but "comes after the one before".

    F0 ──> SEND 0 ──> message 0 ──> WAIT 0 ──> F1        a chain over two workers; `message 0` has links, F0 and F1 delays

With T tasks, D dependencies and C tasks moving at once over links they share, the cost is O(T log T + D + moves * C).
Deterministic: what happens at one time happens in the order of task numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from disagmoe_compile.plan.sharing import Leg, Link, Network, Number


@dataclass(slots=True)
class Tasks:
    """Numbered from 0. `after[t]` may name tasks that are added later."""

    delay: list[Number] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    legs: dict[int, Sequence[Leg]] = field(default_factory=dict)

    def add(self, delay: Number = 0, after: Sequence[int] = (), legs: Sequence[Leg] = ()) -> int:
        number = len(self.delay)
        self.delay.append(delay)
        self.after.append(list(after))
        if legs:
            self.legs[number] = legs
        return number


@dataclass(frozen=True, slots=True)
class Times:
    """When each task started and ended."""

    start: Sequence[Number]
    end: Sequence[Number]

    @property
    def makespan(self) -> Number:
        return max(self.end, default=0)


class Deadlock(Exception):
    """Tasks that wait for each other; `cycle` lists them, each waiting for the next and the last for the first."""

    def __init__(self, cycle: Sequence[int]) -> None:
        super().__init__(f"tasks wait for each other: {cycle}")
        self.cycle = tuple(cycle)


def run(tasks: Tasks, capacities: Mapping[Link, Number]) -> Times:
    """Times of all tasks, from 0. Raises Deadlock where some can never start."""
    return _Run(tasks, capacities).times()


class _Run:
    def __init__(self, tasks: Tasks, capacities: Mapping[Link, Number]) -> None:
        self.tasks = tasks
        size = len(tasks.delay)
        self.missing = [len(after) for after in tasks.after]
        self.next: list[list[int]] = [[] for _ in range(size)]
        for task, after in enumerate(tasks.after):
            for before in after:
                self.next[before].append(task)
        self.start: list[Number] = [0] * size
        self.end: list[Number] = [0] * size
        self.legs_left: dict[int, int] = {}
        self.task_of_leg: list[int] = []
        self.network = Network(capacities)
        self.pending: list[tuple[Number, int]] = []

    def times(self) -> Times:
        self.open = len(self.missing)
        self._start([task for task, count in enumerate(self.missing) if not count], 0)
        pending, network = self.pending, self.network
        while True:
            moved = network.next_end()
            if pending and (moved is None or pending[0][0] <= moved):
                now, task = heapq.heappop(pending)
                self._end(task, now)
            elif moved is not None:
                self._leg_ends(self.task_of_leg[network.finish()], moved)
            else:
                break
        if self.open:
            raise Deadlock(self._cycle())
        return Times(self.start, self.end)

    def _start(self, ready: list[int], now: Number) -> None:
        """Start tasks, and at once all that follow from those which take no time."""
        delay, legs = self.tasks.delay, self.tasks.legs
        while ready:
            task = ready.pop()
            self.start[task] = now
            if task in legs:
                self._move(task, [leg for leg in legs[task] if leg.amount > 0], now)
            elif delay[task]:
                heapq.heappush(self.pending, (now + delay[task], task))
            else:
                ready += self._ended(task, now)

    def _move(self, task: int, legs: Sequence[Leg], now: Number) -> None:
        if not legs:
            heapq.heappush(self.pending, (now + self.tasks.delay[task], task))
        self.legs_left[task] = len(legs)
        for leg in legs:
            self.task_of_leg.append(task)
            self.network.add(len(self.task_of_leg) - 1, leg.amount, leg.links, now)

    def _leg_ends(self, task: int, now: Number) -> None:
        self.legs_left[task] -= 1
        if not self.legs_left[task]:
            heapq.heappush(self.pending, (now + self.tasks.delay[task], task))

    def _end(self, task: int, now: Number) -> None:
        ready = self._ended(task, now)
        if ready:
            self._start(ready, now)

    def _ended(self, task: int, now: Number) -> list[int]:
        self.end[task] = now
        self.open -= 1
        missing, ready = self.missing, []
        for follower in self.next[task]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
        return ready

    def _cycle(self) -> Sequence[int]:
        stuck = {task for task, count in enumerate(self.missing) if count}
        waits = nx.DiGraph([(t, b) for t in sorted(stuck) for b in self.tasks.after[t] if b in stuck])
        return [task for task, _ in nx.find_cycle(waits)]
