"""Captures a model through torch.compile without splitting it, and compares graphs by the positions of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from disagmoe_compile.capture import capture
from disagmoe_compile.inspect.parity import relative_error
from disagmoe_compile.passes.captured import CapturedGraph


def capture_model(
    model: Callable[..., Any], batch: Mapping[str, torch.Tensor], grad: bool = True, fullgraph: bool = True
) -> tuple[CapturedGraph, list[Any]]:
    """(captured graph, the flat arguments Dynamo calls it with)."""
    seen: list[CapturedGraph] = []
    calls: list[list[Any]] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        seen.append(capture(graph_module, example_inputs))

        def run(*args: Any) -> Any:
            calls.append(list(args))
            return graph_module(*args)

        return run

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=backend, fullgraph=fullgraph)(**batch)
    return seen[-1], calls[-1]


def loss_and_gradients(
    run: Callable[..., Any], args: list[Any], loss_position: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Loss and the gradient of every argument that requires one, by position."""
    leaves = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad}
    loss = run(*args)[loss_position]
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), {i: g for i, g in zip(leaves, found) if g is not None}


def worst_error(actual: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor]) -> float:
    """Infinite if a gradient is missing on either side."""
    if set(actual) != set(expected):
        return float("inf")
    return max((relative_error(actual[i], expected[i]) for i in expected), default=0.0)


def loss_position(outputs: Any) -> int:
    """Index of the 0-d output that requires grad."""
    return next(
        i for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.dim() == 0 and o.requires_grad
    )
