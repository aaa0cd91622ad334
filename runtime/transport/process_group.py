"""Messages over torch.distributed. Sends return at once; a daemon thread waits for headers, so the main thread never does."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Generic

import torch
import torch.distributed as dist

from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.runtime.buffers import Buffers
from disagmoe_compile.runtime.transport.base import T, Work

Lane = tuple[Role, Role]  # (role of the sender, role of the receiver)


class _Pending:
    """A torch.distributed Work with a timeout. Polling `is_completed` is no use on gloo: it stays False until waited for."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        self._work.wait(self._timeout)


class _FromThread(Generic[T]):
    def __init__(self, future: Future[T], timeout_s: float) -> None:
        self._future, self._timeout_s = future, timeout_s

    def ready(self) -> bool:
        return True

    def result(self) -> T:
        return self._future.result(self._timeout_s)


class ProgressThread:
    """Runs jobs in order on a daemon thread; daemon, so that a rank that failed can exit while a job still waits."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="disagmoe-progress", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # the waiter re-raises it
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or the waiting thread would keep what the last one used: process groups


class ProcessGroupTransport:
    """`lanes`: a dedicated process group per direction, so a full send queue of one never holds up the other."""

    def __init__(
        self,
        topology: Topology,
        lanes: Mapping[Lane, dist.ProcessGroup],
        replicas: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        self._rank = dist.get_rank()
        self._role = topology.group_of_rank(self._rank).role
        self._topology, self._lanes, self._replicas = topology, lanes, replicas
        self._timeout = timedelta(seconds=timeout_s)
        self._progress = ProgressThread()
        weakref.finalize(self, self._progress.close)  # a model that is dropped takes its thread along
        self.buffers = Buffers(torch.device("cpu"))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        lane = self._lanes[self._role, self._topology.group_of_rank(dst).role]
        return _Pending(_not_none(dist.isend(tensor, dst, group=lane, tag=tag)), self._timeout)

    def irecv(self, buffer: torch.Tensor, src: int, tag: int) -> Work:
        lane = self._lanes[self._topology.group_of_rank(src).role, self._role]
        return _Pending(_not_none(dist.irecv(buffer, src, group=lane, tag=tag)), self._timeout)

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int) -> Work:
        work = dist.all_reduce(tensor, group=self._replicas, async_op=True)
        return _Pending(_not_none(work), self._timeout)

    def when_arrived(self, headers: Sequence[Work], post: Callable[[], T]) -> _FromThread[T]:
        def job() -> T:
            for header in headers:
                header.wait()
            return post()

        # The job itself waits at most the timeout for each header; the margin lets its own error come first.
        return _FromThread(self._progress.submit(job), 2 * self._timeout.total_seconds())

    def close(self) -> None:
        self._progress.close()


def _not_none(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError(
            "torch.distributed returned no Work: this rank is not in the process group of the lane"
        )
    return work
