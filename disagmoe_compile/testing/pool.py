"""A pool of persistent gloo processes: multi-rank tests without a start-up of torch for each case.

    pool = GlooPool(4)
    losses = pool.run(train_three_steps, batch, world_size=2)  # one a rank; raises PoolError if one failed
    outcomes = pool.outcomes(train_on_different_batches)  # the same, with the error of each rank in it

The function is found by module and name, so it must be at the top of a module, never a lambda or a local.
Every case runs in a fresh default process group of its own size over gloo; ranks beyond that size rest.
Workers start when first needed, as forks of one server process that has imported torch and what `preload` names: each costs a
fraction of the seconds that the imports take.

Nothing hangs: each case has a timeout, after which the report shows where every rank stood. A rank that
raises leaves the process group at once, so its peers' pending operations fail instead of waiting; a rank that
dies is reported with its signal and replaced before the next case.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from disagmoe_compile.runtime.failure import is_lost_connection
from disagmoe_compile.runtime.ports import free_port
from disagmoe_compile.testing.pool_worker import CLEAN_UP, READY, RUN, STOP, Case, Failure, serve

_START_TIMEOUT_S = 180.0
_GRACE_S = 20.0  # how long the other ranks may take to notice that one failed
_STACKS_S = 1.0  # how long a stuck rank gets to write where it stands


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank returned, or how it failed."""

    rank: int
    value: Any = None
    failure: Failure | None = None


