"""Messages of a rehearsal: each group sends one after the other, and what reaches a group at once shares its way in.

    sender 0   ==m0==|==m2==          a queue: m2 leaves when m0 is there
    sender 1      ===m1===            m0 and m1 go to one receiver: while both move, each gets a fair share of its way in

As the simulator's links, for this one shape of traffic; the messages inside a group's nodes are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Arrival = Callable[[float], None]
At = Callable[[float, Arrival], None]


@dataclass(slots=True)
class _Flow:
    """What is left of a message, the most that its sender can send of it a second, and what it gets."""

    left: float
    sendable: float
    arrives: Arrival
    rate: float = 0.0


@dataclass(slots=True)
class _Port:
    """One group's links. `flows`: what is on its way in, by sender. A new `version` makes ends foreseen before it void."""

    rate: float
    queue: deque[tuple[Hashable, float, Arrival]] = field(default_factory=deque)
    is_sending: bool = False
    flows: dict[Hashable, _Flow] = field(default_factory=dict)
    since: float = 0.0
    version: int = 0


class RehearsedLinks:
    """`rates`: of each group one way, in amounts a unit of time. `at` runs something at a time. `latency`: of each message."""

    def __init__(self, rates: dict[Hashable, float], latency: float, at: At) -> None:
        self._ports = {group: _Port(rate) for group, rate in rates.items()}
        self._latency, self._at = latency, at

    def send(self, src: Hashable, dst: Hashable, amount: float, now: float, arrives: Arrival) -> None:
        """Queue a message; `arrives` is run when all of it is there."""
        port = self._ports[src]
        port.queue.append((dst, amount, arrives))
        if not port.is_sending:
            self._send_next(src, now)

    def _send_next(self, src: Hashable, now: float) -> None:
        port = self._ports[src]
        port.is_sending = bool(port.queue)
        if not port.queue:
            return
        dst, amount, arrives = port.queue.popleft()
        receiver = self._ports[dst]
        self._advance(receiver, now)
        receiver.flows[src] = _Flow(amount, port.rate, arrives)
        self._share(dst, now)

    def _advance(self, receiver: _Port, now: float) -> None:
        for flow in receiver.flows.values():
            flow.left -= flow.rate * (now - receiver.since)
        receiver.since = now

    def _share(self, dst: Hashable, now: float) -> None:
        """Fair rates of all that is on its way to `dst`, and when the first of it is there."""
        receiver = self._ports[dst]
        receiver.version += 1
        if not receiver.flows:
            return
        free, waiting = receiver.rate, len(receiver.flows)
        for flow in sorted(receiver.flows.values(), key=lambda flow: flow.sendable):
            flow.rate = min(flow.sendable, free / waiting)
            free -= flow.rate
            waiting -= 1
        version = receiver.version
        first, flow = min(receiver.flows.items(), key=lambda item: max(item[1].left, 0.0) / item[1].rate)

        def ends(end: float) -> None:
            if receiver.version == version:
                self._arrived(first, dst, end)

        self._at(now + max(flow.left, 0.0) / flow.rate, ends)

    def _arrived(self, src: Hashable, dst: Hashable, now: float) -> None:
        receiver = self._ports[dst]
        self._advance(receiver, now)
        flow = receiver.flows.pop(src)
        self._at(now + self._latency, flow.arrives)
        self._share(dst, now)
        self._send_next(src, now)
