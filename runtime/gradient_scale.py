"""By which factor the script scaled its gradients between backward and `step()`, from a few elements of a few
gradients.

A uniform factor comes from clipping by norm, a GradScaler, or a division by the number of accumulations.
Ranks must use the same one: clipping by a rank's own norm does not. Element-wise changes (clipping by value)
are right on parts, and give no factor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

MAX_WATCHED = 4  # gradients
_ELEMENTS = 256  # of each
_MIN_NONZERO = 2  # one element scales uniformly whatever is done to it
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_FINE_TOLERANCE = 1e-3


class GradientScale:
    """Remembers samples of gradients as backward left them, through a hook on each watched parameter."""

    def __init__(self) -> None:
        # nn.Parameter -> its sample or None
        self._samples: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watches the smallest few of `parameters`, among those that are trained and hold elements; more if
        called again.
        """
        candidates = sorted(
            (p for p in parameters if p.requires_grad and p.numel() > 1), key=torch.Tensor.numel
        )
        for parameter in candidates[:MAX_WATCHED]:
            if parameter not in self._samples:
                self._samples[parameter] = None
                parameter.register_post_accumulate_grad_hook(self._record)

    def measure(self, parameters: Iterable[nn.Parameter]) -> tuple[float | None, float]:
        """(factor applied since backward, relative tolerance of the comparison).

        The factor is None where there is nothing to tell: no watched gradient, zeros, non-finite, or changed
        by element.
        """
        before, after, tolerance = [], [], _FINE_TOLERANCE
        for parameter in parameters:
            recorded = self._samples.get(parameter)
            if recorded is None or parameter.grad is None or parameter.grad.shape != parameter.shape:
                continue
            before.append(recorded)
            after.append(_sample(parameter.grad))
            tolerance = max(tolerance, _TOLERANCE.get(parameter.grad.dtype, _FINE_TOLERANCE))
        if not before:
            return None, tolerance
        return uniform_factor(torch.cat(before), torch.cat(after), tolerance), tolerance

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a step: a gradient that no backward has touched since must not be compared again."""
        for parameter in parameters:
            if parameter in self._samples:
                self._samples[parameter] = None

    def _record(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._samples[parameter] = _sample(parameter.grad)


def uniform_factor(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> float | None:
    """c with after = c * before up to `tolerance` of its norm, or None."""
    energy = torch.dot(before, before)
    if int(before.count_nonzero()) < _MIN_NONZERO or not bool(torch.isfinite(energy + after.sum())):
        return None
    factor = torch.dot(before, after) / energy
    if float((after - factor * before).norm()) > tolerance * float(after.norm()):
        return None
    return float(factor)


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Evenly spaced elements as float64 on the CPU, a copy."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].to("cpu", torch.float64, copy=True)
