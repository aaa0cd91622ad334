"""Runs a pass inside the pipeline on a model and compares what comes out with eager, forward and every gradient.

    run = run_pass(QuantizePayload(torch.bfloat16), model, batch)
    assert run.report.matched == 2
    FileCheck().check("bfloat16").check("m2n_send").run(run.code)
    run.assert_parity(gradient_tolerance=2e-2)
    run.on_ranks(ffn_group_size=2, n_microbatches=2).assert_parity(gradient_tolerance=2e-2)

The pass stands where its contract puts it (`passes/registry.py`). Parity is checked on the graph after it and after every later
pass, in one process; `on_ranks` runs the action lists of all ranks of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.capture import CapturedGraph
from disagmoe_compile.inspect.parity import loss_and_gradients
from disagmoe_compile.passes.base import GraphPass, PassReport
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    Reference,
    assert_parity,
    eager_reference,
)
from disagmoe_compile.testing.virtual import CapturedCall, capture_call, run_captured


@dataclass(frozen=True, slots=True)
class Numbers:
    """Loss and every gradient, by parameter name, of one way to run the model, beside eager's."""

    what: str
    loss: float
    gradients: Mapping[str, torch.Tensor]
    reference: Reference

    def assert_parity(
        self, *, loss_tolerance: float = LOSS_TOLERANCE, gradient_tolerance: float = GRADIENT_TOLERANCE
    ) -> None:
        """Raises AssertionError saying what ran, and naming every gradient that is off, missing or too many."""
        try:
            assert_parity(
                self.loss,
                self.gradients,
                self.reference,
                loss_tolerance=loss_tolerance,
                gradient_tolerance=gradient_tolerance,
            )
        except AssertionError as error:
            raise AssertionError(f"{self.what}: {error}") from None


@dataclass(frozen=True, slots=True)
class PassRun:
    """`code`: the top-level graph as Python right after the pass; `stages`: the code of every stage in the end."""

    report: PassReport
    code: str
    stages: str
    numbers: tuple[Numbers, ...]
    call: CapturedCall
    reference: Reference

    def assert_parity(
        self, *, loss_tolerance: float = LOSS_TOLERANCE, gradient_tolerance: float = GRADIENT_TOLERANCE
    ) -> None:
        """Compares the graph after the pass, and after each later pass, with eager."""
        for one in self.numbers:
            one.assert_parity(loss_tolerance=loss_tolerance, gradient_tolerance=gradient_tolerance)

    def on_ranks(self, **options: object) -> Numbers:
        """All ranks of a plan in this process, over a loopback transport; `options` as for torch.compile."""
        run = run_captured(self.call, **options)  # type: ignore[arg-type]
        sizes = ", ".join(f"{name}={value}" for name, value in options.items())
        return Numbers(f"on ranks ({sizes})", run.loss, run.gradients, self.reference)


def run_pass(
    graph_pass: GraphPass,
    model: torch.nn.Module,
    batch: Mapping[str, object],
    *,
    loss_reduction: str = "auto",
) -> PassRun:
    """One call `model(**batch)`, which must return an object with a `loss`, captured and sent through the passes.

    Leaves no gradient in the model. Raises what the passes raise; ContractError where the pass cannot stand anywhere, or breaks
    its word or a rule of the graph.
    """
    return run_passes([graph_pass], model, batch, loss_reduction=loss_reduction)


def run_passes(
    passes: Sequence[GraphPass],
    model: torch.nn.Module,
    batch: Mapping[str, object],
    *,
    loss_reduction: str = "auto",
) -> PassRun:
    """`run_pass` for several passes at once; the report and code are those of the first."""
    reference = eager_reference(model, **batch)
    plain = capture_call(model, batch, loss_reduction=loss_reduction)
    observer = _Observer(plain.captured, plain.arguments, passes[0].name, reference)
    partition = partition_model(
        plain.captured, observers=[observer], loss_reduction=loss_reduction, extra_passes=passes
    )
    call = CapturedCall(plain.captured, partition, plain.arguments)
    programs = partition.programs
    stages = [*(p.module.code for p in programs.attention), *(p.function.code for p in programs.experts)]
    return PassRun(
        dict(partition.reports)[passes[0].name],
        observer.code,
        "\n".join(stages),
        tuple(observer.numbers),
        call,
        reference,
    )


class _Observer:
    """An `Observer` that runs the graph after a pass and after every later one."""

    def __init__(
        self, captured: CapturedGraph, arguments: Sequence[object], name: str, reference: Reference
    ) -> None:
        self.captured, self.arguments, self.reference = captured, arguments, reference
        self.name, self.code = name, ""
        self.numbers: list[Numbers] = []

    def __call__(self, index: int, name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        if name == self.name:
            self.code = graph_module.code
        if self.code:
            loss, gradients = loss_and_gradients(self.captured, graph_module, self.arguments)
            self.numbers.append(Numbers(f"after {name}", loss.item(), gradients, self.reference))
