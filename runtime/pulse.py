"""Where each rank is, once a second, in the store that all ranks share: who hangs is told from who waits for it.

A daemon thread writes a beat and the action that the main thread is at. A rank that was killed or stopped beats no more; one that
waits for it does. Reading is bounded in time, as the rank that serves the store may be the one that hangs.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist

from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.plan.violation import grid

INTERVAL_S = 1.0
_READ_S = 5.0  # longest wait on the store itself
_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """`position` of `action` in the list of `group`, in step `step`."""

    step: int
    group: str
    position: int
    action: str

    def __str__(self) -> str:
        return f"{self.action} of {self.group} in step {self.step}"


@dataclass(frozen=True, slots=True)
class Pulse:
    """`has_failed`: the rank ended by an error of its own accord, so its silence means nothing."""

    beat: int
    has_failed: bool
    place: Place | None


class Heart:
    """One a process. `at` is called at every action and costs an assignment."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._stop: threading.Event | None = None
        self._store: dist.Store | None = None
        self._rank, self._beat, self._has_failed = 0, 0, False

    def start(self, store: dist.Store, rank: int) -> None:
        """Beats into `store` until the process group that it belongs to is destroyed; again after a new one was made."""
        if store is self._store and self._stop is not None and not self._stop.is_set():
            return
        self.stop()
        self._store, self._rank, self._has_failed, self._place = store, rank, False, None
        self._stop = threading.Event()
        threading.Thread(
            target=self._run, args=(store, self._stop), name="disagmoe-pulse", daemon=True
        ).start()
        atexit.register(self.stop)

    def stop(self) -> None:
        if self._stop is not None:
            self._stop.set()
        self._store = None

    def at(self, place: Place) -> None:
        self._place = place

    def fail(self) -> None:
        """Says that this rank ends by an error, before its silence could be noticed."""
        self._has_failed = True
        store = self._store
        if store is not None:
            _within(_READ_S, lambda: self._write(store))

    def _run(self, store: dist.Store, stop: threading.Event) -> None:
        own = store.clone()  # a thread that hangs in it must not hold up the others
        while not stop.is_set() and dist.is_initialized():
            try:
                self._write(own)
            except (dist.DistError, RuntimeError):  # the rank that served the store is gone
                return
            stop.wait(INTERVAL_S)

    def _write(self, store: dist.Store) -> None:
        self._beat += 1
        pulse = Pulse(self._beat, self._has_failed, self._place)
        store.set(_key(self._rank), json.dumps(asdict(pulse)))


def read_pulses(store: dist.Store) -> dict[int, Pulse]:
    """The last pulse of every rank that has had one; empty where the store does not answer."""
    world_size = dist.get_world_size() if dist.is_initialized() else 0

    def read() -> dict[int, Pulse]:
        own = store.clone()
        return {rank: _parse(own.get(_key(rank))) for rank in range(world_size) if own.check([_key(rank)])}

    return _within(_READ_S, read) or {}


def silent_ranks(before: Mapping[int, Pulse], after: Mapping[int, Pulse]) -> list[int]:
    """Ranks that had no beat between two readings more than an interval apart, and that have not ended by an error."""
    return [
        rank
        for rank, pulse in after.items()
        if rank in before and before[rank].beat == pulse.beat and not pulse.has_failed
    ]


def look_twice(store: dist.Store) -> tuple[dict[int, Pulse], list[int]]:
    """The pulses, and which ranks are silent. Takes two and a half intervals where there are pulses."""
    before = read_pulses(store)
    if not before:
        return {}, []
    time.sleep(2.5 * INTERVAL_S)
    after = read_pulses(store)
    return after or before, silent_ranks(before, after)


def log_places(pulses: Mapping[int, Pulse], silent: list[int], schedule: Schedule) -> None:
    """Each rank's current action, and the schedule around those, as one error of this module's logger."""
    lines = ["disagmoe: where the ranks stand"]
    for rank, pulse in sorted(pulses.items()):
        state = "gives no sign of life" if rank in silent else "failed" if pulse.has_failed else "alive"
        lines.append(f"  rank {rank}: {pulse.place or 'before its first action'}; {state}")
    around: dict[Group, int] = {}
    marked = set()
    for place in (pulse.place for pulse in pulses.values()):
        if place is None:
            continue
        group = Group.parse(place.group)
        if group in schedule.actions and place.position < len(schedule.of(group)):
            around[group] = min(place.position, around.get(group, place.position))
            marked.add((group, place.position))
    if around:
        lines.append(grid(schedule, marked, around))
    _LOG.error("\n".join(lines))


def _key(rank: int) -> str:
    return f"disagmoe/pulse/{rank}"


def _parse(text: bytes) -> Pulse:
    values = json.loads(text)
    place = values.pop("place")
    return Pulse(**values, place=None if place is None else Place(**place))


def _within(seconds: float, function: Callable[[], _T]) -> _T | None:
    """What it returns, or None if it fails or takes longer; then its thread is left behind."""
    found: list[_T] = []

    def run() -> None:
        try:
            found.append(function())
        except (dist.DistError, RuntimeError):
            return

    thread = threading.Thread(target=run, name="disagmoe-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def end_with_parent() -> None:
    """Starts a daemon thread that ends this process once its parent is gone, however it went: no orphan goes on computing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="disagmoe-parent", daemon=True).start()
