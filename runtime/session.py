"""One captured graph on one rank: from a call of the compiled model to a run of the plan's actions and back.

A call that trains is a node of the user's autograd graph, in one phase or in two (`autograd_nodes.py`). A call that does not runs
the forwards alone. Either way the outputs that the script gets are those of the whole batch.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.runtime.agreement import agree, batch_digest
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.autograd_nodes import OnePhase, TwoPhases
from disagmoe_compile.runtime.binding import Binding
from disagmoe_compile.runtime.buffer_sums import BufferUpdate, apply_updates
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.failure import default_store, describe_failure
from disagmoe_compile.runtime.history import SAME_BACKWARDS
from disagmoe_compile.runtime.outputs import Output, UnmaterialisedOutput, gather
from disagmoe_compile.runtime.pulse import Pulse, log_places
from disagmoe_compile.runtime.retrace import present_global_shapes
from disagmoe_compile.runtime.rng import draw_call_seed
from disagmoe_compile.runtime.timeline import Event
from disagmoe_compile.runtime.user_warning import warn_at_call
from disagmoe_compile.runtime.worker import StepInputs, Worker

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
class Prepared:
    """A plan for one set of sizes, ready to run. `output_shapes`: of the whole batch, by output index.

    `actions`: what a call runs; with two phases the forwards, and `backward_actions` what `backward()` runs, on the
    executor that the call took from `new_executor`.
    """

    plan: Plan
    executor: Executor
    new_executor: Callable[[], Executor]
    actions: tuple[Action, ...]
    backward_actions: tuple[Action, ...]
    output_shapes: Mapping[int, tuple[int, ...]]


class Session:
    """Called with the flat arguments of the captured graph; returns its flat outputs.

    `prepare(arguments)` plans and compiles for the sizes of these arguments, or finds what it made before.
    """

    answered: ClassVar[int] = 0  # calls of all sessions of this process that returned
    has_warned: ClassVar[bool] = False  # of what gathering costs

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
        input_gradients: Sequence[int],
        uses_rng: bool,
        trains: bool,
        two_phases: bool,
        half_precision: bool,
        mixes_samples: Sequence[str],
        reached: Callable[[frozenset[int]], frozenset[int]],
        world: dist.ProcessGroup,
    ) -> None:
        """By position of the argument: `parameters`, `inputs`, and which of these want a gradient (`input_gradients`).

        `mixes_samples`: operations for which the oracle is eager on each slice of the batch (see `Plan.samples_of`).
        `half_precision`: whether anything is computed in float16, where gradients depend on the scale of the loss.
        `reached`: from indices of outputs to the arguments that gradients into these outputs reach.
        """
        self.binding, self._prepare = binding, prepare
        self._loss, self._outputs, self._buffer_updates = loss, outputs, buffer_updates
        self._parameters, self._inputs, self._input_gradients = parameters, inputs, input_gradients
        self._uses_rng, self._trains, self._two_phases = uses_rng, trains, two_phases
        self.world, self.reached, self.half_precision = world, reached, half_precision
        self.mixes_samples = tuple(mixes_samples)
        self.gathered = [one for one in outputs if one.is_gathered]
        self.seed = 1.0
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
        return self.binding.local_bytes

    @property
    def _current(self) -> Prepared:
        if self._prepared is None:
            raise DisagMoEError("this compiled graph has not been called yet")
        return self._prepared

    # ---- one call
    def __call__(self, *arguments: object) -> tuple[object, ...]:
        present_global_shapes()
        with self.explained("checking parameters"):
            self.binding.check({fqn: arguments[i] for i, fqn in self._parameters.items()})  # type: ignore[misc]
        self.call_seed = draw_call_seed() if self._uses_rng else 0
        self._compare_call([arguments[i] for i in self._inputs])
        with self.explained("planning and compiling"):
            self._prepared = prepared = self._prepare(arguments)
        self._warn_of_gathering(prepared)
        self._new_buffers: dict[int, torch.Tensor] = {}
        values: dict[int, torch.Tensor] = {}
        if self._trains and not self._two_phases:
            assert self._loss is not None
            values[self._loss.output_index] = OnePhase.apply(self, prepared, *self._differentiable(arguments))
            self.update_buffers(prepared.executor.worker, arguments)
        else:
            found = (
                TwoPhases.apply(self, prepared, *self._differentiable(arguments))
                if self._trains
                else self._forward_alone(prepared, arguments)
            )
            values = {one.index: value for one, value in zip(self.gathered, found, strict=True)}
        values.update(self._new_buffers)
        prepared.executor.worker.end()
        Session.answered += 1
        return tuple(self._returned(one, values, prepared) for one in self._outputs)

    def _compare_call(self, inputs: Sequence[object]) -> None:
        """Collective. Raises DivergenceError on every rank where ranks call with other batches, or did other things before."""
        compared = {
            SAME_BACKWARDS: self.binding.history.digest,
            "the batch or the random seed": batch_digest([*inputs, self.call_seed]),
        }
        agree("a call of the model", compared, self.world, _SAME_BATCH)

    def _forward_alone(self, prepared: Prepared, arguments: Sequence[object]) -> tuple[torch.Tensor, ...]:
        executor = prepared.executor
        self.begin(executor, arguments, self.call_seed, trains=False)
        self.run(executor, prepared.actions)
        outputs = self.gather(prepared, executor.worker, self.scales(arguments))
        self.update_buffers(executor.worker, arguments)
        return outputs

    def _returned(self, output: Output, values: Mapping[int, torch.Tensor], prepared: Prepared) -> object:
        if output.index in values:
            return values[output.index]
        if output.stage is None:
            return output.constant
        assert output.dtype is not None and output.missing is not None
        return UnmaterialisedOutput(
            output.index, prepared.output_shapes[output.index], output.dtype, output.missing
        )

    # ---- what the autograd nodes are made of
    def scales(self, arguments: Sequence[object]) -> tuple[float, ...]:
        """d loss / d numerator of each term of the loss; empty without a loss."""
        return () if self._loss is None else self._loss.scales(arguments)

    def is_loss(self, output: Output) -> bool:
        return self._loss is not None and output.index == self._loss.output_index

    def _differentiable(self, arguments: Sequence[object]) -> list[object]:
        """What the autograd node takes: an anchor, which makes `backward()` the same line on a rank that owns no trained
        parameter; then the arguments, parameters that live elsewhere without their history: their hooks must not run here.
        """
        elsewhere = {i for i, fqn in self._parameters.items() if not self.binding[fqn].is_owned}
        anchor = torch.zeros((), requires_grad=True)
        return [anchor, *(a.detach() if i in elsewhere else a for i, a in enumerate(arguments))]  # type: ignore[attr-defined]

    def name_of(self, position: int) -> str:
        fqn = self._parameters.get(position)
        return f"argument {position} of the graph" if fqn is None else f"parameter {fqn}"

    def without_updated_buffers(self, arguments: Sequence[object]) -> list[object]:
        """The arguments with copies of the buffers that the end of the forward changes, for a backward that may read them."""
        updated = {update.position for update in self._buffer_updates}
        return [a.clone() if i in updated else a for i, a in enumerate(arguments)]  # type: ignore[attr-defined]

    def begin(self, executor: Executor, arguments: Sequence[object], call_seed: int, *, trains: bool) -> None:
        parameters = {fqn: arguments[i].detach() for i, fqn in self._parameters.items()}  # type: ignore[attr-defined]
        executor.begin(StepInputs(arguments, parameters, call_seed, trains), self.step_count)
        self._events.append(executor.events)
        self.step_count += 1

    def run(self, executor: Executor, actions: Sequence[Action]) -> None:
        executor.run(actions)
        self._sent_bytes.update(executor.sent_bytes)
        executor.sent_bytes.clear()

    def sum_loss(self, worker: Worker, scales: Sequence[float]) -> torch.Tensor:
        """Collective: the loss, on every rank."""
        assert self._loss is not None
        numerators = torch.zeros(len(scales), dtype=torch.float64)
        if isinstance(worker, AttentionWorker) and worker.numerators:
            numerators = torch.stack([n.to("cpu", torch.float64) for n in worker.numerators])
        with self.explained("summing the loss"):
            dist.all_reduce(numerators, group=self.world)
        loss = (numerators * torch.tensor(scales, dtype=torch.float64)).sum()
        return loss.to(worker.device, self._loss.dtype)

    def gather(self, prepared: Prepared, worker: Worker, scales: Sequence[float]) -> tuple[torch.Tensor, ...]:
        """Collective: `gathered`, of the whole batch, on every rank."""
        found = []
        for one in self.gathered:
            if self.is_loss(one):
                found.append(self.sum_loss(worker, scales))
                continue
            with self.explained(f"gathering output {one.index}"):
                shape = prepared.output_shapes[one.index]
                found.append(gather(one, shape, prepared.plan, worker, self._broadcast))
        if isinstance(worker, AttentionWorker):
            worker.outputs.clear()  # copied; a backward has what it needs elsewhere
        return tuple(found)

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        dist.broadcast(tensor, rank, group=self.world)

    def take_gradients(
        self, worker: Worker, reached: frozenset[int] | None = None
    ) -> list[torch.Tensor | None]:
        """By argument position, of parameters that this rank owns and of inputs; the worker's are gone afterwards. None where
        nothing leads to, as in eager: of all arguments but those `reached`.
        """
        if reached is not None:
            names = {fqn for position, fqn in self._parameters.items() if position in reached}
            worker.gradients = {fqn: g for fqn, g in worker.gradients.items() if fqn in names}
        positions = [*self._parameters, *self._input_gradients]
        found: list[torch.Tensor | None] = [None] * (1 + max(positions, default=-1))
        for position, fqn in self._parameters.items():
            found[position] = worker.gradients.get(fqn)
        worker.gradients = {}
        for position in self._input_gradients:
            if reached is not None and position not in reached:
                continue
            found[position] = self._sum_input_gradient(worker, position)
        return found

    def _sum_input_gradient(self, worker: Worker, position: int) -> torch.Tensor:
        """Collective: every rank has the gradient of its samples, and all get the whole."""
        argument = worker.step.arguments[position]
        assert isinstance(argument, torch.Tensor)
        own = worker.input_gradients.get(position) if isinstance(worker, AttentionWorker) else None
        gradient = torch.zeros_like(argument) if own is None else own
        with self.explained(f"summing the gradient of input {position}"):
            dist.all_reduce(gradient, group=self.world)
        return gradient

    def update_buffers(self, worker: Worker, arguments: Sequence[object]) -> None:
        """Collective: every rank's buffers grow by what the samples of all ranks add."""
        sums = worker.buffer_sums.sums if isinstance(worker, AttentionWorker) else {}
        with self.explained("summing updates of buffers"):
            self._new_buffers = apply_updates(
                self._buffer_updates, arguments, sums, lambda one: dist.all_reduce(one, group=self.world)
            )

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """A collective that fails names the rank that failed first."""
        try:
            yield
        except Exception as error:
            raise describe_failure(
                error, dist.get_rank(), what, [], default_store(), on_timeout=self._log_places
            ) from error

    def _log_places(self, pulses: Mapping[int, Pulse], silent: list[int]) -> None:
        if self._prepared is not None:
            schedule = self.plan.training if self._trains else self.plan.forward_only
            assert schedule is not None
            log_places(pulses, silent, schedule)

    def _warn_of_gathering(self, prepared: Prepared) -> None:
        """Once a process, on rank 0: what it costs that the script gets whole outputs while training."""
        if Session.has_warned or not self._two_phases or dist.get_rank():
            return
        Session.has_warned = True
        shapes = {one.index: prepared.output_shapes[one.index] for one in self.gathered}
        nbytes = sum(math.prod(shapes[o.index]) * o.dtype.itemsize for o in self.gathered if o.dtype)
        warn_at_call(
            f"disagmoe: {len(shapes)} output(s) of the model, {nbytes:,} bytes, are put together on every rank at each training "
            "call, and activations of the whole batch are held until backward(); a loss computed inside the model needs neither"
        )


_COUNTER = itertools.count()
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def active_sessions() -> list[Session]:
    """Sessions of this process that have run, oldest first."""
    return sorted((s for s in _SESSIONS if s._prepared is not None), key=lambda s: s.created)
