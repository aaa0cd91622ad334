"""A worker that computes nothing: real transfers of a plan between real processes, in the sizes that the plan names."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Direction, TokenDim, Transfer, TransferKind
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.failure import default_store
from disagmoe_compile.runtime.messages import Expected, Message
from disagmoe_compile.runtime.process_group import PipelineGroups
from disagmoe_compile.runtime.pulse import Heart
from disagmoe_compile.runtime.row_format import Spec
from disagmoe_compile.runtime.transport.process_group import ProcessGroupTransport
from disagmoe_compile.runtime.worker import StepInputs, Worker
from disagmoe_compile.testing.plans import example_plan

ROUTED = 3  # rows and pairs of every message


class SketchWorker(Worker):
    def forward(self, stage: int, microbatch: int) -> None:
        self._fill(stage, microbatch, Direction.FORWARD)

    def backward(self, stage: int, microbatch: int, *, split: bool) -> None:
        self._fill(stage, microbatch, Direction.BACKWARD)
        for fqn in self.plan.stages[stage].owned_fqns:
            self.add_gradient(fqn, torch.ones(8))

    def backward_weight(self, stage: int, microbatch: int) -> None:
        pass

    def _fill(self, stage: int, microbatch: int, direction: Direction) -> None:
        for transfer in self.plan.transfers:
            if (
                transfer.src == stage
                and transfer.direction is direction
                and transfer.kind is not TransferKind.COLLECTIVE
            ):
                tensors = tuple(torch.ones(shape, dtype=dtype) for shape, dtype in specs(transfer))
                peers = self._peers(transfer, transfer.dst)
                self._outgoing[transfer.name, microbatch] = [Message(peer, tensors) for peer in peers]

    def _peers(self, transfer: Transfer, stage: int) -> list[int]:
        ranks = list(self.peers_of_stage(stage))
        return [ranks[self.member]] if transfer.kind is TransferKind.P2P else ranks

    def expected(self, transfer: Transfer, microbatch: int) -> list[Expected]:
        return [Expected(peer, specs(transfer)) for peer in self._peers(transfer, transfer.src)]

    def take_in(self, transfer: Transfer, microbatch: int, messages: list[Message]) -> object:
        assert all((tensor == 1).all() for message in messages for tensor in message.tensors)
        return None


def specs(transfer: Transfer) -> tuple[Spec, ...]:
    return tuple(
        (tuple(ROUTED if isinstance(d, TokenDim) else d for d in s.shape), getattr(torch, s.dtype))
        for s in transfer.payload
    )


def fail_at(kind: str, how: str, victim: int, timeout_s: float, folder: str) -> None:
    """One good step; in the next one the victim fails at its first action of this kind. Raises what the others are told."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    topology = Topology(world_size // 2, world_size - world_size // 2, 1, 1, 2)
    plan = example_plan(topology, 2)
    assert plan.training is not None
    groups = PipelineGroups.create(topology, 60)
    transport = ProcessGroupTransport(topology, groups.lanes, groups.replicas, 60)
    worker = SketchWorker(plan, rank, [], transport, torch.device("cpu"))
    store, heart = default_store(), Heart()
    assert store is not None
    heart.start(store, rank)
    executor = Executor(plan, worker, store, heart)
    actions = plan.training.of(worker.group)
    inputs = StepInputs((), {}, 0, trains=True)
    executor.begin(inputs, 0)
    executor.run(actions)
    dist.barrier()
    transport._timeout = timedelta(seconds=timeout_s)
    executor.begin(inputs, 1)
    if rank == victim:
        executor._handlers[ActionKind(kind)] = lambda action: fail(how, action)
    try:
        executor.run(actions)
    except Exception:
        Path(folder, f"failed-{rank}").touch()
        if len(list(Path(folder).glob("failed-*"))) == world_size - 1 and how == "SIGSTOP":
            os.kill(int(Path(folder, f"pid-{victim}").read_text()), signal.SIGKILL)
        raise


def fail(how: str, action: Action) -> Any:
    if how == "exception":
        raise MemoryError(f"no room for {action}")
    os.kill(os.getpid(), getattr(signal, how))
