"""Messages of a rehearsal: each group sends one after the other, and what reaches a group at once shares its way in.

    sender 0   ==m0==|==m2==          a queue: m2 leaves when m0 is there
    sender 1      ===m1===            m0 and m1 go to one receiver: while both move, each gets a fair share of its way in

As the simulator's links, for this one shape of traffic; the messages inside a group's nodes are left out. Groups and messages are
numbers: a search rehearses hundreds of thousands of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Happen = Callable[[Any, float], None]
"""What happens, given what to and when."""


class At(Protocol):
    """Lets something happen to something at a time."""

    def __call__(self, time: float, happen: Happen, what: Any, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Flow:
    """What is left of a message, the most that its sender can send of it a second, and what it gets."""

    left: float
    sendable: float
    src: int
    message: int
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class _Port:
    """One group's links. `flows`: what is on its way in, in the order in which it left. `version` counts changes of it."""

    rate: float
    queue: deque[tuple[int, float, int]] = field(default_factory=deque)
    is_sending: bool = False
    flows: list[_Flow] = field(default_factory=list)
    since: float = 0.0
    version: int = 0


class RehearsedLinks:
    """`rates`: of each group one way, in amounts a unit of time. `at` runs something at a time. `latency`: of each message.
    `arrives` is run with a message's number when all of it is there.
    """

    def __init__(self, rates: Sequence[float], latency: float, at: At, arrives: Happen) -> None:
        self._ports = [_Port(rate) for rate in rates]
        self._latency, self._at, self._arrives = latency, at, arrives

    def send(self, src: int, dst: int, amount: float, message: int, now: float) -> None:
        """Queue a message."""
        port = self._ports[src]
        port.queue.append((dst, amount, message))
        if not port.is_sending:
            self._send_next(src, now)

    def _send_next(self, src: int, now: float) -> None:
        port = self._ports[src]
        if not port.queue:
            port.is_sending = False
            return
        port.is_sending = True
        dst, amount, message = port.queue.popleft()
        receiver = self._ports[dst]
        _advance(receiver, now)
        receiver.flows.append(_Flow(amount, port.rate, src, message))
        self._share(dst, receiver, now)

    def _share(self, dst: int, receiver: _Port, now: float) -> None:
        """Fair rates of all that is on its way to `dst`, and when the first of it is there."""
        receiver.version += 1
        flows = receiver.flows
        if not flows:
            return
        first = flows[0]
        if len(flows) == 1:
            first.rate = min(first.sendable, receiver.rate)
        else:
            free, waiting = receiver.rate, len(flows)
            for flow in sorted(flows, key=lambda flow: flow.sendable):
                flow.rate = min(flow.sendable, free / waiting)
                free -= flow.rate
                waiting -= 1
            first = min(flows, key=lambda flow: max(flow.left, 0.0) / flow.rate)
        end = now + max(first.left, 0.0) / first.rate
        self._at(end, self._ends, (dst, receiver.version, first))

    def _ends(self, what: tuple[int, int, _Flow], now: float) -> None:
        """The end of a flow as foreseen, unless something has changed since."""
        dst, version, flow = what
        receiver = self._ports[dst]
        if receiver.version != version:
            return
        _advance(receiver, now)
        receiver.flows.remove(flow)
        self._at(now + self._latency, self._arrives, flow.message)
        self._share(dst, receiver, now)
        self._send_next(flow.src, now)


def _advance(receiver: _Port, now: float) -> None:
    for flow in receiver.flows:
        flow.left -= flow.rate * (now - receiver.since)
    receiver.since = now
