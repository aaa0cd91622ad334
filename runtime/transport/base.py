"""What the workers ask of a transport: messages between ranks, matched by (source, destination, tag), and sums over a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from disagmoe_compile.runtime.buffers import Buffers

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol):
    """An operation under way. Its tensors must stay alive and unchanged until `wait` has returned."""

    def wait(self) -> None:
        """Until the message has arrived (receive) or its buffer may be reused (send). Raises past the transport's timeout."""
        ...

    def ready(self) -> bool:
        """Whether `wait` would not block. Only the loopback transport can tell; others answer True and let `wait` wait."""
        ...


class Deferred(Protocol[T_co]):
    """Something that a progress thread, or the caller of `result`, produces later."""

    def result(self) -> T_co: ...

    def ready(self) -> bool: ...


class Transport(Protocol):
    """Both sides of a message name the same size. Tensors are contiguous; those of no elements are never sent."""

    @property
    def buffers(self) -> Buffers:
        """Memory for messages, of all plans that run over this transport."""
        ...

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work: ...

    def irecv(self, buffer: torch.Tensor, src: int, tag: int) -> Work: ...

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int], tag: int) -> Work:
        """Sums `tensor` in place over `ranks` (the replicas of this rank's group), in an order that does not vary."""
        ...

    def when_arrived(self, headers: Sequence[Work], post: Callable[[], T]) -> Deferred[T]:
        """Calls `post` once all headers are there; calls of one rank run in the order of submission."""
        ...
