"""When a rank fails, every rank should name it. The first failure is written to the store, and later ones
defer to it.

A rank that only sees a broken connection cannot know whether its peer is the culprit or a victim: the peer
may have ended because of another. So it looks, for a short while, for the report of the first failure, and then
for ranks whose pulse has stopped (`pulse.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from disagmoe_compile.errors import DisagMoEError, PeerError
from disagmoe_compile.runtime.pulse import Pulse, look_twice, read_pulses

_KEY = "disagmoe/first failure"
_COUNT = "disagmoe/failures"
_PAUSE_S = 0.05
_CONNECTION_SIGNS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket",
    "ncclremoteerror",
)
_TIMEOUT_SIGNS = ("timed out", "timeout")


@dataclass(frozen=True, slots=True)
class FailureReport:
    """`action`: text of the action the rank was at; `peer`: the rank it talked to, if any; `reason`: one
    line.
    """

    rank: int
    action: str
    peer: int | None
    reason: str

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" (peer: rank {self.peer})"
        return f"rank {self.rank} failed at {self.action}{peer}: {self.reason}"


def is_lost_connection(message: str) -> bool:
    """Whether an error says that a peer went away: its rank may be a victim, not the culprit."""
    return any(sign in message.lower() for sign in _CONNECTION_SIGNS)


def report_first(report: FailureReport, store: dist.Store) -> bool:
    """Writes the report unless another rank was earlier; returns whether this one is the first."""
    if store.add(_COUNT, 1) != 1:
        return False
    store.set(_KEY, json.dumps(asdict(report)))
    return True


def read_first(store: dist.Store, wait_s: float) -> FailureReport | None:
    """The first failure, if one is written within `wait_s` seconds and the store still answers."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            if store.check([_KEY]):
                return FailureReport(**json.loads(store.get(_KEY)))
        except dist.DistError:  # the store lives in a rank that is gone
            return None
        if time.monotonic() >= deadline:
            return None
        time.sleep(_PAUSE_S)


def describe_failure(
    error: BaseException,
    rank: int,
    action: str,
    peers: Sequence[int],
    store: dist.Store | None,
    wait_s: float = 2.0,
    on_timeout: Callable[[Mapping[int, Pulse], list[int]], None] = lambda pulses, silent: None,
) -> DisagMoEError:
    """The error to raise instead of `error`, which broke `action` on this rank.

    A broken connection or a timeout becomes a PeerError that names the first rank to fail, if it could
    report; else a rank without a pulse; else the ranks of `peers` that this action waited for. An error of our
    own making is reported as the first, and returned as it is. `on_timeout` gets the pulses and the silent ranks.
    """
    if isinstance(error, PeerError):
        return error  # described where it arose
    is_timeout = isinstance(error, TimeoutError) or any(sign in str(error).lower() for sign in _TIMEOUT_SIGNS)
    is_broken = is_lost_connection(str(error)) or isinstance(error, ConnectionError)
    reason = _one_line(error)
    if not is_timeout and not is_broken:
        if store is not None:
            report_first(FailureReport(rank, action, None, reason), store)
        if isinstance(error, DisagMoEError):
            return error
        return DisagMoEError(f"rank {rank} failed at {action}: {reason}")
    first = None if store is None else read_first(store, wait_s)
    pulses: Mapping[int, Pulse] = {}
    silent: list[int] = []
    if store is not None and (is_timeout or (first is None and len(peers) != 1)):
        pulses, silent = look_twice(store)
    if is_timeout:
        on_timeout(pulses, silent)
    culprits = [peer for peer in silent if peer in peers] or silent or list(peers)
    if first is None and store is not None and len(culprits) == 1:
        first = _report_for(culprits[0], rank, action, pulses, store, is_timeout=is_timeout)
        peers = culprits
    if first is not None and first.rank not in (rank, *peers):
        return PeerError(f"rank {rank} stopped at {action}, because {first}")
    who = "a peer" if not peers else f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {list(peers)}"
    what = f"got no answer at {action} from {who} in time" if is_timeout else f"lost {who} at {action}"
    return PeerError(f"rank {rank} {what}: {reason if first is None else first}")


def _report_for(
    culprit: int,
    rank: int,
    action: str,
    pulses: Mapping[int, Pulse],
    store: dist.Store,
    *,
    is_timeout: bool,
) -> FailureReport | None:
    """Reports, for the others, a rank that can no longer do so. None where somebody was faster but is not read yet."""
    seen = pulses or read_pulses(store)
    place = seen[culprit].place if culprit in seen else None
    why = f"no answer to rank {rank} in time" if is_timeout else f"its connection to rank {rank} closed"
    where = "an unknown action" if place is None else f"or after {place}, where it was last seen"
    report = FailureReport(culprit, where, rank, f"{why}, at {action}")
    return report if report_first(report, store) else read_first(store, 0.0)


def default_store() -> dist.Store | None:
    """The store of the default process group; None before there is one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
