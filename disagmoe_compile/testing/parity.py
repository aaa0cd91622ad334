"""Comparison with eager that cannot be fooled: NaN is an infinite error, a missing gradient is an error, nothing is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from disagmoe_compile.inspect.parity import gradient_errors

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    """Eager on the whole batch: the loss and every gradient, by parameter name."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def eager_reference(model: torch.nn.Module, **kwargs: object) -> Reference:
    """Loss and gradients of `model(**kwargs).loss` in eager PyTorch. Leaves no gradient behind."""
    model.zero_grad()
    loss = model(**kwargs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Reference(loss.item(), gradients)


def assert_parity(
    loss: float,
    gradients: Mapping[str, torch.Tensor],
    reference: Reference,
    *,
    loss_tolerance: float = LOSS_TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """Raises AssertionError naming every parameter whose gradient is off, or the losses."""
    loss_error = abs(loss - reference.loss) / max(abs(reference.loss), 1e-12)
    if not loss_error <= loss_tolerance:
        raise AssertionError(
            f"loss {loss} differs from eager's {reference.loss} by {loss_error:.1e} relative"
        )
    errors = gradient_errors(gradients, reference.gradients)
    wrong = {name: error for name, error in errors.items() if not error <= gradient_tolerance}
    if wrong:
        listed = ", ".join(
            f"{name} {error:.1e}" for name, error in sorted(wrong.items(), key=lambda e: -e[1])
        )
        raise AssertionError(f"{len(wrong)} of {len(errors)} gradients differ from eager: {listed}")
