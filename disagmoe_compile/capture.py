"""What Dynamo hands to the backend, made usable: a graph with a symbolic batch whose placeholders say what
they are.

Dynamo bakes the sizes of the first batch into the graph (`view(x, (8, 16, -1, 16))`); micro-batches could
not run it. So the first call marks dimension 0 of the batch inputs as dynamic and restarts the trace; the
second trace is a template for every batch size. A batch of one sample stays as it is: there is nothing to
split.

Call these functions inside the backend, while Dynamo's tracing context is alive.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import CompileContext

from disagmoe_compile.early_batch import is_marked, mark_samples
from disagmoe_compile.errors import CaptureError, UnsupportedModelError
from disagmoe_compile.passes.buffer_updates import BUFFER_UPDATE_ADVICE
from disagmoe_compile.passes.captured import AutocastState, CapturedGraph, symbol_values
from disagmoe_compile.passes.metadata import describe, expression, output_node, placeholders
from disagmoe_compile.passes.one_row_inputs import index_the_only_row
from disagmoe_compile.passes.program import InputKind, StageInput

__all__ = [
    "AutocastState",
    "CapturedGraph",
    "capture",
    "module_of_source",
    "qualified_name",
    "root_module",
    "symbol_values",
]
_BASE = re.compile(r"^([LG])\['([^']+)'\]")
# `forward` that sets an attribute of its module (`self.aux_loss = ...`) has `__dict__['_modules']` in its sources.
_STATE = r"(?:\._(?:modules|parameters|buffers)|\.__dict__\['_(?:modules|parameters|buffers)'\])\["
_IN_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
_MODULE_STEP = re.compile(_STATE + r"'([^']*)'\]")


def capture(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> CapturedGraph:
    """Describes Dynamo's graph. Restarts the trace once, to make the batch symbolic.

    Raises CaptureError where the model fixes its batch size, or where batch and sequence length cannot be
    told apart.
    """
    nodes = placeholders(graph_module.graph)
    sources = tuple(_source_name(node) for node in nodes)
    kinds = tuple(
        _kind(node, source, example) for node, source, example in zip(nodes, sources, example_inputs)
    )
    batch = _batch_inputs(kinds, example_inputs)
    batch_symbol = None
    if batch and int(example_inputs[batch[0]].shape[0]) > 1:
        in_doubt = _is_also_a_length(kinds, example_inputs, batch)
        if not _is_symbolic_alone(nodes, kinds, batch) and not all(
            is_marked(example_inputs[i]) for i in batch
        ):
            _restart_with_symbolic_batch([example_inputs[i] for i in batch], in_doubt=in_doubt)
        if in_doubt:
            batch = _free(nodes, kinds, batch) or batch  # none is free: the model fixes its batch size
        batch_symbol = _batch_symbol(graph_module, nodes, sources, kinds, batch)
        arguments = [node for node, kind in zip(nodes, kinds) if kind is InputKind.INPUT]
        index_the_only_row(graph_module.graph, arguments)
    names = _qualified_names(graph_module)
    assigned = _assigned_buffers(graph_module, sources)
    inputs = tuple(
        _describe(position, node, kind, source, names, batch_symbol, example)
        for position, (node, kind, source, example) in enumerate(zip(nodes, kinds, sources, example_inputs))
    )
    return CapturedGraph(
        graph_module=graph_module,
        example_inputs=tuple(example_inputs),
        inputs=inputs,
        sources=sources,
        batch_symbol=batch_symbol,
        autocast=_autocast(example_inputs),
        training=torch.is_grad_enabled(),
        assigned_buffers=assigned,
        trace_id=CompileContext.current_trace_id(),
    )


def _assigned_buffers(graph_module: fx.GraphModule, sources: Sequence[str]) -> dict[int, int]:
    """`self.count = self.count + n` and `self.count += n` make an output that Dynamo assigns to the buffer after the call.

    Raises UnsupportedModelError for a buffer that is assigned without having been read.
    """
    translator = _translator()
    if translator is None:
        return {}
    results = [getattr(result, "name", None) for result in output_node(graph_module.graph).args[0]]  # type: ignore[union-attr]
    plain_sources = [_plain(source) for source in sources]
    assigned = {}
    effects = translator.output.side_effects
    for variable in list(effects.id_to_variable.values()):
        if not isinstance(variable, ConstDictVariable) or variable.source is None:
            continue
        owner = _plain(variable.source.name)
        if not owner.endswith("._buffers") or not effects.is_modified(variable):
            continue
        for key, stored in variable.items.items():
            if (
                not stored.is_realized()
            ):  # nobody touched it; looking at it would make it an input of the graph
                continue
            node = stored.proxy.node if isinstance(stored, TensorVariable) else None
            if node is None or node.op == "placeholder":
                continue
            name = key.vt.as_python_constant()
            source = f"{owner}['{name}']"
            if source not in plain_sources:
                raise UnsupportedModelError(
                    f"the model updates its buffer `{name}` at {describe(node)}: it overwrites it; {BUFFER_UPDATE_ADVICE}"
                )
            assigned[results.index(node.name)] = plain_sources.index(source)
    return assigned


def _plain(source: str) -> str:
    """The two ways Dynamo spells a module's state, as one."""
    return _IN_DICT.sub(r".\1", source)


