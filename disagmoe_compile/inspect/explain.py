"""How a model would be split, found in one process without running a training step: `dm.explain` and
`disagmoe inspect`.

Sizes are those of the example call; bytes a token are what one token costs on the wire where its experts are
on one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn

from disagmoe_compile.capture import CapturedGraph, capture
from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.graph_breaks import one_graph, where_and_why
from disagmoe_compile.inspect.structured import structured_trace
from disagmoe_compile.passes.base import Observer, PassReport
from disagmoe_compile.passes.pipeline import PartitionResult, partition_model
from disagmoe_compile.passes.program import (
    AttentionProgram,
    Dim,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)
from disagmoe_compile.passes.stage_flops import attention_flops, expert_flops
from disagmoe_compile.plan.ir import TensorSpec, Transfer
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StageInfo:
    """`nodes` counts operations of the forward graph; `params` are fully qualified names. FLOPs are of the stage's forward on the
    example call (experts: of all routed pairs), counted by torch's flop counter.
    """

    name: str
    role: str
    layers: tuple[int, ...]
    nodes: int
    params: tuple[str, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    forward_flops: int
    param_bytes: int


@dataclass(frozen=True, slots=True)
class TransferInfo:
    """`several_groups_only`: with one pipeline group the two stages share a worker and nothing is sent."""

    name: str
    kind: str
    direction: str
    src: str
    dst: str
    bytes_per_token: int
    tensors: tuple[str, ...]
    several_groups_only: bool


@dataclass(frozen=True, slots=True)
class ExpertInfo:
    """One MoE region, or one candidate that no rule recognises (`opaque`, with the reason)."""

    layer: int | None
    style: str | None
    num_experts: int | None
    top_k: int | None
    opaque: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class GraphBreak:
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """`str()` is a set of tables, `to_dict()` the JSON document of `disagmoe inspect --json`.

    `batch_coupled` names operations that mix samples: with several micro-batches they compute something else
    than on the whole batch. `passes` are the reports, in order.
    """

    stages: tuple[StageInfo, ...]
    transfers: tuple[TransferInfo, ...]
    experts: tuple[ExpertInfo, ...]
    graph_breaks: tuple[GraphBreak, ...]
    batch_coupled: tuple[str, ...] = ()
    passes: tuple[tuple[str, PassReport], ...] = ()
    fingerprint: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["passes"] = [{"name": name, **asdict(report)} for name, report in self.passes]
        return found

    def __str__(self) -> str:
        from disagmoe_compile.inspect.explain_tables import as_text

        return as_text(self)


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Traces one call of `model` and splits it. Runs the call once in eager; changes neither the model nor
    its gradients.

    A model whose graph breaks has no stages; the first break is listed with its source line and the change that mends it.
    Raises InputError for something that is not a module, and what the passes raise for a model that cannot be split.
    """
    return explain_with((), model, *args, **kwargs)


