"""A transfer of one micro-batch as messages: which tensors go to, or come from, which ranks. Shared by both kinds of worker.

All tensors for one peer are one message, packed by falling element size so that each is aligned and none is padded. A single
tensor is sent where it lies. Only the sizes of a dispatch go ahead, as a header.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.runtime.buffers import Buffers
from disagmoe_compile.runtime.transport.base import Deferred, Transport, Work

Spec = tuple[tuple[int, ...], torch.dtype]
_HEADER, _PAYLOAD = range(2)
_PARTS = 16  # messages of one transfer to one rank, at most: a header and a payload; sums of gradients have one a dtype


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors that one rank sends to `peer`, in payload order. `header` goes ahead of them."""

    peer: int
    tensors: tuple[torch.Tensor, ...]
    header: torch.Tensor | None = None


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
    """Sends under way; holds what is sent until it may be reused."""

    buffers: Buffers
    tensors: list[torch.Tensor]
    leases: list[torch.Tensor]
    works: list[Work]
    nbytes: int

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def release(self) -> None:
        self.tensors.clear()
        _give_all(self.buffers, self.leases)


@dataclass(slots=True)
class Receiving:
    """Receives under way, one Message per peer; bytes are known once posted."""

    buffers: Buffers
    messages: list[Message]
    leases: list[torch.Tensor]
    works: list[Work]
    nbytes: int

    def ready(self) -> bool:
        return all(work.ready() for work in self.works)

    def wait(self) -> list[Message]:
        for work in self.works:
            work.wait()
        self.works.clear()
        return self.messages

    def release(self) -> None:
        """The messages may be overwritten from now on, unless they live on."""
        self.messages.clear()
        _give_all(self.buffers, self.leases)


def _give_all(buffers: Buffers, leases: list[torch.Tensor]) -> None:
    while leases:
        buffers.give(leases.pop())


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
    sending = Sending(transport.buffers, [], [], [], 0)
    for message in messages:
        parts = [] if message.header is None else [(_HEADER, message.header)]
        full = [tensor for tensor in message.tensors if tensor.numel()]
        if len(full) == 1:
            parts.append((_PAYLOAD, full[0].contiguous()))
        elif full:
            layout, nbytes = _layout([(tuple(t.shape), t.dtype) for t in full])
            lease = transport.buffers.take(nbytes)
            for tensor, place in zip(full, layout, strict=True):
                _view(lease, place).copy_(tensor)
            sending.leases.append(lease)
            parts.append((_PAYLOAD, lease[:nbytes]))
        for part, tensor in parts:
            work = transport.isend(tensor, message.peer, tags.of(transfer, microbatch, part))
            sending.works.append(_WithPeer(message.peer, work))
            sending.tensors.append(tensor)
            sending.nbytes += tensor.numel() * tensor.element_size()
    return sending


def receive(
    transport: Transport,
    tags: Tags,
    transfer: str,
    microbatch: int,
    expected: Sequence[Expected],
    *,
    lives_on: bool = False,
) -> Receiving:
    """Posts the receives of all payloads. `lives_on`: tensors stay as they are after `release`, for as long as they are used."""
    return _receive(transport, tags, transfer, microbatch, expected, _PAYLOAD, lives_on=lives_on)


def receive_headers(
    transport: Transport, tags: Tags, transfer: str, microbatch: int, expected: Sequence[Expected]
) -> Receiving:
    """Posts the receives of all headers."""
    return _receive(transport, tags, transfer, microbatch, expected, _HEADER)


def _receive(
    transport: Transport,
    tags: Tags,
    transfer: str,
    microbatch: int,
    expected: Sequence[Expected],
    part: int,
    *,
    lives_on: bool = False,
) -> Receiving:
    receiving = Receiving(transport.buffers, [], [], [], 0)
    for one in expected:
        layout, nbytes = _layout(one.specs)
        lease = transport.buffers.lend(nbytes) if lives_on else transport.buffers.take(nbytes)
        tensors = tuple(_view(lease, place) for place in layout)
        if not lives_on:
            receiving.leases.append(lease)
        receiving.messages.append(Message(one.peer, tensors))
        full = [tensor for tensor in tensors if tensor.numel()]
        if full:
            arriving = full[0] if len(full) == 1 else lease[:nbytes]
            work = transport.irecv(arriving, one.peer, tags.of(transfer, microbatch, part))
            receiving.works.append(_WithPeer(one.peer, work))
            receiving.nbytes += nbytes
    return receiving


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a packed message."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _layout(specs: Sequence[Spec]) -> tuple[list[_Place], int]:
    """The place of each tensor, in the order of `specs`, and the bytes of all."""
    places: dict[int, _Place] = {}
    start = 0
    for position in sorted(range(len(specs)), key=lambda p: -specs[p][1].itemsize):
        shape, dtype = specs[position]
        places[position] = _Place(start, shape, dtype)
        start += math.prod(shape) * dtype.itemsize
    return [places[position] for position in range(len(specs))], start


def _view(lease: torch.Tensor, place: _Place) -> torch.Tensor:
    nbytes = math.prod(place.shape) * place.dtype.itemsize
    if not nbytes:
        return lease.new_empty(place.shape, dtype=place.dtype)
    return lease[place.start : place.start + nbytes].view(place.dtype).view(place.shape)