class PoolError(RuntimeError):
    """At least one rank failed. `outcomes` holds every rank's; `__cause__` is the first failing rank's own
    exception.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


@dataclass(slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: Path


class GlooPool:
    """Processes `0 .. world_size-1`, each able to be that rank of a case. Not thread-safe: one case at a
    time.

    `preload`: modules that most cases import; the first pool of a process decides. Name none that looks at torchrun's
    environment or starts threads while it is imported.
    """

    def __init__(
        self, world_size: int, *, timeout_s: float = 120.0, preload: Sequence[str] = ("torch._dynamo",)
    ) -> None:
        if world_size < 1 or timeout_s <= 0:
            raise ValueError(f"world size {world_size} and timeout {timeout_s} s must be positive")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: dict[int, _Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        self._cases = 0
        self._closed = False

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers started so far, in rank order."""
        return tuple(self._workers[rank].process.pid or 0 for rank in sorted(self._workers))

    def run(self, function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """`function(*args)` on every rank -> results in rank order. `how`: see `outcomes`. Raises
        PoolError.
        """
        outcomes, order = self._run(function, args, **how)
        if not order:
            return [outcome.value for outcome in outcomes]
        failures = [failure for rank in order if (failure := outcomes[rank].failure) is not None]
        failures.sort(key=lambda failure: is_lost_connection(failure.message))  # a victim may be heard first
        first = failures[0]
        others = "".join(f"\n  rank {o.rank}: {o.summary}" for o in failures[1:])
        message = f"rank {first.rank} failed: {first.summary}\n{first.traceback}"
        if others:
            message += f"\nafter it:{others}"
        raise PoolError(message, outcomes) from first.exception

    def outcomes(self, function: Callable[..., Any], *args: Any, **how: Any) -> list[Outcome]:
        """As `run`, but a failing rank is part of the answer, for tests of errors.

        `world_size` (default: the pool's), `timeout_s` for the case, `env` extra environment variables,
        `process_group=False` leaves torch.distributed uninitialised (torchrun's variables are set in both
        cases).
        """
        return self._run(function, args, **how)[0]

    def close(self) -> None:
        """Ends all workers. Safe to call twice."""
        self._closed = True
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(pickle.dumps((STOP, None)))
        for worker in self._workers.values():
            worker.process.join(2.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        self._workers.clear()
        self._folder.cleanup()

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        world_size: int | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        process_group: bool = True,
    ) -> tuple[list[Outcome], list[int]]:
        """The outcomes in rank order, and the failing ranks in the order in which they failed."""
        size = self.world_size if world_size is None else world_size
        if not 1 <= size <= self.world_size:
            raise ValueError(f"a pool of {self.world_size} cannot run a world of {size}")
        if self._closed:
            raise ValueError("the pool is closed")
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._start(size)
        self._cases += 1
        case = Case(
            body=_dump_body(function, args),
            world_size=size,
            store=f"{self._folder.name}/store-{self._cases}",
            port=free_port(),
            timeout_s=limit_s,
            env=dict(env or {}),
            path=tuple(sys.path),
            process_group=process_group,
        )
        for rank in range(size):
            self._workers[rank].connection.send_bytes(pickle.dumps((RUN, case)))
        outcomes, order = self._collect(size, limit_s)
        self._clean_up(size)
        return outcomes, order

    def _start(self, size: int) -> None:
        """Starts the missing workers among the first `size`, all at once, and waits until they have imported
        torch.
        """
        fresh = [rank for rank in range(size) if rank not in self._workers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **_loopback()}
        for rank in fresh:
            ours, theirs = self._context.Pipe()
            stacks = Path(self._folder.name) / f"stacks-{rank}-{self._cases}"
            process = self._context.Process(
                target=serve,
                args=(rank, theirs, str(stacks), environment),
                daemon=True,
                name=f"gloo-pool-{rank}",
            )
            process.start()
            theirs.close()  # else the end of the worker would not close the pipe
            self._workers[rank] = _Worker(process, ours, stacks)
        deadline = time.monotonic() + _START_TIMEOUT_S
        for rank in fresh:
            message = self._receive(rank, deadline - time.monotonic())
            if message != READY:
                self._discard(rank)
                raise PoolError(f"worker {rank} did not start within {_START_TIMEOUT_S:.0f} s: {message}", ())

    def _collect(self, size: int, limit_s: float) -> tuple[list[Outcome], list[int]]:
        outcomes: dict[int, Outcome] = {}
        order: list[int] = []
        deadline = time.monotonic() + limit_s
        while len(outcomes) < size:
            pending = {self._workers[r].connection: r for r in range(size) if r not in outcomes}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                why = (
                    f"no answer {_GRACE_S:.0f} s after rank {order[0]} failed"
                    if order
                    else f"no end after {limit_s:.0f} s"
                )
                for rank in pending.values():
                    outcomes[rank] = Outcome(rank, failure=self._kill_stuck(rank, why))
                    order.append(rank)
                break
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                message = self._receive(rank, 0.0)
                outcome = message if isinstance(message, Outcome) else _outcome(rank, message)
                outcomes[rank] = outcome
                if outcome.failure is not None:
                    if not order:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    order.append(rank)
        return [outcomes[rank] for rank in range(size)], order

    def _clean_up(self, size: int) -> None:
        """Only now may ranks leave the process group: a finished rank's last message may still be under
        way.
        """
        alive = [rank for rank in range(size) if rank in self._workers]
        for rank in alive:
            with contextlib.suppress(OSError):
                self._workers[rank].connection.send_bytes(pickle.dumps((CLEAN_UP, None)))
        deadline = time.monotonic() + _GRACE_S
        for rank in alive:
            if self._receive(rank, deadline - time.monotonic()) != READY:
                self._discard(rank)

    def _receive(self, rank: int, timeout_s: float) -> Any:
        """The next message of a worker; an Outcome that says so if the worker is gone; None after the
        timeout.
        """
        worker = self._workers[rank]
        try:
            if not worker.connection.poll(max(0.0, timeout_s)):
                return None
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(5.0)
            summary = f"the process died ({_exit_text(worker.process.exitcode)})"
            self._discard(rank)
            return Outcome(rank, failure=Failure(rank, "ProcessDied", summary, "", None))

    def _kill_stuck(self, rank: int, why: str) -> Failure:
        """Asks a silent worker for its stack, then ends it."""
        worker = self._workers[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        stack = worker.stacks.read_text() if worker.stacks.exists() else ""
        self._discard(rank)
        return Failure(rank, "Timeout", f"{why}; ended", f"it stood at:\n{stack}", None)

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _dump_body(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"cannot send {name} and its arguments to the pool: {error}; "
            "use a function at the top of a module"
        ) from error


def _outcome(rank: int, message: Any) -> Outcome:
    failure, value = message
    return Outcome(rank, value, failure)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "its pipe closed"
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


def _loopback() -> dict[str, str]:
    """Gloo resolves the host name otherwise, which is slow or wrong on many machines."""
    names = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names and "GLOO_SOCKET_IFNAME" not in os.environ else {}
