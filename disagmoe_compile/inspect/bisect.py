"""Finds the pass after which a model's numbers are no longer eager's.

The graph after every pass runs on the captured call, in one process; loss and every gradient are compared with the captured
graph's own. The first pass whose error is above the tolerance is the culprit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.base import GraphPass, PassReport
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.pipeline import partition_model

TOLERANCE = 1e-4  # relative, of the loss and of each gradient


@dataclass(frozen=True, slots=True)
class PassError:
    """The largest relative error after a pass, and what has it: `loss` or a parameter's name. Infinite for NaN."""

    name: str
    error: float
    where: str

    @property
    def is_broken(self) -> bool:
        return not self.error <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Bisection:
    """`culprit` is the first pass that broke parity, or None."""

    passes: tuple[PassError, ...]

    @property
    def culprit(self) -> PassError | None:
        return next((one for one in self.passes if one.is_broken), None)


def bisect(
    captured: CapturedGraph, *, extra_passes: Iterable[GraphPass] = (), disabled: Iterable[str] = ()
) -> Bisection:
    """Runs all passes on a captured call, and the graph after each. Raises what the passes raise."""
    recorder = ParityRecorder(captured, captured.example_arguments())
    partition_model(captured, observers=[recorder], extra_passes=extra_passes, disabled=disabled)
    return recorder.bisection


class ParityRecorder:
    """Observer of a pass manager: compares the graph after each pass with the captured one, on the captured call's arguments."""

    def __init__(self, captured: CapturedGraph, arguments: Sequence[object]) -> None:
        self._captured, self._arguments = captured, arguments
        self._reference = loss_and_gradients(captured, captured.graph_module, arguments)
        self._found: list[PassError] = []

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        loss, gradients = loss_and_gradients(self._captured, graph_module, self._arguments)
        expected_loss, expected = self._reference
        errors = {name: _error(gradients.get(name), expected.get(name)) for name in {*gradients, *expected}}
        errors["loss"] = _error(loss, expected_loss)
        where = max(sorted(errors), key=errors.__getitem__)
        self._found.append(PassError(pass_name, errors[where], where))

    @property
    def bisection(self) -> Bisection:
        return Bisection(tuple(self._found))


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


def _error(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if ours is None or expected is None or ours.shape != expected.shape:
        return math.inf
    ours, expected = ours.double(), expected.double()
    error = ((ours - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    return error if math.isfinite(error) else math.inf