def root_module() -> nn.Module:
    """The user's module that Dynamo is tracing. Raises CaptureError outside a trace, or for a function
    without a module."""
    frame = _root_frame()
    if frame is not None:
        for scope in frame:
            owner = scope.get("self")
            if isinstance(owner, nn.Module):
                return owner
        modules = [v for v in frame[0].values() if isinstance(v, nn.Module)]
        if len(modules) == 1:
            return modules[0]
    raise CaptureError(
        "torch.compile(backend='disagmoe') was given a function, not a module, so there is no model whose "
        "parameters could be "
        "placed; compile the module itself: model = torch.compile(model, backend='disagmoe')"
    )


def module_of_source(source: str) -> nn.Module | None:
    """The module that owns the state named by a placeholder's source, e.g. `L['self']` of
    `L['self']._parameters['w']`."""
    frame = _root_frame()
    prefix = re.split(_STATE, source)[0]
    if frame is None:
        return None
    try:
        found = eval(prefix, {"L": frame[0], "G": frame[1]})
    except (KeyError, AttributeError, TypeError, IndexError, SyntaxError, NameError):
        return None
    return found if isinstance(found, nn.Module) else None


def _root_frame() -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """(locals, globals) of the frame Dynamo traces."""
    translator = _translator()
    return None if translator is None else (translator.f_locals, translator.f_globals)


def _translator() -> Any:
    """Dynamo's translator of the frame that it traces, or None outside a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def _source_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    return source.name if source is not None else str(node.target)


def _kind(node: fx.Node, source: str, example: Any) -> InputKind:
    if not isinstance(example, torch.Tensor):
        return InputKind.SYMBOL
    if isinstance(example, nn.Parameter):
        return InputKind.PARAMETER
    if re.search(_STATE, source):
        return InputKind.BUFFER
    base = _BASE.match(source)
    owner = module_of_source(base[0]) if base is not None else None
    return InputKind.BUFFER if owner is not None else InputKind.INPUT


def _batch_inputs(kinds: Sequence[InputKind], example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the inputs whose dimension 0 is the batch.

    The batch size is the commonest first dimension of the inputs of two dimensions or more (of all inputs,
    if there are none); the first in argument order wins a tie.
    """
    tensors = {
        i: tuple(x.shape)
        for i, (k, x) in enumerate(zip(kinds, example_inputs))
        if k is InputKind.INPUT and x.dim() > 0
    }
    wide = {i: s for i, s in tensors.items() if len(s) > 1} or tensors
    if not wide:
        return ()
    # An input of one row beside larger ones is shared by all samples (position ids, a broadcast mask), unless the larger ones
    # are masks of positions [S, S] alone: then it is the only sample.
    counts = Counter(int(s[0]) for i, s in wide.items() if not _is_mask_of_positions(i, wide, example_inputs))
    several = {size: n for size, n in counts.items() if size > 1}
    size = max(several or counts, key=lambda s: counts[s])
    lengths = {int(d) for s in wide.values() for d in s[1:]}
    return tuple(
        i
        for i, s in tensors.items()
        if s[0] == size and (len(s) > 1 or wide is tensors or size not in lengths)
    )


def _is_mask_of_positions(
    position: int, shapes: Mapping[int, tuple[int, ...]], example_inputs: Sequence[Any]
) -> bool:
    """Whether an input is square and no ids, and as large as an input of one row is long."""
    shape = shapes[position]
    is_square = len(shape) == 2 and shape[0] == shape[1]
    is_ids = example_inputs[position].dtype in (torch.int64, torch.int32)
    return is_square and not is_ids and any(s[0] == 1 and shape[0] in s[1:] for s in shapes.values())


def _is_symbolic_alone(nodes: Sequence[fx.Node], kinds: Sequence[InputKind], batch: Sequence[int]) -> bool:
    """Whether every batch dimension has a symbol, and no other dimension of an input has the same.

    Dynamo gives equal sizes that vary one symbol (`dynamic=True`, batch size equal to sequence length); marked dimensions get
    their own.
    """
    return _free(nodes, kinds, batch) == tuple(batch)


