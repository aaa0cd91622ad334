"""What a rank really did, action by action, under the plan's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One executed action. Times are seconds of `time.time()` (comparable between ranks of one machine).

    A SEND's or RECV's event spans from its posting to its completion as far as the rank saw it (the WAIT on it); `nbytes` are the
    payload bytes this rank moved for it.
    """

    action: str
    stream: str
    start: float
    end: float
    nbytes: int = 0
    step: int = 0
