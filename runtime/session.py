"""One captured graph on one rank: from a call of the compiled model to a run of the plan's actions and back.

While training with one loss, the whole forward and backward pipeline runs inside the forward call; `backward()` hands the
gradients out. The backward is seeded with the last incoming gradient (a GradScaler's scale must be in the seed, or fp16
gradients underflow) and corrected if the actual one differs.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.runtime.agreement import agree, batch_digest
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.binding import Binding
from disagmoe_compile.runtime.buffer_sums import BufferUpdate, apply_updates
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.failure import default_store, describe_failure
from disagmoe_compile.runtime.nonfinite import spread_nonfinite
from disagmoe_compile.runtime.outputs import UnmaterialisedOutput
from disagmoe_compile.runtime.retrace import present_global_shapes
from disagmoe_compile.runtime.rng import draw_call_seed
from disagmoe_compile.runtime.timeline import Event
from disagmoe_compile.runtime.worker import StepInputs

_STEPS_KEPT = 64
_SAME_BATCH = (
    "under torchrun every rank runs the same script, seed and data included, and passes the same global batch"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """loss = sum of coefficient * numerator / denominator; `denominators(arguments)` reads the whole batch."""

    output_index: int
    dtype: torch.dtype
    coefficients: tuple[float, ...]
    denominators: Callable[[Sequence[object]], tuple[float, ...]]

    def scales(self, arguments: Sequence[object]) -> tuple[float, ...]:
        """d loss / d numerator of each term. No valid label at all: NaN, as in eager."""
        return tuple(
            c / d if d else float("nan")
            for c, d in zip(self.coefficients, self.denominators(arguments), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Output:
    """One flat output of the graph. `stage` makes it; None: it is `constant`."""

    index: int
    dtype: torch.dtype | None
    stage: int | None
    constant: object


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for one set of sizes, ready to run. `output_shapes`: of the whole batch, by output index."""

    plan: Plan
    executor: Executor
    actions: tuple[Action, ...]
    output_shapes: Mapping[int, tuple[int, ...]]


