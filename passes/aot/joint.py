"""One stage as explicit forward and backward graphs, out of AOTAutograd's joint graph.

`aot_export_joint_with_descriptors` labels every placeholder and output of the joint graph (plain input, tangent of output i,
gradient of input j), so nothing here relies on positions or names that AOTAutograd does not promise. The runtime wrappers of
AOTAutograd are bypassed on purpose: what they would handle (outputs that alias, mutated inputs) is removed or refused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes

from disagmoe_compile.errors import UnsupportedModelError

# The row count while tracing: a prime that is not a size of the model, far from the special cases 0, 1 and 2.
_TRACED_ROWS = 8191
# Row counts at which every assumption made while tracing must hold, and larger ones at which a kernel's 32-bit index may end.
_CHECKED_ROWS = (2, 3, 5, 16, 127, 4096, _TRACED_ROWS)
_LARGE_ROWS = (16_411, 65_537, 262_147, 1_048_583, 16_777_259)


@dataclass(frozen=True, slots=True)
class TensorExample:
    """What tracing needs to know of an input. `rows`: dim 0 is the row count, unknown until the call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    rows: bool = False


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Where the backward graph's input comes from: `saved[index]`, or the gradient of output `index`."""

    is_tangent: bool
    index: int


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """`forward(*inputs)` -> outputs, then saved values. `backward(*backward_inputs)` -> gradients of inputs `gradients`.

    `backward` is None where nothing needs a gradient. `gradients[i]` is None where output i of `backward` is no gradient.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    n_outputs: int
    backward_inputs: tuple[BackwardInput, ...]
    gradients: tuple[int | None, ...]

    @property
    def tangents(self) -> tuple[int, ...]:
        return tuple(sorted(source.index for source in self.backward_inputs if source.is_tangent))

    @property
    def gradient_inputs(self) -> tuple[int, ...]:
        """Inputs that get a gradient."""
        if self.backward is None:
            return ()
        values = graph_outputs(self.backward.graph)
        return tuple(i for i, value in zip(self.gradients, values) if i is not None and value is not None)


def graph_outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns, as nodes (or constants, or None)."""
    outputs = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


@contextlib.contextmanager
def stage_tracing(fake_mode: FakeTensorMode, *, training: bool, autocast: bool) -> Iterator[None]:
    """The state a stage is traced and compiled in, whatever the caller is in the middle of (Dynamo, a Function's forward).

    Inside `autograd.Function.forward` gradients are off and AOTAutograd would silently make an inference graph. The autocast
    cache is off because it would keep this trace's fake tensors for the next one.
    """
    cached = torch.is_autocast_cache_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(torch.set_grad_enabled(training))
        if not autocast:
            stack.enter_context(torch._C._DisableAutocast())
        torch.set_autocast_cache_enabled(False)
        stack.callback(torch.set_autocast_cache_enabled, cached)
        yield


def fake_mode_for_stage() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def _fakes(examples: Sequence[TensorExample], device: str, mode: FakeTensorMode) -> list[Tensor]:
    fakes = []
    for example in examples:
        if example.rows:
            # Equal hints share one symbol (DUCK): all row inputs have the same number of rows.
            kinds = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (len(example.shape) - 1)
            real = torch.empty((_TRACED_ROWS, *example.shape[1:]), dtype=example.dtype, device="meta")
            with mode:
                context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
                meta = mode.from_tensor(real, symbolic_context=context)
                fake = torch.empty(tuple(meta.shape), dtype=example.dtype, device=device)
        else:
            with mode:
                fake = torch.empty(example.shape, dtype=example.dtype, device=device)
        fakes.append(fake.requires_grad_(example.requires_grad))
    return fakes


class _OwnOutputs(torch.nn.Module):
    """Makes every output contiguous (it may be sent, and tangents come contiguous) and the owner of its storage.

    AOTAutograd takes an output that aliases an input, or another output, out of the differentiated graph; a copy keeps it in.
    """

    def __init__(self, module: torch.nn.Module, fakes: Sequence[Tensor]) -> None:
        super().__init__()
        self.module = module
        self.copied = _aliasing(module, fakes)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(*inputs)
        return tuple(
            out.clone(memory_format=torch.contiguous_format) if i in self.copied else out.contiguous()
            for i, out in enumerate(outputs)
        )


