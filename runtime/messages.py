"""A transfer of one micro-batch as messages: which tensors go to, or come from, which ranks. Shared by both kinds of worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.runtime.transport.base import Deferred, Transport, Work

Spec = tuple[tuple[int, ...], torch.dtype]
_PARTS = 16  # tensors of one message, at most; residuals of wide models carry a few


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors that one rank sends to `peer`, in payload order."""

    peer: int
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """The sizes of what `peer` sends."""

    peer: int
    specs: tuple[Spec, ...]


class LostPeer(RuntimeError):
    """An operation with one rank failed; the cause is the transport's error."""

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.peer = peer


@dataclass(frozen=True, slots=True)
class _WithPeer:
    """A Work that knows whom to blame: a transfer waits for several ranks, and only one of them may be gone."""

    peer: int
    work: Work

    def ready(self) -> bool:
        return self.work.ready()

    def wait(self) -> None:
        try:
            self.work.wait()
        except DisagMoEError:
            raise
        except RuntimeError as error:
            raise LostPeer(self.peer, error) from error


@dataclass(slots=True)
class Sending:
    """Sends under way; holds the buffers until they may be reused."""

    messages: Sequence[Message]
    works: list[Work]
    nbytes: int

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


@dataclass(slots=True)
class Receiving:
    """Receives under way, one Message per peer; bytes are known once posted."""

    messages: list[Message]
    works: list[Work]
    nbytes: int

    def ready(self) -> bool:
        return all(work.ready() for work in self.works)

    def wait(self) -> list[Message]:
        for work in self.works:
            work.wait()
        self.works.clear()
        return self.messages


@dataclass(slots=True)
class ReceivingRouted:
    """A receive whose sizes travel ahead in a header; its payload is posted when the headers have come."""

    payload: Deferred[Receiving]

    def ready(self) -> bool:
        return self.payload.ready()

    def wait(self) -> Receiving:
        return self.payload.result()


class Tags:
    """Tags that are unique within a step: (transfer, micro-batch, part)."""

    def __init__(self, plan: Plan) -> None:
        self._index = {t.name: i for i, t in enumerate(plan.transfers)}
        self._n_microbatches = plan.workload.n_microbatches

    def of(self, transfer: str, microbatch: int, part: int = 0) -> int:
        if part >= _PARTS:
            raise ValueError(f"{transfer} has more than {_PARTS} tensors")
        return (self._index[transfer] * self._n_microbatches + microbatch) * _PARTS + part


def send(
    transport: Transport, tags: Tags, transfer: str, microbatch: int, messages: Sequence[Message]
) -> Sending:
    """Starts all sends. Tensors without elements are not sent: the receiver knows their size."""
    messages = [Message(m.peer, tuple(tensor.contiguous() for tensor in m.tensors)) for m in messages]
    works: list[Work] = []
    nbytes = 0
    for message in messages:
        for part, tensor in enumerate(message.tensors):
            if tensor.numel():
                work = transport.isend(tensor, message.peer, tags.of(transfer, microbatch, part))
                works.append(_WithPeer(message.peer, work))
                nbytes += tensor.numel() * tensor.element_size()
    return Sending(messages, works, nbytes)


def receive(
    transport: Transport,
    tags: Tags,
    transfer: str,
    microbatch: int,
    expected: Sequence[Expected],
    device: torch.device,
    first_part: int = 0,
) -> Receiving:
    """Posts all receives into fresh buffers of the exact size."""
    messages: list[Message] = []
    works: list[Work] = []
    nbytes = 0
    for one in expected:
        buffers = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in one.specs)
        for part, buffer in enumerate(buffers, first_part):
            if buffer.numel():
                work = transport.irecv(buffer, one.peer, tags.of(transfer, microbatch, part))
                works.append(_WithPeer(one.peer, work))
                nbytes += buffer.numel() * buffer.element_size()
        messages.append(Message(one.peer, buffers))
    return Receiving(messages, works, nbytes)
