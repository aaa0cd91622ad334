"""Messages of a rehearsal: those from one group to another leave one after the other, and what moves at once shares links.

    0 to 2   ==m0==|==m2==          a channel: m2 leaves when m0 is there
    0 to 3   ===m1===               another channel; while m0 and m1 both move, each gets a fair share of group 0's way out
    1 to 2   ===m3===               m0 and m3 go to one receiver: they share its way in

The simulator's rules (`simulator/program.py`), so that an order takes as long when it is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from disagmoe_compile.plan.sharing import Leg, Link, Network

Happen = Callable[[Any, float], None]
"""What happens, given what to and when."""


class At(Protocol):
    """Lets something happen to something at a time."""

    def __call__(self, time: float, happen: Happen, what: Any, /) -> None: ...


class Channel(NamedTuple):
    """From one group to another."""

    src: int
    dst: int


@dataclass(slots=True, eq=False)
class _Move:
    """`legs`: how many of them are under way; `happen` is what happens to `what` when all have ended."""

    happen: Happen
    what: Any
    legs: int = 0


class RehearsedLinks:
    """`at` runs something at a time. `latency`: of each move. `arrives` is run with the number of a message that is there."""

    def __init__(self, capacities: Mapping[Link, float], latency: float, at: At, arrives: Happen) -> None:
        self._network = Network(capacities)
        self._latency, self._at, self._arrives = latency, at, arrives
        self._queues: dict[Channel, deque[tuple[Sequence[Leg], int]]] = {}
        self._moves: dict[int, _Move] = {}  # by flow
        self._flows = self._version = 0

    def send(self, channel: Channel, legs: Sequence[Leg], number: int, now: float) -> None:
        """Queue a message."""
        queue = self._queues.get(channel)
        if queue is None:
            queue = self._queues[channel] = deque()
        queue.append((legs, number))
        if len(queue) == 1:
            self.move(legs, now, self._is_there, channel)

    def move(self, legs: Sequence[Leg], now: float, happen: Happen, what: Any) -> None:
        """Begin at once, beside all else."""
        move = _Move(happen, what)
        for leg in legs:
            if leg.amount:
                self._flows += 1
                self._moves[self._flows] = move
                move.legs += 1
                self._network.add(self._flows, leg.amount, leg.links, now)
        if move.legs:
            self._foresee(now)
        else:
            self._at(now + self._latency, happen, what)

    def _foresee(self, now: float) -> None:
        self._version += 1
        end = self._network.next_end()
        if end is not None:
            self._at(max(float(end), now), self._ends, self._version)

    def _ends(self, version: int, now: float) -> None:
        """The end of a flow as foreseen, unless something has changed since."""
        if version != self._version:
            return
        move = self._moves.pop(self._network.finish())
        self._foresee(now)
        move.legs -= 1
        if not move.legs:
            self._at(now + self._latency, move.happen, move.what)

    def _is_there(self, channel: Channel, now: float) -> None:
        """The first message of a channel."""
        queue = self._queues[channel]
        _, number = queue.popleft()
        self._arrives(number, now)
        if queue:
            self.move(queue[0][0], now, self._is_there, channel)