def _is_also_a_length(
    kinds: Sequence[InputKind], example_inputs: Sequence[Any], batch: Sequence[int]
) -> bool:
    """Whether the batch is as large as another dimension of an input: a mask [S, S] then looks like one of [B, S]."""
    size = int(example_inputs[batch[0]].shape[0])
    return any(
        size == int(length)
        for kind, x in zip(kinds, example_inputs)
        if kind is InputKind.INPUT
        for length in x.shape[1:]
    )


def _free(nodes: Sequence[fx.Node], kinds: Sequence[InputKind], batch: Sequence[int]) -> tuple[int, ...]:
    """Those whose dimension 0 the trace left free: one that met a length in an operation has become that length."""
    lengths = [
        expression(size)
        for node, kind in zip(nodes, kinds)
        if kind is InputKind.INPUT
        for size in node.meta["example_value"].shape[1:]
    ]
    sizes = {i: expression(nodes[i].meta["example_value"].shape[0]) for i in batch}
    return tuple(i for i, size in sizes.items() if not isinstance(size, int) and size not in lengths)


def _restart_with_symbolic_batch(tensors: Sequence[torch.Tensor], *, in_doubt: bool) -> None:
    for tensor in tensors:
        mark_samples(tensor, in_doubt=in_doubt)
    raise TensorifyScalarRestartAnalysis(restart_reason="disagmoe: the batch dimension must be symbolic")


def _batch_symbol(
    graph_module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    sources: Sequence[str],
    kinds: Sequence[InputKind],
    batch: Sequence[int],
) -> sympy.Symbol:
    first = nodes[batch[0]]
    sizes = [nodes[index].meta["example_value"].shape[0] for index in batch]
    fixed_one = next((index for index, s in zip(batch, sizes) if isinstance(expression(s), int)), None)
    if fixed_one is not None:
        first = nodes[fixed_one]
    for index in batch[1:] if fixed_one is None else ():
        # Inputs whose batch sizes never meet in an operation have symbols of their own. Comparing the two adds the
        # guard that they are equal, and makes them one symbol; it fixes neither.
        _ = bool(nodes[index].meta["example_value"].shape[0] == first.meta["example_value"].shape[0])
    size = expression(first.meta["example_value"].shape[0])
    if not isinstance(size, sympy.Symbol):
        where = _where_specialised(first)
        raise CaptureError(
            f"the model fixes its batch size to {size} (`{_source_name(first)}`), so it cannot be split into "
            f"micro-batches{where}; "
            "take sizes from tensors (`x.shape[0]`) instead of comparing or converting them to numbers"
        )
    for node, source, kind in zip(nodes, sources, kinds):
        if kind is InputKind.INPUT and size in map(expression, node.meta["example_value"].shape[1:]):
            raise CaptureError(
                f"the model needs its batch size to equal another dimension of `{source}`, so it cannot be split into "
                f"micro-batches{_where_specialised(first)}"
            )
    return size


def _where_specialised(node: fx.Node) -> str:
    """` (file:line)` of the user's code that fixed a size, as far as Dynamo recorded it."""
    env = getattr(node.meta["example_value"].fake_mode, "shape_env", None)
    stacks = list(getattr(env, "specialization_stacks", {}).values())
    for stack in reversed(stacks):
        if stack:
            return f", at {stack[-1].filename}:{stack[-1].lineno}"
    return ""


def _qualified_names(graph_module: fx.GraphModule) -> Mapping[str, str]:
    return graph_module.meta.get("dynamo_flat_name_to_original_fqn", {})


def qualified_name(source: str) -> str:
    """`model.layers.0.weight` of
    `L['self']._modules['model']._modules['layers']._modules['0']._parameters['weight']`."""
    steps = _MODULE_STEP.findall(source)
    if steps:
        return ".".join(steps)
    return _BASE.sub("", source).lstrip(".") or source


def _describe(
    position: int,
    node: fx.Node,
    kind: InputKind,
    source: str,
    names: Mapping[str, str],
    batch_symbol: sympy.Symbol | None,
    example: Any,
) -> StageInput:
    value = node.meta["example_value"]
    is_state = kind in (InputKind.PARAMETER, InputKind.BUFFER)
    name = qualified_name(source) if is_state else source
    if not isinstance(value, torch.Tensor):
        size = expression(value) if isinstance(value, int | torch.SymInt) else value
        return StageInput(kind, name, position, (size,), None)
    shape = tuple(expression(size) for size in value.shape)
    per_sample = (
        kind is InputKind.INPUT and bool(shape) and batch_symbol is not None and shape[0] == batch_symbol
    )
    requires_grad = isinstance(example, torch.Tensor) and example.requires_grad
    return StageInput(kind, name, position, shape, value.dtype, requires_grad, per_sample)


def _autocast(example_inputs: Sequence[Any]) -> AutocastState:
    device_type = next((x.device.type for x in example_inputs if isinstance(x, torch.Tensor)), "cpu")
    return AutocastState(
        device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    )
