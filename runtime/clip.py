"""Gradient clipping by the norm of the whole model's gradient, wherever its parts live."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.agreement import gather_numbers
from disagmoe_compile.runtime.binding import HOLDERS, holder_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ over all ranks: scales gradients in place, returns the total norm
    before, on every rank.

    Collective once a model is bound: call it on all ranks with the same parameters. Replicas of a gradient
    count once. With no bound parameter among `parameters`, as in one process, it is torch's own. Raises
    InputError unless norm_type is positive, RuntimeError on all ranks for a non-finite norm with
    `error_if_nonfinite`.
    """
    every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    holders = {id(p): holder for p in every if (holder := holder_of(p)) is not None}
    if not holders:
        return torch.nn.utils.clip_grad_norm_(every, max_norm, norm_type, error_if_nonfinite, foreach)
    if not norm_type > 0:
        raise InputError(f"norm_type of clip_grad_norm_ must be positive (or inf), got {norm_type}")
    seen: set[int] = set()
    counted, elsewhere = [], []
    for parameter in every:
        if parameter.grad is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        holder = holders.get(id(parameter))
        if holder is None:
            elsewhere.append(parameter.grad)  # not part of a compiled model: the same on every rank
        elif holder.bound.placement.counts_on(holder.bound.rank):
            counted.append(parameter.grad)
    group = next(iter(holders.values())).group
    norms = [*_norms_of_all_ranks(counted, norm_type, foreach, group)]
    if elsewhere:
        norms.append(float(get_total_norm(elsewhere, norm_type, foreach=foreach)))
    total = torch.tensor(norm_of_norms(norms, norm_type), device=every[0].device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    clip_grads_with_norm_(every, max_norm, total, foreach)
    return total


def refuse_norms_of_parts() -> None:
    """From now on torch.nn.utils.clip_grad_norm_ raises InputError for gradients of a model that is spread over ranks.

    Nothing it does would show its mistake: a rank whose own norm is below `max_norm` clips nothing where the whole model's norm
    is above. It is met where it computes its norm, by a name of its own module: scripts hold the function since their imports.
    """
    torch_s_own = clip_grad._get_total_norm
    if getattr(torch_s_own, "_refuses_parts", False):
        return

    @wraps(torch_s_own)
    def norm_of_whole_gradients(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        gradients = list(tensors)
        given = {id(gradient) for gradient in gradients}
        if any(id(parameter.grad) in given for parameter in HOLDERS if parameter.grad is not None):
            raise InputError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of one rank alone, and the model is spread over ranks: use "
                "disagmoe_compile.clip_grad_norm_, which takes the same arguments"
            )
        return torch_s_own(gradients, *args, **kwargs)

    norm_of_whole_gradients._refuses_parts = True  # type: ignore[attr-defined]
    clip_grad._get_total_norm = norm_of_whole_gradients


def norm_of_norms(norms: Iterable[float], norm_type: float) -> float:
    """The norm of a vector from the norms of its pieces; NaN if any piece is, infinite if any is."""
    values = list(norms)
    if any(math.isnan(v) for v in values):
        return math.nan
    largest = max(values, default=0.0)
    if largest == 0.0 or math.isinf(largest) or math.isinf(norm_type):
        return largest
    return largest * math.fsum((v / largest) ** norm_type for v in values) ** (1.0 / norm_type)


def _norms_of_all_ranks(
    gradients: list[torch.Tensor], norm_type: float, foreach: bool | None, group: dist.ProcessGroup
) -> list[float]:
    local = float(get_total_norm(gradients, norm_type, foreach=foreach)) if gradients else 0.0
    everyone: list[float] = gather_numbers("clip_grad_norm_()", (local,), group)[:, 0].tolist()
    return everyone
