"""Updates of buffers that only add something become `add_to_buffer` behind everything else (`buffer_op.py`).

    counts.add_(n)   counts += n   counts.copy_(counts + n)   self.counts = self.counts + n   counts.index_add_(0, ids, ones)

Each micro-batch of each rank sees some of the samples, so the graph's own write would leave a different buffer on every rank.
Where the delta is a sum over samples (`additive.py`), or the same for every batch, the deltas of all of them make up the update
of the whole batch. Whoever reads the buffer before its update sees the old value, as in the model. Refused, at its line: what is
no such sum (moving averages, running statistics, overwriting), an update of a part of a buffer, and reading a buffer after it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.additive import Additive, NotAdditive
from disagmoe_compile.passes.aliasing import remove_dead, storage_roots, written
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.buffer_op import add_to_buffer
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import (
    argument,
    describe,
    emit,
    is_call,
    is_tensor,
    output_node,
    placeholders,
    shape,
    source_of,
    target_name,
    value,
)
from disagmoe_compile.passes.program import InputKind

ASSIGNED = "disagmoe_assigned_buffers"  # graph module meta key: output index -> position of the buffer it is assigned to
BUFFER_UPDATE_ADVICE = (
    "several ranks run updates that add sums over samples (counts) under no_grad, and no others: return what it needs for each "
    'sample (first dimension the batch), pass options={"gather_outputs": True}, and update the buffer with that outside the '
    "model; or run one process"
)


@dataclass(frozen=True, slots=True)
class BufferUpdates:
    name: str = "buffer_updates"
    requires: frozenset[Capability] = frozenset({Capability.CANONICAL_EXPERTS, Capability.SIZES})
    provides: frozenset[Capability] = frozenset({Capability.BUFFER_UPDATES})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        assigned: Mapping[int, int] = graph_module.meta.get(ASSIGNED, {})
        outputs_of = {position: index for index, position in assigned.items()}
        additive = Additive.of(graph, graph_module.meta.get("disagmoe_batch_symbol"))
        roots = storage_roots(graph)
        _reject_running_statistics(graph, roots)
        found = [
            update
            for position, buffer in enumerate(placeholders(graph))
            if _is_buffer(buffer) and (update := _update(graph, roots, buffer, outputs_of.get(position)))
        ]
        written_once = [(update, _once(update, additive)) for update in found]
        for update, once in written_once:
            _rewrite(graph, update, once)
        if found:
            remove_dead(graph)
        notes = tuple(f"{_name(update.buffer)}: {len(update.deltas)} deltas" for update in found)
        return PassReport(matched=len(found), inserted=len(found), notes=notes)


@dataclass(frozen=True, slots=True)
class _Delta:
    """`writer` adds `value`, a node or a number, `factor` times to the buffer."""

    writer: fx.Node
    value: object
    factor: object = 1
    scattered: bool = False  # `writer` is `buffer.index_add_(...)`: what it would make of zeros


@dataclass(frozen=True, slots=True)
class _Update:
    """All updates of one buffer. `steps`: nodes that are nothing but the new value on its way, in graph order."""

    buffer: fx.Node
    deltas: tuple[_Delta, ...]
    steps: tuple[fx.Node, ...]
    in_place: bool


class _Refused(Exception):
    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


# ---- what a buffer's updates add


def _update(
    graph: fx.Graph, roots: Mapping[fx.Node, fx.Node], buffer: fx.Node, output: int | None
) -> _Update | None:
    """None for a buffer that is only read."""
    writes = [node for node in graph.nodes if (t := written(node)) is not None and roots[t] is buffer]
    results = output_node(graph).args[0]
    new = None if output is None else results[output]  # type: ignore[index]
    if not writes and (new is None or new is buffer):
        return None
    try:
        order = {node: index for index, node in enumerate(graph.nodes)}
        update = _in_place(writes, buffer, order) if writes else _out_of_place(new, buffer)  # type: ignore[arg-type]
        _check_readers(graph, roots, update, order)
        return update
    except _Refused as refused:
        raise UnsupportedModelError(_refusal(buffer, refused.node, str(refused))) from None


def _in_place(writes: Sequence[fx.Node], buffer: fx.Node, order: Mapping[fx.Node, int]) -> _Update:
    whole: set[fx.Node] = {buffer}
    deltas: list[_Delta] = []
    steps: list[fx.Node] = []
    for node in writes:
        target = written(node)
        assert target is not None, "a write has a target"
        chain = _names(target, whole)
        if chain is None:
            raise _Refused(node, "it updates a part of the buffer")
        whole.update(chain)
        added, sums = _added(node, whole)
        if sums and added and order[added[0].writer] < max((order[d.writer] for d in deltas), default=-1):
            raise _Refused(node, "it overwrites an update that came before it")
        deltas += added
        steps += [*chain, *sums, node]
        whole.add(node)
    return _Update(
        buffer, tuple(deltas), tuple(dict.fromkeys(s for s in steps if s is not buffer)), in_place=True
    )


def _out_of_place(new: fx.Node, buffer: fx.Node) -> _Update:
    added, sums = _sum_onto(new, {buffer}, new)
    if value(new).dtype != value(buffer).dtype or shape(new) != shape(buffer):
        raise _Refused(new, "it gives the buffer another shape or dtype")
    return _Update(buffer, tuple(added), tuple(sums), in_place=False)


def _names(target: fx.Node, whole: set[fx.Node]) -> list[fx.Node] | None:
    """The nodes from a name of the whole buffer to `target`, if these are names too (`.data`, `detach()`)."""
    chain: list[fx.Node] = []
    while target not in whole:
        if not is_call(target, "detach", "_get_data_attr", "alias") or not target.all_input_nodes:
            return None
        chain.insert(0, target)
        target = target.all_input_nodes[0]
    return chain


def _added(node: fx.Node, whole: set[fx.Node]) -> tuple[list[_Delta], list[fx.Node]]:
    """(what the write adds, the sums of the old value that it copies in)."""
    if node.target in (operator.iadd, operator.isub) or is_call(node, "add_", "sub_"):
        sign = -1 if node.target is operator.isub or is_call(node, "sub_") else 1
        alpha = node.kwargs.get("alpha", 1)
        if isinstance(alpha, fx.Node):
            raise _Refused(node, "its alpha is no number")
        return [_Delta(node, argument(node, 1, "other"), sign * alpha)], []  # type: ignore[operator]
    if is_call(node, "index_add_", "scatter_add_"):
        return [_Delta(node, None, scattered=True)], []
    if is_call(node, "copy_"):
        source = node.args[1]
        if not isinstance(source, fx.Node):
            raise _Refused(node, "it overwrites the buffer")
        return _sum_onto(source, whole, node)
    raise _Refused(node, "it does not add to what the buffer holds")


def _sum_onto(new: fx.Node, whole: set[fx.Node], write: fx.Node) -> tuple[list[_Delta], list[fx.Node]]:
    """Takes `old + a + b` apart."""
    deltas: list[_Delta] = []
    sums: list[fx.Node] = []
    while new not in whole:
        chain = _names(new, whole)
        if chain is not None:
            sums = [*chain, *sums]
            break
        if not is_call(new, "add", "sub") or isinstance(new.kwargs.get("alpha", 1), fx.Node):
            raise _Refused(write, "its new value is not the old one plus something")
        left, right = new.args[0], argument(new, 1, "other")
        sign = -1 if is_call(new, "sub") else 1
        factor = sign * new.kwargs.get("alpha", 1)  # type: ignore[operator]
        if is_call(new, "add") and factor == 1 and _leads_to(right, whole):
            left, right = right, left
        if not _leads_to(left, whole) or _leads_to(right, whole):
            raise _Refused(write, "its new value is not the old one plus something")
        deltas.insert(0, _Delta(new, right, factor))
        sums.insert(0, new)
        new = left  # type: ignore[assignment]
    return deltas, sums


def _leads_to(node: object, whole: set[fx.Node]) -> bool:
    """Whether `node` is the old value, or sums onto it."""
    while isinstance(node, fx.Node):
        if node in whole or _names(node, whole) is not None:
            return True
        if not is_call(node, "add", "sub"):
            return False
        right = argument(node, 1, "other")
        if is_call(node, "add") and _leads_to(right, whole):
            return True
        node = node.args[0]
    return False


def _check_readers(
    graph: fx.Graph, roots: Mapping[fx.Node, fx.Node], update: _Update, order: Mapping[fx.Node, int]
) -> None:
    """Everything else must read the buffer before its first update: it is shown the old value."""
    steps = {*update.steps}
    new = steps if not update.in_place else {n for n in graph.nodes if roots[n] is update.buffer} | steps
    first = min(order[node] for node in steps if roots[node] is not update.buffer or written(node))
    for name in new:
        for reader in name.users:
            if reader.op != "output" and reader not in steps and order[reader] > first:
                raise _Refused(reader, "it reads the buffer after the model updated it in the same call")
    twins = [
        node
        for node in placeholders(graph)
        if node is not update.buffer and is_tensor(node) and _storage(node) == _storage(update.buffer)
    ]
    if twins:
        raise _Refused(update.deltas[0].writer, f"the buffer shares its storage with `{_name(twins[0])}`")
    names = {update.buffer, *steps}
    for result in output_node(graph).args[0]:  # type: ignore[union-attr]
        if update.in_place and result not in names and roots.get(result) is update.buffer:  # type: ignore[call-overload]
            raise _Refused(update.deltas[0].writer, "the model returns a part of the buffer, or a view of it")


def _storage(node: fx.Node) -> int:
    return value(node).untyped_storage()._cdata


# ---- whether the deltas of samples add up


def _once(update: _Update, additive: Additive) -> tuple[bool, ...]:
    dtype = value(update.buffer).dtype
    flags = []
    for delta in update.deltas:
        try:
            if dtype is torch.bool or dtype.is_complex:
                raise NotAdditive(f"the buffer is of {dtype}")
            if is_tensor(delta.value) and value(delta.value).requires_grad:  # type: ignore[arg-type]
                raise NotAdditive(
                    "what it adds carries a gradient into the buffer; update it under torch.no_grad()"
                )
            flags.append(
                _once_scattered(delta.writer, additive) if delta.scattered else additive.is_once(delta.value)
            )
        except NotAdditive as reason:
            raise UnsupportedModelError(_refusal(update.buffer, delta.writer, str(reason))) from None
    return tuple(flags)


def _once_scattered(write: fx.Node, additive: Additive) -> bool:
    if additive.batch is None:
        return True
    additive.scattered(write)
    return False


# ---- the graph without the writes


def _rewrite(graph: fx.Graph, update: _Update, once: tuple[bool, ...]) -> None:
    output = output_node(graph)
    deltas = tuple(_delta_tensor(graph, update.buffer, delta) for delta in update.deltas)
    with graph.inserting_before(output):
        final = graph.call_function(
            add_to_buffer, (update.buffer, *deltas), {"in_place": update.in_place, "once": once}
        )
    final.meta = {**_where(update.deltas[-1].writer), "example_value": value(update.buffer)}
    names = {*update.steps, update.buffer} if update.in_place else {update.steps[-1]}
    output.args = (tuple(final if result in names else result for result in output.args[0]),)  # type: ignore[union-attr]
    for step in reversed(update.steps):
        if not step.users:
            graph.erase_node(step)


def _delta_tensor(graph: fx.Graph, buffer: fx.Node, delta: _Delta) -> fx.Node:
    """What is added, as a tensor, where the model adds it."""
    with graph.inserting_before(delta.writer):
        if delta.scattered:
            zeros = emit(graph, torch.zeros_like, (buffer,))
            node = emit(
                graph,
                target_name(delta.writer)[:-1],
                (zeros, *delta.writer.args[1:]),
                dict(delta.writer.kwargs),
            )
        elif is_tensor(delta.value):
            node = delta.value
            if delta.factor != 1:
                node = emit(graph, operator.mul, (node, delta.factor))
        else:
            number = delta.value
            if isinstance(number, fx.Node):
                number = emit(graph, operator.mul, (number, delta.factor))
            else:
                number = number * delta.factor  # type: ignore[operator]
            kwargs = {"dtype": value(buffer).dtype, "device": value(buffer).device}
            node = graph.call_function(torch.full, ((), number), kwargs)
            node.meta = {"example_value": value(buffer).new_empty(())}  # `full` would fix a size of the batch
    if node is not delta.value:
        node.meta.update(_where(delta.writer))  # type: ignore[union-attr]
    return node  # type: ignore[return-value]


def _where(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


# ---- refusals


def _reject_running_statistics(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> None:
    """The running mean that a normalisation in training updates besides what it returns."""
    for node in graph.nodes:
        is_instance = is_call(node, "instance_norm")
        if is_call(node, "batch_norm", "instance_norm") and argument(node, 5, "training", is_instance):
            mean = argument(node, 1, "running_mean")
            if isinstance(mean, fx.Node) and _is_buffer(roots[mean]):
                raise UnsupportedModelError(
                    _refusal(roots[mean], node, "it averages over samples and over calls")
                )


def _is_buffer(node: fx.Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind is InputKind.BUFFER


def _name(node: fx.Node) -> str:
    source = source_of(node)
    return source.name if source is not None else node.name


def _refusal(buffer: fx.Node, node: fx.Node, reason: str) -> str:
    return f"the model updates its buffer `{_name(buffer)}` at {describe(node)}: {reason}; {BUFFER_UPDATE_ADVICE}"
