"""Finds the pass after which a model's numbers are no longer eager's.

The graph after every pass runs on the captured call, in one process; loss and every gradient are compared with the captured
graph's own. The first pass whose error is above the tolerance is the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.inspect.parity import gradient_errors, loss_and_gradients, relative_error
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
        errors = {**gradient_errors(gradients, expected), "loss": relative_error(loss, expected_loss)}
        where = max(sorted(errors), key=errors.__getitem__)
        self._found.append(PassError(pass_name, errors[where], where))

    @property
    def bisection(self) -> Bisection:
        return Bisection(tuple(self._found))