class Session:
    """Called with the flat arguments of the captured graph; returns its flat outputs.

    `prepare(arguments)` plans and compiles for the sizes of these arguments, or finds what it made before.
    """

    answered: ClassVar[int] = 0  # calls of all sessions of this process that returned

    def __init__(
        self,
        *,
        binding: Binding,
        prepare: Callable[[Sequence[object]], Prepared],
        loss: Loss | None,
        outputs: Sequence[Output],
        buffer_updates: Sequence[BufferUpdate],
        parameters: Mapping[int, str],
        inputs: Sequence[int],
        uses_rng: bool,
        trains: bool,
        gather_outputs: bool,
        world: dist.ProcessGroup,
    ) -> None:
        self._binding, self._prepare = binding, prepare
        self._loss, self._outputs, self._buffer_updates = loss, outputs, buffer_updates
        self._parameters, self._inputs = parameters, inputs
        self._uses_rng, self._trains, self._gather_outputs = uses_rng, trains, gather_outputs
        self._world = world
        self._seed = 1.0
        self._prepared: Prepared | None = None
        self._events: deque[list[Event]] = deque(maxlen=_STEPS_KEPT)
        self._sent_bytes: Counter[str] = Counter()
        self.step_count = 0
        self.created = next(_COUNTER)
        _SESSIONS.add(self)

    # ---- what others read of it
    @property
    def plan(self) -> Plan:
        return self._current.plan

    @property
    def rank(self) -> int:
        return self._current.executor.worker.rank

    @property
    def group(self) -> Group:
        return self._current.executor.worker.group

    @property
    def events(self) -> list[Event]:
        """What this rank did in the last steps (at most the last 64)."""
        return [event for step in self._events for event in step]

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Per transfer, since the first step."""
        return self._sent_bytes

    @property
    def parameter_bytes(self) -> int:
        return self._binding.local_bytes

    @property
    def _current(self) -> Prepared:
        if self._prepared is None:
            raise DisagMoEError("this compiled graph has not been called yet")
        return self._prepared

    # ---- one call
    def __call__(self, *arguments: object) -> tuple[object, ...]:
        present_global_shapes()
        with self._explained("checking parameters"):
            self._binding.check({fqn: arguments[i] for i, fqn in self._parameters.items()})  # type: ignore[misc]
        self._call_seed = draw_call_seed() if self._uses_rng else 0
        with self._explained("comparing batches"):
            inputs = [arguments[i] for i in self._inputs]
            agree(
                "the batch or the random seed",
                batch_digest([*inputs, self._call_seed]),
                self._world,
                _SAME_BATCH,
            )
        with self._explained("planning and compiling"):
            self._prepared = prepared = self._prepare(arguments)
        loss: torch.Tensor | None = None
        if self._trains:
            loss = _Pipeline.apply(self, prepared, *arguments)
        elif self._loss is not None:
            loss = self.run(prepared, arguments, None)
        else:
            self._execute(prepared, arguments, None)
        new_buffers = self._update_buffers(prepared, arguments)
        outputs = tuple(
            new_buffers[output.index] if output.index in new_buffers else self._output(output, prepared, loss)
            for output in self._outputs
        )
        prepared.executor.worker.end()
        Session.answered += 1
        return outputs

    def run(self, prepared: Prepared, arguments: Sequence[object], seed: float | None) -> torch.Tensor:
        """The loss, on every rank. Gradients stay with the worker."""
        assert self._loss is not None
        scales = self._loss.scales(arguments)
        self._execute(prepared, arguments, None if seed is None else tuple(s * seed for s in scales))
        worker = prepared.executor.worker
        numerators = torch.zeros(len(scales), dtype=torch.float64)
        if isinstance(worker, AttentionWorker) and worker.numerators:
            numerators = torch.stack([n.to("cpu", torch.float64) for n in worker.numerators])
        with self._explained("summing the loss"):
            dist.all_reduce(numerators, group=self._world)
        loss = (numerators * torch.tensor(scales, dtype=torch.float64)).sum()
        return loss.to(worker.device, self._loss.dtype)

    def _execute(
        self, prepared: Prepared, arguments: Sequence[object], tangents: tuple[float, ...] | None
    ) -> None:
        executor = prepared.executor
        executor.begin(
            StepInputs(
                arguments=arguments,
                parameters={fqn: arguments[i].detach() for i, fqn in self._parameters.items()},  # type: ignore[attr-defined]
                tangents=tangents,
                call_seed=self._call_seed,
            ),
            self.step_count,
        )
        executor.run(prepared.actions)
        self._events.append(executor.events)
        self._sent_bytes.update(executor.sent_bytes)
        self.step_count += 1

    def take_gradients(self, prepared: Prepared) -> list[torch.Tensor | None]:
        """By argument position, of parameters that this rank owns; the worker's are gone afterwards.

        Under a GradScaler (a seed other than 1) an overflow on one rank is made known to all, so that all skip the step.
        """
        worker = prepared.executor.worker
        if self._seed != 1.0:
            with self._explained("looking for overflows"):
                spread_nonfinite(list(worker.gradients.values()), self._world)
        found: list[torch.Tensor | None] = [None] * (1 + max(self._parameters, default=-1))
        for position, fqn in self._parameters.items():
            found[position] = worker.gradients.get(fqn)
        worker.gradients = {}
        return found

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """A collective that fails names the rank that failed first."""
        try:
            yield
        except Exception as error:
            raise describe_failure(error, dist.get_rank(), what, [], default_store()) from error

    # ---- buffers and outputs
    def _update_buffers(self, prepared: Prepared, arguments: Sequence[object]) -> dict[int, torch.Tensor]:
        """Every rank's buffers grow by what the samples of all ranks add; new values by output index."""
        worker = prepared.executor.worker
        sums = worker.buffer_sums.sums if isinstance(worker, AttentionWorker) else {}
        with self._explained("summing updates of buffers"):
            return apply_updates(
                self._buffer_updates, arguments, sums, lambda one: dist.all_reduce(one, group=self._world)
            )

    def _output(self, output: Output, prepared: Prepared, loss: torch.Tensor | None) -> object:
        if self._loss is not None and output.index == self._loss.output_index:
            return loss
        if output.stage is None:
            return output.constant
        shape = prepared.output_shapes[output.index]
        assert output.dtype is not None
        if self._trains and not self._gather_outputs:
            return UnmaterialisedOutput(output.index, shape, output.dtype)
        return self._gather(output, prepared, shape)

    def _gather(self, output: Output, prepared: Prepared, shape: tuple[int, ...]) -> torch.Tensor:
        """The output of the whole batch, from the ranks of the stage that makes it: their samples follow each other."""
        assert output.stage is not None and output.dtype is not None
        worker = prepared.executor.worker
        ranks = prepared.plan.topology.ranks_of_stage(output.stage)
        share = (shape[0] // len(ranks), *shape[1:])
        parts = []
        for rank in ranks:
            part = torch.empty(share, dtype=output.dtype, device=worker.device)
            if rank == worker.rank:
                assert isinstance(worker, AttentionWorker)
                pieces = worker.outputs[output.index]
                part.copy_(torch.cat([pieces[microbatch].detach() for microbatch in sorted(pieces)]))
            with self._explained(f"gathering output {output.index}"):
                dist.broadcast(part, rank, group=self._world)
            parts.append(part)
        return torch.cat(parts)


class _Pipeline(torch.autograd.Function):
    """Makes the step one node of the user's autograd graph: its inputs are all arguments, its output the loss."""

    @staticmethod
    def forward(ctx: Any, session: Session, prepared: Prepared, *arguments: object) -> torch.Tensor:
        ctx.session, ctx.seed = session, session._seed
        loss = session.run(prepared, arguments, session._seed)
        ctx.gradients = session.take_gradients(prepared)
        ctx.n_arguments = len(arguments)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[object, ...]:
        if ctx.gradients is None:
            raise DisagMoEError(
                "backward() a second time through one call: its gradients were handed out and freed; call the model again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        incoming = float(grad_output)
        if incoming and incoming == incoming:  # neither zero nor NaN
            ctx.session._seed = incoming
        factor = incoming / ctx.seed
        if factor != 1.0:
            gradients = [None if g is None else g * factor for g in gradients]
        gradients += [None] * (ctx.n_arguments - len(gradients))
        return (None, None, *gradients)


_COUNTER = itertools.count()
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def active_sessions() -> list[Session]:
    """Sessions of this process that have run, oldest first."""
    return sorted((s for s in _SESSIONS if s._prepared is not None), key=lambda s: s.created)
