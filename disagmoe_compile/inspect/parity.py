"""A graph's numbers on one call, and how far they are from others. NaN and infinity count as infinite errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.captured import CapturedGraph


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """|ours - reference| / |reference| in the 2-norm; infinite for NaN, infinity or another shape."""
    if ours.shape != reference.shape:
        return math.inf
    ours, reference = ours.detach().double(), reference.detach().double()
    error = ((ours - reference).norm() / reference.norm().clamp_min(1e-12)).item()
    return error if math.isfinite(error) else math.inf


def gradient_errors(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Relative error per parameter; infinite where only one side has a gradient."""
    return {
        name: relative_error(ours[name], reference[name]) if name in ours and name in reference else math.inf
        for name in sorted({*ours, *reference})
    }


def loss_and_gradients(
    captured: CapturedGraph, graph_module: fx.GraphModule, arguments: Sequence[object]
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The loss that `graph_module` computes from a call's flat arguments, and its gradients by parameter name.

    Raises InputError unless the graph returns exactly one scalar that requires grad.
    """
    outputs = graph_module(*arguments)
    losses = [o for o in outputs if isinstance(o, torch.Tensor) and o.dim() == 0 and o.requires_grad]
    if len(losses) != 1:
        raise InputError(
            f"parity of gradients needs one scalar output that requires grad, the model returns {len(losses)}; "
            "give it labels, or let it return its loss"
        )
    leaves: dict[str, torch.Tensor] = {}
    for position, name in captured.parameter_names().items():
        argument = arguments[position]
        if isinstance(argument, torch.Tensor) and argument.requires_grad:
            leaves[name] = argument
    found = torch.autograd.grad(losses[0], list(leaves.values()), allow_unused=True)
    return losses[0].detach(), {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
