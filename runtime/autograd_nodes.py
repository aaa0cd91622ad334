"""A step as one node of the user's autograd graph: its inputs are all arguments of the call, its outputs what has a gradient.

OnePhase   the loss alone has a gradient: forwards and backwards run inside the forward call, and `backward()` hands out gradients
           that are already there. They are seeded with the last incoming gradient (a GradScaler's scale must be in the seed, or
           fp16 gradients underflow) and corrected if the actual one differs.
TwoPhases  any output may have one: the forwards run in the call, the backwards in `backward()`, from what the script sends back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.runtime.agreement import agree, batch_digest, gather_numbers
from disagmoe_compile.runtime.executor import Executor
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
        ctx.session, ctx.seed = session, session.seed
        executor = prepared.executor
        scales = session.scales(arguments)
        session.begin(executor, arguments, trains=True)
        executor.worker.seeds = Seeds(numerators=tuple(scale * session.seed for scale in scales))
        session.run(executor, prepared.actions)
        loss = session.sum_loss(executor.worker, scales)
        # a seed other than 1 is a GradScaler's: an overflow on one rank must be known to all, so that all skip the step
        ctx.gradients = session.take_gradients(executor.worker, spread_overflows=session.seed != 1.0)
        ctx.n_arguments = len(arguments)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[object, ...]:
        if ctx.gradients is None:
            raise DisagMoEError(_AGAIN)
        gradients, ctx.gradients = ctx.gradients, None
        incoming = float(grad_output)
        if incoming and incoming == incoming:  # neither zero nor NaN
            ctx.session.seed = incoming
        factor = incoming / ctx.seed
        if factor != 1.0:
            gradients = [None if g is None else g * factor for g in gradients]
        return (None, None, None, *_padded(gradients, ctx.n_arguments))


@dataclass(slots=True)
class _Forward:
    """A call between its phases. `versions`: how often each argument had been written to when the forward saw it."""

    executor: Executor
    scales: tuple[float, ...]
    number: int
    versions: tuple[int | None, ...]

    def changed_argument(self) -> int | None:
        now = _versions(self.executor.worker.step.arguments)
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
        number = session.step_count
        kept = session.without_updated_buffers(arguments)
        session.begin(executor, kept, trains=True)
        session.run(executor, prepared.actions)
        outputs = session.gather(prepared, executor.worker, scales)
        session.update_buffers(executor.worker, arguments)
        ctx.session, ctx.prepared, ctx.n_arguments = session, prepared, len(arguments)
        ctx.forward_done = _Forward(executor, scales, number, _versions(kept))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for one, value in zip(session.gathered, outputs, strict=True) if not one.requires_grad)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[object, ...]:
        if ctx.forward_done is None:
            raise DisagMoEError(_AGAIN)
        done, ctx.forward_done = ctx.forward_done, None
        session, prepared, executor = ctx.session, ctx.prepared, done.executor
        _check_same_backward(session, done, incoming)
        executor.worker.seeds = _seeds(session, done.scales, incoming)
        session.run(executor, prepared.backward_actions)
        # whether a GradScaler made the incoming gradients cannot be told from them
        seeded = [o.index for o, g in zip(session.gathered, incoming, strict=True) if g is not None]
        reached = session.reached(frozenset(seeded))
        gradients = session.take_gradients(executor.worker, spread_overflows=True, reached=reached)
        executor.worker.end()
        return (None, None, None, *_padded(gradients, ctx.n_arguments))


def _check_same_backward(session: Session, done: _Forward, incoming: Sequence[torch.Tensor | None]) -> None:
    """Collective. Raises on every rank where ranks run other backwards, or an argument was written to since the forward."""
    with session.explained("comparing gradients"):
        digest = batch_digest(["backward", done.number, *incoming])
        agree("the gradients that backward() starts from", digest, session.world, _SAME_GRADIENTS)
        changed = done.changed_argument()
        flags = gather_numbers((float(changed is not None),), session.world)[:, 0].tolist()
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
