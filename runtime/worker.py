"""What both kinds of worker share: parameters, gradients, saved activations, and what is on its way in and out.

A worker gives meaning to actions (compute a stage, fill a message, take a message in); the executor decides when.
State lives for one step: `begin` starts from nothing, so an aborted step leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.ir import Direction, Plan, Transfer, TransferKind
from disagmoe_compile.runtime.messages import Expected, Message, Receiving, ReceivingRouted, Tags, receive
from disagmoe_compile.runtime.stages import Boundary, Saved
from disagmoe_compile.runtime.transport.base import Transport

Key = tuple[str, int]  # (transfer, micro-batch)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One call. `arguments`: the flat arguments of the captured graph (whole batch). `call_seed`: equal on all ranks, for stages
    that draw random numbers. `trains`: whether a backward may follow, for which activations are kept.
    """

    arguments: Sequence[object]
    parameters: Mapping[str, torch.Tensor]
    call_seed: int
    trains: bool


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """Gradient of one output of the model, of the whole batch; `batch_dim` as in `outputs.Output`."""

    whole: torch.Tensor
    batch_dim: int | None

    def of_samples(self, samples: range, batch_size: int) -> torch.Tensor | None:
        """What belongs to these samples. Of an output without samples, the first sample gets all of it: it made the output."""
        if self.batch_dim is None:
            return self.whole if 0 in samples else None
        rows = self.whole.shape[self.batch_dim] // batch_size
        return self.whole.narrow(self.batch_dim, samples.start * rows, len(samples) * rows)


@dataclass(frozen=True, slots=True)
class Seeds:
    """What a backward starts from: the gradient of each loss numerator (none: all zero), and of outputs by index."""

    numerators: tuple[float, ...] = ()
    outputs: Mapping[int, OutputGradient] = field(default_factory=dict)


class Worker(ABC):
    """One rank's part of a plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        boundaries: Sequence[Boundary],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.group = plan.topology.group_of_rank(rank)
        self.member = plan.topology.index_in_group(rank)
        self.boundaries, self.transport = boundaries, transport
        self.tags = Tags(plan)
        self.gradients: dict[str, torch.Tensor] = {}

    def begin(self, step: StepInputs) -> None:
        self.step = step
        self.seeds: Seeds | None = None
        self.gradients = {}
        self._own_gradients: set[str] = set()
        self._saved: dict[tuple[int, int], Saved] = {}
        self._weight_work: dict[tuple[int, int], Saved] = {}
        self._outgoing: dict[Key, list[Message]] = {}
        self._incoming: dict[Key, object] = {}

    def end(self) -> None:
        """Lets go of the step's tensors; nothing of it is needed once its results are taken."""
        self.begin(StepInputs((), {}, 0, trains=False))

    # ---- compute
    @abstractmethod
    def forward(self, stage: int, microbatch: int) -> None: ...

    @abstractmethod
    def backward(self, stage: int, microbatch: int, *, split: bool) -> None:
        """Full backward, or with `split` the input gradient alone; `backward_weight` then does the rest."""

    @abstractmethod
    def backward_weight(self, stage: int, microbatch: int) -> None: ...

    # ---- transfers
    @abstractmethod
    def expected(self, transfer: Transfer, microbatch: int) -> list[Expected]:
        """Sizes of a transfer to receive, from what this rank already knows."""

    @abstractmethod
    def take_in(self, transfer: Transfer, microbatch: int, messages: list[Message]) -> object:
        """Turns arrived messages into the value that compute reads until FREE. Messages of M2N are overwritten afterwards: the
        value must not be a view of them.
        """

    def outgoing(self, transfer: Transfer, microbatch: int) -> list[Message]:
        try:
            return self._outgoing.pop((transfer.name, microbatch))
        except KeyError:
            raise DisagMoEError(
                f"rank {self.rank} has nothing to send as {transfer.name} of micro-batch {microbatch}"
            ) from None

    def post_receive(self, transfer: Transfer, microbatch: int) -> Receiving | ReceivingRouted:
        expected = self.expected(transfer, microbatch)
        lives_on = (
            transfer.kind is TransferKind.P2P
        )  # stages compute with what a residual brought, until their backward
        return receive(self.transport, self.tags, transfer.name, microbatch, expected, lives_on=lives_on)

    def arrived(self, transfer: Transfer, microbatch: int, messages: list[Message]) -> None:
        self._incoming[transfer.name, microbatch] = self.take_in(transfer, microbatch, messages)

    def release(self, transfer: Transfer, microbatch: int) -> None:
        self._incoming.pop((transfer.name, microbatch), None)

    # ---- shared pieces
    def peers_of_stage(self, stage: int) -> range:
        return self.plan.topology.ranks_of_stage(stage)

    def add_gradient(self, fqn: str, gradient: torch.Tensor) -> None:
        """Accumulates in place once the sum is a tensor of our own: what a stage returns may be a view of something in use."""
        if fqn not in self.gradients:
            self.gradients[fqn] = gradient
        elif fqn in self._own_gradients:
            self.gradients[fqn] += gradient
        else:
            self.gradients[fqn] = self.gradients[fqn] + gradient
            self._own_gradients.add(fqn)

    def read(self, transfer: str, microbatch: int) -> object:
        try:
            return self._incoming[transfer, microbatch]
        except KeyError:
            raise DisagMoEError(
                f"rank {self.rank} reads {transfer} of micro-batch {microbatch}, which has not arrived or was freed"
            ) from None


def boundary_of(transfer: Transfer) -> int:
    return min(transfer.src, transfer.dst) // 2


def is_a(transfer: Transfer, kind: TransferKind, direction: Direction) -> bool:
    return transfer.kind is kind and transfer.direction is direction


def mismatch(transfer: Transfer, role: str) -> DisagMoEError:
    return DisagMoEError(
        f"an {role} rank takes no part in {transfer.name} ({transfer.kind}, {transfer.direction})"
    )
