"""From the transformed graph to what the runtime executes: one program per stage, its interface by position
(`program.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.aliasing import remove_dead
from disagmoe_compile.passes.buffer_op import add_to_buffer
from disagmoe_compile.passes.experts_op import experts
from disagmoe_compile.passes.linearize_loss import DENOMINATORS, LOSS, LossInfo
from disagmoe_compile.passes.metadata import (
    free_symbols,
    is_call,
    output_node,
    placeholders,
    shape,
    source_of,
    value,
)
from disagmoe_compile.passes.partition import STAGE, AttentionStage, ExpertsStage
from disagmoe_compile.passes.program import (
    AttentionProgram,
    BufferUpdate,
    Dim,
    Dispatch,
    ExpertParam,
    ExpertsProgram,
    InputKind,
    LossProgram,
    ModelOutput,
    ModelPrograms,
    StageInput,
    StageOutput,
)


def model_programs(graph_module: fx.GraphModule, batch_symbol: sympy.Symbol | None) -> ModelPrograms:
    """Programs of a graph that went through all passes."""
    stages = [node for node in graph_module.graph.nodes if STAGE in node.meta]
    attention = [_attention(graph_module, n) for n in stages if isinstance(n.meta[STAGE], AttentionStage)]
    expert_stages = [_experts(graph_module, n) for n in stages if isinstance(n.meta[STAGE], ExpertsStage)]
    return ModelPrograms(
        attention=tuple(attention),
        experts=tuple(expert_stages),
        loss=_loss(graph_module),
        outputs=_model_outputs(graph_module, attention, batch_symbol),
        batch_symbol=batch_symbol,
        tied_head=_shares_parameter(attention[0], attention[-1]),
        buffer_updates=_buffer_updates(graph_module.graph),
    )


def without_outputs(program: AttentionProgram, but: Collection[int] = ()) -> AttentionProgram:
    """The same stage without the model's outputs (other than those of the indices `but`), for steps that do not need them.
    Inputs nobody reads go too."""
    output = output_node(program.module.graph)
    dispatch = 0 if program.dispatch is None else 4
    wanted = {index: position for index, position in program.model_outputs.items() if index in but}
    kept = [
        *range(dispatch + len(program.carried)),
        *wanted.values(),
        *program.buffer_deltas,
        *program.loss_numerators,
    ]
    n_before_loss = len(kept) - len(program.loss_numerators)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(program.module.graph, copies)
    graph.output(tuple(results[position] for position in kept))
    remove_dead(graph)
    inputs = []
    for node, stage_input in zip(placeholders(graph), program.inputs):
        if node.users:
            inputs.append(stage_input)
        else:
            graph.erase_node(node)
    assert len(output.args[0]) == len(program.outputs), "one StageOutput per output"
    return replace(
        program,
        module=fx.GraphModule(program.module, graph, class_name="AttentionStage"),
        inputs=tuple(inputs),
        outputs=tuple(program.outputs[position] for position in kept),
        model_outputs={index: kept.index(position) for index, position in wanted.items()},
        loss_numerators=tuple(range(n_before_loss, len(kept))),
        buffer_deltas={kept.index(position): delta for position, delta in program.buffer_deltas.items()},
    )


def _attention(graph_module: fx.GraphModule, call: fx.Node) -> AttentionProgram:
    stage: AttentionStage = call.meta[STAGE]
    module = graph_module.get_submodule(str(call.target))
    assert isinstance(module, fx.GraphModule), "stages are graph modules"
    results = output_node(module.graph).args[0]
    n_kept = stage.n_dispatch + stage.n_carried
    n_outputs = n_kept + len(stage.model_outputs)
    n_with_deltas = n_outputs + len(stage.buffer_deltas)
    return AttentionProgram(
        boundary=stage.boundary,
        module=module,
        inputs=tuple(_stage_input(call, argument) for argument in call.args),
        outputs=tuple(_stage_output(node, value(node)) for node in results),
        dispatch=Dispatch(0, 1, 2, 3) if stage.n_dispatch else None,
        carried=tuple(range(stage.n_dispatch, n_kept)),
        model_outputs={index: n_kept + offset for offset, index in enumerate(stage.model_outputs)},
        loss_numerators=tuple(range(n_with_deltas, len(results))),
        layers=stage.layers,
        uses_rng=stage.uses_rng,
        buffer_deltas=dict(zip(range(n_outputs, n_with_deltas), stage.buffer_deltas)),
    )


def _stage_input(call: fx.Node, argument: fx.Node) -> StageInput:
    source = source_of(argument)
    if source is not None:
        return source
    producer = argument.args[0]
    kind, position = InputKind.CARRIED, argument.args[1]
    if is_call(producer, "m2n_recv"):
        kind, position = InputKind.COMBINED, 0
    else:
        assert isinstance(producer, fx.Node), "values between stages are items of a call"
        position -= producer.meta[STAGE].n_dispatch
    tensor = value(argument)
    name = "combined" if kind is InputKind.COMBINED else f"carried_{position}"
    return StageInput(kind, name, position, shape(argument), tensor.dtype, tensor.requires_grad)


def _stage_output(node: fx.Node, tensor: torch.Tensor) -> StageOutput:
    return StageOutput(node.name, shape(node), tensor.dtype, tensor.requires_grad)


def _experts(graph_module: fx.GraphModule, call: fx.Node) -> ExpertsProgram:
    stage: ExpertsStage = call.meta[STAGE]
    module = graph_module.get_submodule(str(call.target))
    assert isinstance(module, fx.GraphModule), "stages are graph modules"
    canonical = next(node for node in module.graph.nodes if node.target is experts)
    function = module.get_submodule(str(canonical.kwargs["function"].target))  # type: ignore[union-attr]
    assert isinstance(function, fx.GraphModule), "expert functions are graph modules"
    tokens, _, _, weights = call.args[:4]
    sources = dict(zip(placeholders(module.graph)[4:], map(source_of, call.args[4:]), strict=True))  # type: ignore[arg-type]
    return ExpertsProgram(
        boundary=stage.info.boundary,
        function=function,
        params=tuple(_expert_param(param, sources) for param in canonical.args[4:]),  # type: ignore[arg-type]
        num_experts=stage.info.num_experts,
        top_k=stage.info.top_k,
        in_features=int(value(tokens).shape[-1]),  # type: ignore[arg-type]
        out_features=int(value(call).shape[-1]),
        token_dtype=value(tokens).dtype,  # type: ignore[arg-type]
        weight_dtype=value(weights).dtype,  # type: ignore[arg-type]
        out_dtype=value(call).dtype,
        style=stage.info.style,
        layers=stage.layers,
    )


def _expert_param(param: fx.Node, sources: Mapping[fx.Node, StageInput | None]) -> ExpertParam:
    read = [param] if param.op == "placeholder" else param.all_input_nodes
    inputs = tuple(source for node in read if (source := sources[node]) is not None)
    return ExpertParam(inputs, shape(param))


def _loss(graph_module: fx.GraphModule) -> LossProgram | None:
    info: LossInfo | None = graph_module.meta[LOSS]
    if info is None:
        return None
    call = next(node for node in graph_module.graph.nodes if node.name == DENOMINATORS)
    module = graph_module.get_submodule(DENOMINATORS)
    assert isinstance(module, fx.GraphModule), "denominators are a graph module"
    inputs = [source_of(argument) for argument in call.args]
    return LossProgram(
        info.output_index, info.dtype, info.coefficients, module, tuple(i for i in inputs if i is not None)
    )


def _model_outputs(
    graph_module: fx.GraphModule, attention: Sequence[AttentionProgram], batch_symbol: sympy.Symbol | None
) -> tuple[ModelOutput, ...]:
    makers = {index: program for program in attention for index in program.model_outputs}
    info: LossInfo | None = graph_module.meta[LOSS]
    outputs = []
    for index, result in enumerate(output_node(graph_module.graph).args[0]):  # type: ignore[arg-type]
        if not isinstance(result, fx.Node):
            outputs.append(ModelOutput(index, (), None, False, None, False, None, constant=result))
            continue
        dims, tensor = shape(result), value(result)
        stage, batch_dim, is_mixed = None, None, False
        if info is not None and index == info.output_index:
            stage = attention[-1].stage
        elif result.target is not add_to_buffer:
            stage = makers[index].stage
            batch_dim = _batch_dim(dims, batch_symbol)
            is_mixed = batch_dim is None and _reads_samples(makers[index], index, batch_symbol)
        outputs.append(
            ModelOutput(index, dims, tensor.dtype, tensor.requires_grad, batch_dim, is_mixed, stage)
        )
    return tuple(outputs)


def _batch_dim(dims: Sequence[Dim], batch_symbol: sympy.Symbol | None) -> int | None:
    """The one dimension that grows with the batch, if it has a whole number of rows for each sample."""
    if batch_symbol is None:
        return None
    growing = [i for i, dim in enumerate(dims) if batch_symbol in free_symbols((dim,))]
    if len(growing) != 1 or batch_symbol in free_symbols((sympy.cancel(dims[growing[0]] / batch_symbol),)):
        return None
    return growing[0]


def _reads_samples(program: AttentionProgram, index: int, batch_symbol: sympy.Symbol | None) -> bool:
    """Whether an output of a stage is made of samples: of an input that has them, or of what other stages made of these."""
    if batch_symbol is None:
        return False  # one sample is the whole batch
    graph = fx.Graph()
    results = graph.graph_copy(program.module.graph, {})
    graph.output((results[program.model_outputs[index]],))
    remove_dead(graph)
    read = [one for node, one in zip(placeholders(graph), program.inputs) if node.users]
    computed = (InputKind.COMBINED, InputKind.CARRIED)
    return any(one.kind in computed or batch_symbol in free_symbols(one.shape) for one in read)


def _buffer_updates(graph: fx.Graph) -> tuple[BufferUpdate, ...]:
    results = output_node(graph).args[0]
    updates = []
    for node in graph.nodes:
        if node.target is add_to_buffer:
            buffer = source_of(node.args[0])
            assert buffer is not None, "a buffer is an input of the graph"
            output = results.index(node) if node in results else None
            updates.append(BufferUpdate(buffer, node.kwargs["in_place"], output))
    return tuple(updates)


def _shares_parameter(first: AttentionProgram, last: AttentionProgram) -> bool:
    def names(program: AttentionProgram) -> set[str]:
        return {i.name for i in program.inputs if i.kind is InputKind.PARAMETER}

    return first is not last and bool(names(first) & names(last))
