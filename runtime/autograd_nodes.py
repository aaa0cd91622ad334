"""A step as one node of the user's autograd graph: its inputs are all arguments of the call, its outputs what has a gradient.

OnePhase   the loss alone has a gradient: forwards and backwards run inside the forward call, and `backward()` hands out gradients
           that are already there. They are seeded with the last incoming gradient, and scaled if the actual one differs; where
           something is computed in float16, whose gradients under- or overflow by their scale, the step runs again instead.
TwoPhases  any output may have one: the forwards run in the call, the backwards in `backward()`, from what the script sends back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.runtime.agreement import agree, batch_digest, gather_numbers
from disagmoe_compile.runtime.stages import times_written
from disagmoe_compile.runtime.worker import OutputGradient, Seeds

if TYPE_CHECKING:
    from disagmoe_compile.runtime.session import Prepared, Session

_AGAIN = (
    "backward() a second time through one call: its gradients were handed out and freed; call the model again"
)
_SAME_GRADIENTS = (
    "every rank must compute the same loss from the same outputs, and call backward() in the same order"
)


class OnePhase(torch.autograd.Function):
    """The loss. `session.seed` is the gradient that the last backward came with."""

    @staticmethod
    def forward(
        ctx: Any, session: Session, prepared: Prepared, anchor: torch.Tensor, *arguments: object
    ) -> torch.Tensor:
        ctx.session, ctx.seed, ctx.number = session, session.seed, session.binding.history.start_call()
        kept = session.without_updated_buffers(arguments) if session.half_precision else ()
        ctx.call = _Call(prepared, kept, session.call_seed, _versions(kept))
        scales = _run_step(session, prepared, arguments, session.call_seed)
        loss = session.sum_loss(prepared.executor.worker, scales)
        ctx.gradients = session.take_gradients(prepared.executor.worker)
        ctx.n_arguments = len(arguments)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[object, ...]:
        if ctx.gradients is None:
            raise DisagMoEError(_AGAIN)
        gradients, ctx.gradients = ctx.gradients, None
        session, call, ctx.call = ctx.session, ctx.call, None
        incoming = float(grad_output)
        session.binding.history.note(ctx.number, incoming)
        can_be_seed = incoming != 0 and math.isfinite(incoming)
        if can_be_seed:
            session.seed = incoming
        if incoming != ctx.seed and can_be_seed and session.half_precision:
            del gradients
            _check_same_backward(session, ctx.number, call, [grad_output])
            _run_step(session, call.prepared, call.arguments, call.seed_of_randomness)
            gradients = session.take_gradients(call.prepared.executor.worker)
            call.prepared.executor.worker.end()
        elif incoming != ctx.seed:
            factor = incoming / ctx.seed
            gradients = [None if g is None else g * factor for g in gradients]
        return (None, None, None, *_padded(gradients, ctx.n_arguments))


def _run_step(
    session: Session, prepared: Prepared, arguments: Sequence[object], call_seed: int
) -> tuple[float, ...]:
    """Forwards and backwards of a call, the loss scaled by `session.seed`. Returns d loss / d numerator of each term."""
    executor, scales = prepared.executor, session.scales(arguments)
    session.begin(executor, arguments, call_seed, trains=True)
    executor.worker.seeds = Seeds(numerators=tuple(scale * session.seed for scale in scales))
    session.run(executor, prepared.actions)
    return scales


@dataclass(frozen=True, slots=True)
class _Call:
    """What a backward needs of its call. `versions`: how often each argument had been written to when the forward saw it."""

    prepared: Prepared
    arguments: Sequence[object]
    seed_of_randomness: int
    versions: tuple[int | None, ...]

    def changed_argument(self) -> int | None:
        now = _versions(self.arguments)
        return next((i for i, (a, b) in enumerate(zip(self.versions, now, strict=True)) if a != b), None)


def _versions(arguments: Sequence[object]) -> tuple[int | None, ...]:
    return tuple(times_written(one) if isinstance(one, torch.Tensor) else None for one in arguments)


class TwoPhases(torch.autograd.Function):
    """The gathered outputs, in the order of `session.gathered`. Each call has an executor of its own: several calls may wait for
    their backward at once, and one that never gets it is gone with its outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, session: Session, prepared: Prepared, anchor: torch.Tensor, *arguments: object
    ) -> tuple[torch.Tensor, ...]:
        executor = prepared.new_executor()
        scales = session.scales(arguments)
        kept = session.without_updated_buffers(arguments)
        session.begin(executor, kept, session.call_seed, trains=True)
        session.run(executor, prepared.actions)
        outputs = session.gather(prepared, executor.worker, scales)
        session.update_buffers(executor.worker, arguments)
        ctx.session, ctx.n_arguments, ctx.scales = session, len(arguments), scales
        ctx.number = session.binding.history.start_call()
        ctx.executor, ctx.call = executor, _Call(prepared, kept, session.call_seed, _versions(kept))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for one, value in zip(session.gathered, outputs, strict=True) if not one.requires_grad)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[object, ...]:
        if ctx.executor is None:
            raise DisagMoEError(_AGAIN)
        session, executor, ctx.executor = ctx.session, ctx.executor, None
        _check_same_backward(session, ctx.number, ctx.call, incoming)
        executor.worker.seeds = _seeds(session, ctx.scales, incoming)
        session.run(executor, ctx.call.prepared.backward_actions)
        ctx.call = None
        seeded = [o.index for o, g in zip(session.gathered, incoming, strict=True) if g is not None]
        reached = session.reached(frozenset(seeded))
        gradients = session.take_gradients(executor.worker, reached)
        executor.worker.end()
        return (None, None, None, *_padded(gradients, ctx.n_arguments))


def _check_same_backward(
    session: Session, number: int, call: _Call, incoming: Sequence[torch.Tensor | None]
) -> None:
    """Collective. Raises on every rank where ranks run other backwards, or an argument was written to since the forward."""
    compared = {"the gradients that backward() starts from": batch_digest([number, *incoming])}
    agree("backward()", compared, session.world, _SAME_GRADIENTS)
    changed = call.changed_argument()
    flags = gather_numbers("backward()", (float(changed is not None),), session.world)[:, 0].tolist()
    if any(flags):
        where = f"a parameter of rank {flags.index(1.0)}" if changed is None else session.name_of(changed)
        raise InputError(
            f"{where} was changed in place after the forward whose backward() runs now, so its gradients would be wrong: call "
            "backward() before optimizer.step()"
        )


def _seeds(session: Session, scales: Sequence[float], incoming: Sequence[torch.Tensor | None]) -> Seeds:
    numerators: tuple[float, ...] = ()
    outputs: dict[int, OutputGradient] = {}
    for output, gradient in zip(session.gathered, incoming, strict=True):
        if gradient is None:
            continue
        if session.is_loss(output):
            numerators = tuple(scale * float(gradient) for scale in scales)
        else:
            outputs[output.index] = OutputGradient(gradient, output.batch_dim)
    return Seeds(numerators, outputs)


def _padded(gradients: Sequence[torch.Tensor | None], n_arguments: int) -> list[torch.Tensor | None]:
    return [*gradients, *[None] * (n_arguments - len(gradients))]
