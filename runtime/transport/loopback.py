"""All ranks of a plan in one process: messages wait in a mailbox. For tests, inspection and bisecting; exact, not fast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic

import torch

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime.buffers import Buffers
from disagmoe_compile.runtime.transport.base import T, Work

if TYPE_CHECKING:
    from disagmoe_compile.plan.action import Action
    from disagmoe_compile.runtime.executor import Executor


class Mailbox:
    """What was sent and not yet received, by (source, destination, tag); and contributions to sums, by (ranks, tag)."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], torch.Tensor] = {}
        self.contributions: dict[tuple[tuple[int, ...], int], dict[int, torch.Tensor]] = {}


class _Sent:
    def wait(self) -> None:
        """The mailbox holds a copy."""

    def ready(self) -> bool:
        return True


class _Receive:
    def __init__(self, mailbox: Mailbox, key: tuple[int, int, int], buffer: torch.Tensor) -> None:
        self._mailbox, self._key, self._buffer = mailbox, key, buffer

    def ready(self) -> bool:
        return self._key in self._mailbox.messages

    def wait(self) -> None:
        message = self._mailbox.messages.pop(self._key)
        if message.shape != self._buffer.shape or message.dtype != self._buffer.dtype:
            raise DisagMoEError(
                f"message {self._key} is {tuple(message.shape)} {message.dtype}, "
                f"its receiver expects {tuple(self._buffer.shape)} {self._buffer.dtype}"
            )
        self._buffer.copy_(message)


class _Sum:
    def __init__(self, contributions: dict[int, torch.Tensor], n_ranks: int, tensor: torch.Tensor) -> None:
        self._contributions, self._n_ranks, self._tensor = contributions, n_ranks, tensor

    def ready(self) -> bool:
        return len(self._contributions) == self._n_ranks

    def wait(self) -> None:
        in_rank_order = [self._contributions[rank] for rank in sorted(self._contributions)]
        self._tensor.copy_(torch.stack(in_rank_order).sum(0))


class _OnDemand(Generic[T]):
    def __init__(self, headers: Sequence[Work], post: Callable[[], T]) -> None:
        self._headers, self._post = headers, post

    def ready(self) -> bool:
        return all(header.ready() for header in self._headers)

    def result(self) -> T:
        for header in self._headers:
            header.wait()
        return self._post()


class LoopbackTransport:
    """One rank's end of a shared mailbox."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank
        self.buffers = Buffers(torch.device("cpu"))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        key = (self._rank, dst, tag)
        if not tensor.is_contiguous():
            raise DisagMoEError(f"message {key} is not contiguous: no process group would send it")
        if key in self._mailbox.messages:
            raise DisagMoEError(f"two messages from rank {self._rank} to rank {dst} carry tag {tag}")
        self._mailbox.messages[key] = tensor.clone()
        return _Sent()

    def irecv(self, buffer: torch.Tensor, src: int, tag: int) -> Work:
        return _Receive(self._mailbox, (src, self._rank, tag), buffer)

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int) -> Work:
        contributions = self._mailbox.contributions.setdefault((tuple(ranks), tag), {})
        contributions[self._rank] = tensor.clone()
        return _Sum(contributions, len(ranks), tensor)

    def when_arrived(self, headers: Sequence[Work], post: Callable[[], T]) -> _OnDemand[T]:
        return _OnDemand(headers, post)


def run_all(executors: Sequence[Executor], mailbox: Mailbox, actions: Sequence[Sequence[Action]]) -> None:
    """Runs every rank's list, each as far as its messages allow, round after round. Raises if no rank can go on."""
    left = [deque(one) for one in actions]
    while any(left):
        progressed = False
        for executor, todo in zip(executors, left, strict=True):
            while todo and executor.can_run(todo[0]):
                executor.run_action(todo.popleft())
                progressed = True
        if not progressed:
            stuck = ", ".join(
                f"rank {e.worker.rank} at {todo[0]}" for e, todo in zip(executors, left) if todo
            )
            raise DisagMoEError(f"the schedule deadlocks: {stuck}")
    if mailbox.messages:
        raise DisagMoEError(f"{len(mailbox.messages)} messages were sent and never received")
    mailbox.contributions.clear()
