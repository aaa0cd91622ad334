"""Runs a list of actions on one rank. It dispatches on `Action.kind` and nothing else: another valid order is another run.

One micro-batch, followed through an attention stage: RECV posts buffers, WAIT lets the worker take the message in, F computes,
FREE drops the message, SEND starts what F left to be sent, and a later WAIT on the sender's side lets its buffers go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Plan, Transfer
from disagmoe_compile.runtime.failure import describe_failure
from disagmoe_compile.runtime.messages import LostPeer, Receiving, ReceivingRouted, Sending, send
from disagmoe_compile.runtime.pulse import Heart, Place, Pulse, log_places
from disagmoe_compile.runtime.timeline import Event
from disagmoe_compile.runtime.transport.base import Work
from disagmoe_compile.runtime.worker import StepInputs, Worker

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Gradients of one dtype under way to their sum over the replicas, as one flat tensor."""

    fqns: list[str]
    flat: torch.Tensor
    work: Work


class Executor:
    """After a step, `events` holds what was done, in the order of doing it, and `sent_bytes` the bytes per transfer."""

    def __init__(
        self, plan: Plan, worker: Worker, store: dist.Store | None = None, heart: Heart | None = None
    ) -> None:
        """`store` and `heart` are how ranks in other processes learn where this one is, and that it failed."""
        self.plan, self.worker, self._store = plan, worker, store
        self._heart = heart or Heart()
        self._transfers = {t.name: t for t in plan.transfers}
        self._handlers: dict[ActionKind, Callable[[Action], int]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND: self._send,
            ActionKind.RECV: self._receive,
            ActionKind.WAIT: self._wait,
            ActionKind.FREE: self._free,
            ActionKind.REDUCE_GRAD: self._reduce_gradients,
            ActionKind.OVERLAP: self._overlap,
        }
        self._owned = {s.index: s.owned_fqns for s in plan.stages}

    def begin(self, step: StepInputs, number: int = 0) -> None:
        """Starts from nothing; `number` is the step's, for its events."""
        self.worker.begin(step)
        self.worker.transport.buffers.begin_step()
        self._number = number
        self.sent_bytes: dict[str, int] = {}
        self.events: list[Event] = []
        self._sending: dict[Key, Sending] = {}
        self._receiving: dict[Key, Receiving | ReceivingRouted] = {}
        self._reducing: dict[str, list[_Reduction]] = {}
        self._started: dict[tuple[ActionKind, Key], int] = {}

    def run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.run_action(action)

    def run_action(self, action: Action) -> None:
        """An error is reported to the other ranks through `store`; where a message fails, it names the rank that failed first."""
        index, start = len(self.events), time.time()
        self.events.append(Event(str(action), str(action.stream), start, start, step=self._number))
        self._heart.at(Place(self._number, str(self.worker.group), index, str(action)))
        try:
            with torch.profiler.record_function(str(action)):  # a profiler's trace reads like the plan
                nbytes = self._handlers[action.kind](action)
        except Exception as error:
            worker = self.worker
            where = f"action {action} of {worker.group}"
            peers = [error.peer] if isinstance(error, LostPeer) else self._peers(action)
            described = describe_failure(
                error, worker.rank, where, peers, self._store, on_timeout=self._log_places
            )
            self._heart.fail()
            raise described from error
        self.events[index] = replace(self.events[index], end=time.time(), nbytes=nbytes)

    def _log_places(self, pulses: Mapping[int, Pulse], silent: list[int]) -> None:
        schedule = self.plan.training if self.worker.step.trains else self.plan.forward_only
        assert schedule is not None
        log_places(pulses, silent, schedule)

    def can_run(self, action: Action) -> bool:
        """Whether the action would not block. For the loopback transport, which runs all ranks in turn on one thread."""
        if action.kind is ActionKind.REDUCE_GRAD:
            return all(one.work.ready() for one in self._reductions(action))
        if action.kind is ActionKind.WAIT and action.transfer is not None and not self._is_sender(action):
            return self._receiving[_key(action)].ready()
        return True

    # ---- compute
    def _forward(self, action: Action) -> int:
        self.worker.forward(action.stage, _microbatch(action))
        return 0

    def _backward(self, action: Action) -> int:
        self.worker.backward(action.stage, _microbatch(action), split=False)
        return 0

    def _backward_input(self, action: Action) -> int:
        self.worker.backward(action.stage, _microbatch(action), split=True)
        return 0

    def _backward_weight(self, action: Action) -> int:
        self.worker.backward_weight(action.stage, _microbatch(action))
        return 0

    def _overlap(self, action: Action) -> int:
        """The parts are independent; one device queue runs them one after the other."""
        return sum(self._handlers[part.kind](part) for part in action.parts)

    # ---- communication
    def _send(self, action: Action) -> int:
        transfer, microbatch = self._transfer(action), _microbatch(action)
        messages = self.worker.outgoing(transfer, microbatch)
        sending = send(self.worker.transport, self.worker.tags, transfer.name, microbatch, messages)
        self._sending[_key(action)] = sending
        self._started[ActionKind.SEND, _key(action)] = len(self.events) - 1
        self._count_sent(transfer.name, sending.nbytes)
        return sending.nbytes

    def _receive(self, action: Action) -> int:
        self._receiving[_key(action)] = self.worker.post_receive(self._transfer(action), _microbatch(action))
        self._started[ActionKind.RECV, _key(action)] = len(self.events) - 1
        return 0

    def _wait(self, action: Action) -> int:
        if action.transfer is None:
            return 0  # one queue: the compute before it in the list has run
        if self._is_sender(action):
            self._sending[_key(action)].wait()
            self._finish(ActionKind.SEND, _key(action))
            return 0
        receiving = self._receiving.pop(_key(action))
        if isinstance(receiving, ReceivingRouted):
            receiving = receiving.wait()
        messages = receiving.wait()
        self._finish(ActionKind.RECV, _key(action), receiving.nbytes)
        self.worker.arrived(self._transfer(action), _microbatch(action), messages)
        receiving.release()
        return 0

    def _free(self, action: Action) -> int:
        if self._is_sender(action):
            self._sending.pop(_key(action)).release()
        else:
            self.worker.release(self._transfer(action), _microbatch(action))
        return 0

    def _reduce_gradients(self, action: Action) -> int:
        gradients, nbytes = self.worker.gradients, 0
        for reduction in self._reductions(action):
            reduction.work.wait()
            parts = reduction.flat.split([gradients[fqn].numel() for fqn in reduction.fqns])
            for fqn, part in zip(reduction.fqns, parts, strict=True):
                gradients[fqn] = part.view_as(
                    gradients[fqn]
                ).clone()  # not a view: it would keep the whole alive
            nbytes += reduction.flat.numel() * reduction.flat.element_size()
        del self._reducing[str(action)]
        self._count_sent(str(action.transfer), nbytes)
        return nbytes

    def _reductions(self, action: Action) -> list[_Reduction]:
        """The sums over the replicas, one a dtype, started on first sight."""
        if str(action) not in self._reducing:
            worker = self.worker
            by_dtype: dict[torch.dtype, list[str]] = {}
            for fqn in self._owned[action.stage]:
                if fqn in worker.gradients:
                    by_dtype.setdefault(worker.gradients[fqn].dtype, []).append(fqn)
            ranks = self.plan.topology.ranks_of_group(worker.group)
            reductions = self._reducing[str(action)] = []
            for part, fqns in enumerate(by_dtype.values()):
                flat = torch.cat([worker.gradients[fqn].reshape(-1) for fqn in fqns])
                work = worker.transport.all_reduce(flat, ranks, worker.tags.of(str(action.transfer), 0, part))
                reductions.append(_Reduction(fqns, flat, work))
        return self._reducing[str(action)]

    # ---- small things
    def _count_sent(self, transfer: str, nbytes: int) -> None:
        self.sent_bytes[transfer] = self.sent_bytes.get(transfer, 0) + nbytes

    def _transfer(self, action: Action) -> Transfer:
        assert action.transfer is not None
        return self._transfers[action.transfer]

    def _is_sender(self, action: Action) -> bool:
        return self._transfer(action).src == action.stage

    def _finish(self, kind: ActionKind, key: Key, nbytes: int | None = None) -> None:
        """An asynchronous operation ends where this rank saw its end."""
        index = self._started.pop((kind, key))
        event = self.events[index]
        self.events[index] = replace(
            event, end=time.time(), nbytes=event.nbytes if nbytes is None else nbytes
        )

    def _peers(self, action: Action) -> list[int]:
        """The ranks that a communication action depends on."""
        if action.transfer is None:
            return []
        transfer = self._transfer(action)
        other = transfer.dst if action.stage == transfer.src else transfer.src
        return [rank for rank in self.plan.topology.ranks_of_stage(other) if rank != self.worker.rank]


def _key(action: Action) -> Key:
    assert action.transfer is not None
    return action.transfer, _microbatch(action)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
