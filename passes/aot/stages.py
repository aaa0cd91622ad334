"""Programs to compiled stages: the entry points of this package."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot.batched import BatchedExperts, PaddedStage, check_batched, outer_position
from disagmoe_compile.passes.aot.cache import (
    PROCESS_CACHE,
    StageCache,
    attention_key,
    autocast_state,
    experts_key,
)
from disagmoe_compile.passes.aot.compiled import AotStage, BackwardGraph, EagerStage, RowsStage, ZeroGradient
from disagmoe_compile.passes.aot.compilers import GraphCompiler, graph_compiler
from disagmoe_compile.passes.aot.experts import GroupedExperts, check_row_independence
from disagmoe_compile.passes.aot.joint import (
    BackwardInput,
    StageGraphs,
    TensorExample,
    eager_interface,
    export_stage,
    fake_mode_for_stage,
    row_limit,
    stage_tracing,
)
from disagmoe_compile.passes.aot.split import split_backward
from disagmoe_compile.passes.program import AttentionProgram, ExpertsProgram, InputKind, bind
from disagmoe_compile.runtime.stages import CompiledStage

# Inputs of an experts stage before its parameters: rows, weights, offsets, expert of each row.
EXPERT_PARAMS_AT = 4


class _FixedSizes(torch.nn.Module):
    """A program's module with its size inputs filled in."""

    def __init__(self, module: torch.nn.Module, sizes: Mapping[int, int], n_inputs: int) -> None:
        super().__init__()
        self.module = module
        self.sizes = dict(sizes)
        self.n_inputs = n_inputs

    def forward(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        return self.module(*(self.sizes[i] if i in self.sizes else next(rest) for i in range(self.n_inputs)))


def compile_attention(
    program: AttentionProgram,
    sizes: Mapping[sympy.Symbol, int],
    *,
    compiler: str,
    training: bool,
    device: str = "cpu",
    split_weight_gradient: bool = True,
    cache: StageCache = PROCESS_CACHE,
) -> CompiledStage:
    """The stage for one micro-batch size; `sizes` become constants. Its inputs are `program.tensor_inputs`, contiguous.

    The autocast state that is active now is traced in. Without `split_weight_gradient` the backward is one graph: less to
    compile, more to fuse. Errors: `UnsupportedModelError` where the stage changes its inputs, `InputError` for the compiler.
    """
    options = {"compiler": compiler, "training": training, "device": device}
    key = attention_key(program, sizes, **options, split_weight_gradient=split_weight_gradient)  # type: ignore[arg-type]

    def build() -> CompiledStage:
        fixed = {
            i: bind(item.shape, sizes)[0]
            for i, item in enumerate(program.inputs)
            if item.kind is InputKind.SYMBOL
        }
        examples = [
            TensorExample(
                bind(item.shape, sizes), _dtype(item.name, item.dtype), training and item.requires_grad
            )
            for item in program.tensor_inputs
        ]
        parameters = frozenset(
            i for i, t in enumerate(program.tensor_inputs) if t.kind is InputKind.PARAMETER
        )
        return _compile(
            _FixedSizes(program.module, fixed, len(program.inputs)),
            examples,
            parameters,
            where=f"attention stage {program.stage}",
            autocast=True,
            split_weight_gradient=split_weight_gradient,
            compiler=compiler,
            device=device,
        )[0]

    return cache.get(key, build)


def compile_experts(
    program: ExpertsProgram,
    n_local_experts: int,
    *,
    compiler: str,
    training: bool,
    device: str = "cpu",
    split_weight_gradient: bool = True,
    lowering: str = "auto",
    cache: StageCache = PROCESS_CACHE,
) -> CompiledStage:
    """The experts of one rank, for any number of rows; inputs `(rows_PD, weight_P, offsets_E, expert_P, *params)`.

    `lowering`: "grouped_mm" multiplies all experts' rows in one operator, "vmap" pads every expert to the same number of rows and
    batches whatever operators it has, "auto" takes the second only where the first has no form. The loop over experts is
    `reference_experts`. Traced with autocast off. Errors: `UnsupportedModelError` naming the operator that has no form.
    """
    options = {"compiler": compiler, "training": training, "device": device, "lowering": lowering}
    key = experts_key(program, n_local_experts, **options, split_weight_gradient=split_weight_gradient)  # type: ignore[arg-type]

    def build() -> CompiledStage:
        params = [
            TensorExample(
                (n_local_experts, *bind(p.shape[1:], {})),
                _dtype(p.name, p.dtype),
                training and p.requires_grad,
            )
            for p in program.params
        ]
        examples = [
            TensorExample((0, program.in_features), program.token_dtype, training, rows=True),
            TensorExample((0,), program.weight_dtype, training, rows=True),
            TensorExample((n_local_experts,), torch.int32, False),
            TensorExample((0,), torch.int64, False, rows=True),
            *params,
        ]
        batched = _choose_lowering(program, lowering) == "vmap"
        module: torch.nn.Module = GroupedExperts(program.function, program.boundary)
        traced = examples
        if batched:
            module = BatchedExperts(program.function)
            rows = [
                replace(example, shape=(0, n_local_experts, *example.shape[1:])) for example in examples[:2]
            ]
            traced = [*rows, *params]
        compiled, gradients, limit = _compile(
            module,
            traced,
            frozenset(range(len(traced) - len(params), len(traced))),
            where=f"experts of boundary {program.boundary}",
            autocast=False,
            split_weight_gradient=split_weight_gradient,
            compiler=compiler,
            device=device,
        )
        stage: CompiledStage = compiled
        if batched:
            stage, gradients = PaddedStage(compiled), tuple(map(outer_position, gradients))
        zeros = tuple(ZeroGradient(i, examples[i].shape, examples[i].dtype) for i in gradients)
        return RowsStage(stage, program.out_features, program.out_dtype, zeros, limit)

    return cache.get(key, build)


def _choose_lowering(program: ExpertsProgram, lowering: str) -> str:
    """ "grouped_mm" or "vmap", after its check. Raises what the check raises; for "auto" both reasons in one."""
    if lowering == "vmap":
        check_batched(program)
        return "vmap"
    try:
        check_row_independence(program)
        return "grouped_mm"
    except UnsupportedModelError as grouped:
        if lowering == "grouped_mm":
            raise
        try:
            check_batched(program)
        except UnsupportedModelError as batched:
            raise UnsupportedModelError(f"{grouped}. Not batched with vmap either: {batched}") from batched
    return "vmap"


def _dtype(name: str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        raise ValueError(f"tensor input {name} has no dtype")
    return dtype


def _compile(
    module: torch.nn.Module,
    examples: Sequence[TensorExample],
    parameters: frozenset[int],
    *,
    where: str,
    autocast: bool,
    split_weight_gradient: bool,
    compiler: str,
    device: str,
) -> tuple[AotStage | EagerStage, tuple[int, ...], int | None]:
    """The stage, the inputs that get a gradient, and the most rows it takes."""
    training = any(example.requires_grad for example in examples)
    mode = fake_mode_for_stage()
    if compiler == "eager":
        state = (
            autocast_state(device) if autocast else tuple((k, False, d) for k, _, d in autocast_state(device))
        )
        with stage_tracing(mode, training=training, autocast=autocast):
            tangents, gradients = eager_interface(module, examples, device=device, mode=mode)
        needs = tuple(i in gradients for i in range(len(examples)))
        return EagerStage(module, needs, tangents, gradients, parameters, state), gradients, None
    graphs_to_code = graph_compiler(compiler)
    with stage_tracing(mode, training=training, autocast=autocast):
        graphs = export_stage(
            module,
            examples,
            where=where,
            device=device,
            mode=mode,
            decompositions=graphs_to_code.decompositions(),
            partition=graphs_to_code.partition,
        )
        stage = _to_code(graphs, parameters, graphs_to_code, split_weight_gradient)
        limit = row_limit(mode, where)  # after the compiler, which may assume more
    return stage, graphs.gradient_inputs, limit


def _to_code(
    graphs: StageGraphs, parameters: frozenset[int], compiler: GraphCompiler, split_weight_gradient: bool
) -> AotStage:
    inference = graphs.backward is None
    forward = compiler.compile(graphs.forward, backward=False, inference=inference)
    if graphs.backward is None:
        return AotStage(graphs.n_outputs, forward, (), (), parameters)
    split = split_backward(graphs.backward, graphs.gradients, parameters) if split_weight_gradient else None
    if split is None:
        run = compiler.compile(graphs.backward, backward=True, inference=False)
        whole = BackwardGraph(run, graphs.backward_inputs, graphs.gradients)
        return AotStage(
            graphs.n_outputs, forward, graphs.tangents, graphs.gradient_inputs, parameters, whole=whole
        )
    first = BackwardGraph(
        compiler.compile(split.input_graph, backward=True, inference=False),
        _at(graphs.backward_inputs, split.input_sources),
        split.input_gradients,
    )
    second = BackwardGraph(
        compiler.compile(split.weight_graph, backward=True, inference=False),
        _at(graphs.backward_inputs, split.weight_sources),
        split.weight_gradients,
    )
    return AotStage(
        graphs.n_outputs,
        forward,
        graphs.tangents,
        graphs.gradient_inputs,
        parameters,
        first=first,
        second=second,
    )


def _at(sources: Sequence[BackwardInput], positions: Collection[int]) -> tuple[BackwardInput, ...]:
    return tuple(sources[i] for i in positions)