def _aliasing(module: torch.nn.Module, fakes: Sequence[Tensor]) -> frozenset[int]:
    """Outputs that share storage with an input or an earlier output, found on fake tensors."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        mode = _mode_of(fakes)
        if mode is not None:
            stack.enter_context(mode)
            if (
                mode.shape_env is not None
            ):  # sizes that only data tells (`bincount`) belong to the trace that is kept
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        outputs = module(*fakes)
    owners = {fake.untyped_storage()._cdata for fake in fakes}
    copied = set()
    for i, out in enumerate(outputs):
        storage = out.untyped_storage()._cdata
        if storage in owners:
            copied.add(i)
        owners.add(storage)
    return frozenset(copied)


def _mode_of(fakes: Sequence[Tensor]) -> FakeTensorMode | None:
    return next((getattr(fake, "fake_mode", None) for fake in fakes), None)


def export_stage(
    module: torch.nn.Module,
    examples: Sequence[TensorExample],
    *,
    where: str,
    device: str,
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]] | None,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = default_partition,
) -> StageGraphs:
    """Call inside `stage_tracing`. `where` names the stage in errors; `module(*tensors)` returns a tuple of tensors."""
    fakes = _fakes(examples, device, mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        table = dict(decompositions) if decompositions is not None else None
        joint = aot_export_joint_with_descriptors(
            stack, _OwnOutputs(module, fakes), tuple(fakes), decompositions=table
        ).graph_module
        return _partitioned(joint, where, len(examples), partition)


def eager_interface(
    module: torch.nn.Module, examples: Sequence[TensorExample], *, device: str, mode: FakeTensorMode
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Outputs whose gradient backward needs, and inputs that get one. Call inside `stage_tracing`."""
    fakes = _fakes(examples, device, mode)
    with mode:
        outputs = module(*fakes)
        tangents = tuple(i for i, out in enumerate(outputs) if out.requires_grad)
        wanted = [i for i, example in enumerate(examples) if example.requires_grad]
        if not tangents or not wanted:
            return (), ()
        found = torch.autograd.grad(
            [outputs[i] for i in tangents],
            [fakes[i] for i in wanted],
            [torch.ones_like(outputs[i]) for i in tangents],
            allow_unused=True,
        )
    return tangents, tuple(i for i, gradient in zip(wanted, found) if gradient is not None)


def row_limit(mode: FakeTensorMode, where: str) -> int | None:
    """The most rows that the code traced and compiled in `mode` is right for; None for no limit.

    Code with a symbolic row count is called without guards, so what tracing assumed must hold for any count from 2 on (code
    for one row is the same, as tests show): `UnsupportedModelError` if not.
    """

    def first_failure(rows: int) -> sympy.Expr | None:
        assumed = [g.expr for g in (mode.shape_env.guards if mode.shape_env is not None else ())]
        return next((e for e in assumed if e.subs(dict.fromkeys(e.free_symbols, rows)) == sympy.false), None)

    for rows in _CHECKED_ROWS:
        failed = first_failure(rows)
        if failed is not None:
            raise UnsupportedModelError(
                f"{where}: the traced graph assumes {failed}, which fails for {rows} rows"
            )
    good = _TRACED_ROWS
    for rows in _LARGE_ROWS:
        if first_failure(rows) is not None:
            return good
        good = rows
    return None


def _partitioned(
    joint: fx.GraphModule,
    where: str,
    n_inputs: int,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> StageGraphs:
    descriptors = joint.graph.output_node().meta["desc"]
    for descriptor in descriptors:
        if isinstance(descriptor, InputMutationAOTOutput):
            raise UnsupportedModelError(
                f"{where} writes to its input {descriptor.mutated_input.expr()} in place; stages must not change their inputs"
            )
    n_outputs = sum(isinstance(d, PlainAOTOutput) for d in descriptors)
    placeholders = joint.graph.find_nodes(op="placeholder")
    plain = [n.meta["desc"].idx for n in placeholders if isinstance(n.meta["desc"], PlainAOTInput)]
    order = [d.idx for d in descriptors[:n_outputs] if isinstance(d, PlainAOTOutput)]
    if order != list(range(n_outputs)) or plain != list(range(n_inputs)):
        raise UnsupportedModelError(
            f"{where}: AOTAutograd changed its inputs or outputs (inputs {plain}, outputs {[d.expr() for d in descriptors]})"
        )
    tangent_of = {
        n.name: n.meta["desc"].output.idx for n in placeholders if isinstance(n.meta["desc"], TangentAOTInput)
    }
    if not tangent_of:
        return StageGraphs(joint, None, n_outputs, (), ())
    values = [n.meta["val"] for n in placeholders]
    forward, backward = partition(joint, values, num_fwd_outputs=n_outputs)
    outputs = graph_outputs(forward.graph)
    saved = {node.name: i for i, node in enumerate(outputs[n_outputs:]) if isinstance(node, fx.Node)}
    sources = tuple(
        BackwardInput(True, tangent_of[n.name])
        if n.name in tangent_of
        else BackwardInput(False, saved[n.name])
        for n in backward.graph.find_nodes(op="placeholder")
    )
    gradients = tuple(
        d.grad_of.idx if isinstance(d, GradAOTOutput) and isinstance(d.grad_of, PlainAOTInput) else None
        for d in descriptors[n_outputs:]
    )
    return StageGraphs(forward, backward, n_outputs, sources, gradients)