def explain_with(observers: Sequence[Observer], model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """`explain`, showing the graph to `observers` after every pass."""
    found = trace_call(model, args, kwargs)
    return explain_graph(found, observers)[0] if isinstance(found, CapturedGraph) else no_graph(found)


def trace_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CapturedGraph | GraphBreak | None:
    """The graph of one call, where it breaks, or None where there is nothing to trace. Runs the call once in eager."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"explain() takes a torch.nn.Module and the arguments of one call, got {type(model).__name__}"
        )
    backend = _Capture()
    torch._dynamo.reset()
    try:
        with one_graph():
            torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    except Exception as error:
        found = where_and_why(error)
        if found is None:
            raise
        return GraphBreak(*found)
    if backend.error is not None:
        raise backend.error
    return backend.captured


def explain_graph(
    captured: CapturedGraph, observers: Sequence[Observer] = (), disabled: Sequence[str] = ()
) -> tuple[Explanation, PartitionResult]:
    """Splits a captured graph, without the passes `disabled`, and describes the result; in torch's structured trace as well,
    where one is being written.
    """
    trace = structured_trace(captured)
    shown_to: list[Observer] = [*observers, trace] if trace is not None else [*observers]
    partition = partition_model(captured, observers=shown_to, disabled=disabled)
    explanation = explain_partition(captured, partition)
    if trace is not None:
        trace.document("explanation", explanation.to_dict())
    return explanation, partition


def no_graph(broken: GraphBreak | None) -> Explanation:
    return Explanation((), (), (), () if broken is None else (broken,))


class _Capture:
    """A backend that keeps the first graph it is given and runs everything in eager."""

    def __init__(self) -> None:
        self.captured: CapturedGraph | None = None
        self.error: DisagMoEError | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if self.captured is None and self.error is None:
            try:
                self.captured = capture(gm, example_inputs)
            except DisagMoEError as error:
                self.error = error
        return gm.forward


def explain_partition(captured: CapturedGraph, partition: PartitionResult) -> Explanation:
    """Describes a captured graph that was split."""
    programs, sizes = partition.programs, captured.sizes(captured.example_inputs)
    stages: list[StageInfo] = []
    for b, attention in enumerate(programs.attention):
        stages.append(_attention_stage(attention, sizes))
        if b < len(programs.experts):
            stages.append(_expert_stage(programs.experts[b], attention, sizes))
    return Explanation(
        stages=tuple(stages),
        transfers=_transfers(programs, sizes),
        experts=(*(_expert(e) for e in programs.experts), *_unrecognised(partition)),
        graph_breaks=(),
        batch_coupled=partition.batch_coupled,
        passes=partition.reports,
        fingerprint=partition.fingerprint,
    )


def _attention_stage(program: AttentionProgram, sizes: Sizes) -> StageInfo:
    return StageInfo(
        name=f"A{program.boundary}",
        role="attention",
        layers=program.layers,
        nodes=_operations(program.module),
        params=_parameters(program.inputs),
        inputs=tuple(
            _tensor(_argument_name(i), i.shape, i.dtype, sizes)
            for i in program.tensor_inputs
            if i.kind is not InputKind.PARAMETER
        ),
        outputs=tuple(
            _tensor(name, o.shape, o.dtype, sizes) for name, o in zip(_output_names(program), program.outputs)
        ),
        forward_flops=attention_flops(program, sizes),
        param_bytes=_parameter_bytes(program.inputs, sizes),
    )


def _argument_name(one: StageInput) -> str:
    """`input_ids` of Dynamo's `L['kwargs']['input_ids']`; other names as they are."""
    found = re.search(r"'(\w+)'\]$", one.name) if one.kind is InputKind.INPUT else None
    return found[1] if found else one.name


def _output_names(program: AttentionProgram) -> list[str]:
    """By what they are for: an output may be carried on and be one of the model's at once; the first use
    names it.
    """
    names: dict[int, str] = {}
    if program.dispatch is not None:
        for name in ("tokens", "token_ids", "expert_ids", "weights"):
            names[getattr(program.dispatch, name)] = name
    for i, position in enumerate(program.carried):
        names.setdefault(position, f"carried_{i}")
    for i, position in enumerate(program.loss_numerators):
        names.setdefault(position, f"loss_numerator_{i}")
    for index, position in program.model_outputs.items():
        names.setdefault(position, f"model_output_{index}")
    return [names.get(position, output.name) for position, output in enumerate(program.outputs)]


def _expert_stage(program: ExpertsProgram, before: AttentionProgram, sizes: Sizes) -> StageInfo:
    pairs = _tokens(before, sizes) * program.top_k
    return StageInfo(
        name=f"F{program.boundary}",
        role="ffn",
        layers=program.layers,
        nodes=_operations(program.function),
        params=_parameters(program.param_inputs),
        inputs=(
            _tensor("rows", (pairs, program.in_features), program.token_dtype, sizes),
            _tensor("weights", (pairs,), program.weight_dtype, sizes),
        ),
        outputs=(_tensor("rows", (pairs, program.out_features), program.out_dtype, sizes),),
        forward_flops=expert_flops(program, _tokens(before, sizes)),
        param_bytes=_parameter_bytes(program.param_inputs, sizes),
    )


def _transfers(programs: ModelPrograms, sizes: Sizes) -> tuple[TransferInfo, ...]:
    n = programs.n_boundaries
    if n == 0:
        return ()
    boundaries = [_boundary(a, e, sizes) for a, e in zip(programs.attention, programs.experts)]
    trains = programs.loss is not None
    one = {t.name for t in build_transfers(Topology(1, 1, 1, 1, n), boundaries, training=trains)}
    several = build_transfers(Topology(1, 1, n + 1, n + 1, n), boundaries, training=trains)
    return tuple(_transfer(t, boundaries, t.name not in one) for t in several)


def _transfer(
    transfer: Transfer, boundaries: Sequence[BoundarySizes], several_groups_only: bool
) -> TransferInfo:
    sizes = boundaries[min(transfer.src, transfer.dst) // 2]
    payload = [spec for spec in transfer.payload if spec.name != "header"]
    total = sum(spec.nbytes() for spec in payload)
    return TransferInfo(
        name=transfer.name,
        kind=str(transfer.kind),
        direction=str(transfer.direction),
        src=_stage_name(transfer.src),
        dst=_stage_name(transfer.dst),
        bytes_per_token=total // sizes.tokens,
        tensors=tuple(spec.name for spec in payload),
        several_groups_only=several_groups_only,
    )


def _boundary(attention: AttentionProgram, experts: ExpertsProgram, sizes: Sizes) -> BoundarySizes:
    carried = [attention.outputs[position] for position in attention.carried]
    return BoundarySizes(
        tokens=_tokens(attention, sizes),
        top_k=experts.top_k,
        in_features=experts.in_features,
        out_features=experts.out_features,
        token_dtype=_dtype(experts.token_dtype),
        weight_dtype=_dtype(experts.weight_dtype),
        out_dtype=_dtype(experts.out_dtype),
        num_experts=experts.num_experts,
        carried=tuple(
            TensorSpec(f"carried_{i}", bind(o.shape, sizes), _dtype(o.dtype)) for i, o in enumerate(carried)
        ),
        carried_requires_grad=tuple(o.requires_grad for o in carried),
    )


def _expert(program: ExpertsProgram) -> ExpertInfo:
    layer = program.layers[0] if program.layers else None
    return ExpertInfo(layer, program.style, program.num_experts, program.top_k, False, None)


def _unrecognised(partition: PartitionResult) -> list[ExpertInfo]:
    """What find_regions looked at and had to give up, where it found no region at all to explain it."""
    if partition.programs.experts:
        return []
    reasons = [
        reason for name, report in partition.reports if name == "find_regions" for reason in report.skipped
    ]
    return [ExpertInfo(None, None, None, None, True, reason) for reason in reasons]


def _tokens(program: AttentionProgram, sizes: Sizes) -> int:
    assert program.dispatch is not None, "only the head has no dispatch"
    return bind(program.outputs[program.dispatch.tokens].shape, sizes)[0]


def _operations(module: fx.GraphModule) -> int:
    return sum(node.op not in ("placeholder", "output") for node in module.graph.nodes)


def _parameters(inputs: Sequence[StageInput]) -> tuple[str, ...]:
    return tuple(i.name for i in inputs if i.kind is InputKind.PARAMETER)


def _parameter_bytes(inputs: Sequence[StageInput], sizes: Sizes) -> int:
    kept = [i for i in inputs if i.kind is InputKind.PARAMETER and i.dtype is not None]
    return sum(math.prod(bind(i.shape, sizes)) * i.dtype.itemsize for i in kept if i.dtype is not None)


def _tensor(name: str, shape: tuple[Dim, ...], dtype: torch.dtype | None, sizes: Sizes) -> TensorInfo:
    return TensorInfo(name, bind(shape, sizes), _dtype(dtype))


def _dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _stage_name(index: int) -> str:
    return f"{'F' if index % 2 else 'A'}{index // 2}"
