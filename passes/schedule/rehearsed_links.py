"""Messages of a rehearsal: each group sends one after the other, and what moves at once over one link shares it.

    sender 0   ==m0==|==m2==          a queue: m2 leaves when m0 is there
    sender 1      ===m1===            m0 and m1 go to one receiver: while both move, each gets a fair share of its way in

Beside its way a message may have copies to make inside the nodes of one group, over that group's own link, which is shared by
all that have; it is there when both are done. As the simulator's links, for this one shape of traffic. Groups and messages are
numbers: a search rehearses hundreds of thousands of messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Happen = Callable[[Any, float], None]
"""What happens, given what to and when."""


class At(Protocol):
    """Lets something happen to something at a time."""

    def __call__(self, time: float, happen: Happen, what: Any, /) -> None: ...


class Way(NamedTuple):
    """Of a message: the group that it goes to, and its amount; the group that makes copies of it, and theirs."""

    dst: int
    amount: float
    copied_in: int = 0
    copied: float = 0.0


@dataclass(slots=True, eq=False)
class _Message:
    """`legs`: how many of its moves are under way."""

    src: int
    number: int
    legs: int


@dataclass(slots=True, eq=False)
class _Flow:
    """What is left of a move, the most of it that its sender can send in a unit of time, and what it gets."""

    left: float
    sendable: float
    message: _Message
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class _Link:
    """One that flows share, in the order in which they began. `version` counts changes of them."""

    capacity: float
    flows: list[_Flow] = field(default_factory=list)
    since: float = 0.0
    version: int = 0

    def advance(self, now: float) -> None:
        for flow in self.flows:
            flow.left -= flow.rate * (now - self.since)
        self.since = now

    def share(self) -> _Flow:
        """Fair rates; the flow that ends first."""
        flows, first = self.flows, self.flows[0]
        if len(flows) == 1:
            first.rate = min(first.sendable, self.capacity)
            return first
        free, waiting = self.capacity, len(flows)
        for flow in sorted(flows, key=lambda flow: flow.sendable):
            flow.rate = min(flow.sendable, free / waiting)
            free -= flow.rate
            waiting -= 1
        return min(flows, key=lambda flow: max(flow.left, 0.0) / flow.rate)


class RehearsedLinks:
    """`rates`: of each group one way; `inside`: of each group's nodes; in amounts a unit of time. `at` runs something at a time.
    `latency`: of each message. `arrives` is run with a message's number when all of it is there.
    """

    def __init__(
        self, rates: Sequence[float], inside: Sequence[float], latency: float, at: At, arrives: Happen
    ) -> None:
        self._rates, self._latency, self._at, self._arrives = rates, latency, at, arrives
        self._into, self._inside = [_Link(rate) for rate in rates], [_Link(rate) for rate in inside]
        self._queues: list[deque[tuple[Way, int]]] = [deque() for _ in rates]
        self._is_sending = [False] * len(rates)

    def send(self, src: int, way: Way, number: int, now: float) -> None:
        """Queue a message."""
        self._queues[src].append((way, number))
        if not self._is_sending[src]:
            self._send_next(src, now)

    def _send_next(self, src: int, now: float) -> None:
        self._is_sending[src] = bool(self._queues[src])
        if self._is_sending[src]:
            way, number = self._queues[src].popleft()
            message = _Message(src, number, legs=2 if way.copied else 1)
            self._begin(self._into[way.dst], _Flow(way.amount, self._rates[src], message), now)
            if way.copied:
                self._begin(self._inside[way.copied_in], _Flow(way.copied, math.inf, message), now)

    def _begin(self, link: _Link, flow: _Flow, now: float) -> None:
        link.advance(now)
        link.flows.append(flow)
        self._foresee(link, now)

    def _foresee(self, link: _Link, now: float) -> None:
        link.version += 1
        if link.flows:
            first = link.share()
            end = now + max(first.left, 0.0) / first.rate
            self._at(end, self._ends, (link, link.version, first))

    def _ends(self, what: tuple[_Link, int, _Flow], now: float) -> None:
        """The end of a flow as foreseen, unless something has changed since."""
        link, version, flow = what
        if link.version != version:
            return
        link.advance(now)
        link.flows.remove(flow)
        self._foresee(link, now)
        message = flow.message
        message.legs -= 1
        if not message.legs:
            self._at(now + self._latency, self._is_there, message)

    def _is_there(self, message: _Message, now: float) -> None:
        self._arrives(message.number, now)
        self._send_next(message.src, now)
