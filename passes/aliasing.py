"""Which nodes may share a storage, and which nodes write to one.

Dynamo's graph is not functional: `out[idx] = v` leaves a node without users whose effect every later reader
of `out`, or of any view of it, depends on. Following data edges alone loses such writes silently. Here a
node's *root* is the node that created its storage, followed through everything that may return a view, and
*effect edges* lead from a reader to the earlier writers of the storages it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.buffer_op import add_to_buffer
from disagmoe_compile.passes.metadata import is_call, is_tensor, target_name
from disagmoe_compile.passes.modes import erase_idle_switches, switches_mode, transform_blocks

AUGMENTED = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
# Calls that may return (a view of) their first argument. `to`, `contiguous` and the like do so when there
# is nothing to change.
_MAY_ALIAS = frozenset({
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "unsqueeze", "squeeze",
    "expand", "expand_as", "broadcast_to", "t", "adjoint", "swapaxes", "swapdims", "movedim",
    "moveaxis", "flatten", "unflatten", "ravel", "narrow", "select", "diagonal", "as_strided", "unfold",
    "detach", "real", "imag", "contiguous", "to", "type", "type_as", "float", "double", "half",
    "bfloat16", "int", "long", "bool", "cpu", "cuda", "chunk", "split", "split_with_sizes",
    "tensor_split", "unbind", "hsplit", "vsplit", "dsplit", "getattr", "dropout", "alias",
    "requires_grad_", "_get_data_attr", "positive", "conj", "resolve_conj", "nan_to_num_", "atleast_1d", "atleast_2d",
    "atleast_3d",
})  # fmt: skip
_MULTI_VIEW = frozenset({
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit",
})  # fmt: skip


def written(node: fx.Node) -> fx.Node | None:
    """The node whose storage this node writes to, or None."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = target_name(node)
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if node.target is operator.setitem or node.target in AUGMENTED or node.kwargs.get("inplace") is True:
        return first if first is not None and is_tensor(first) else None
    is_inplace_name = name.endswith("_") and not name.endswith("__") and node.target is not operator.and_
    if (
        is_inplace_name
        and node.target not in (operator.or_, operator.not_, operator.is_)
        and name != "requires_grad_"
    ):
        return first if first is not None and is_tensor(first) else None
    return None


def root_of(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The node that created the storage of `node`, given the roots of everything before it."""
    target = written(node)
    if target is not None:
        return roots[target]
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is None or node.op not in ("call_function", "call_method"):
        return node
    if node.target is operator.getitem:
        if is_tensor(first):
            return node if _copies(node.args[1]) else roots[first]
        return roots[first] if is_call(first, *_MULTI_VIEW) else node
    return roots[first] if target_name(node) in _MAY_ALIAS else node


def _copies(index: object) -> bool:
    """Advanced indexing (with tensors or lists) copies; basic indexing is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or (isinstance(part, fx.Node) and is_tensor(part)) for part in parts)


@dataclass(frozen=True, slots=True)
class Storages:
    """`roots`: node -> the node that created its storage. `writes`: (writer, the node it writes to), in graph order.
    `writers`: node -> the last call that writes in place to its storage; nodes of other storages are not in it.
    """

    roots: Mapping[fx.Node, fx.Node]
    writes: tuple[tuple[fx.Node, fx.Node], ...]
    writers: Mapping[fx.Node, fx.Node]


# The graph that is being analysed, and what was found when it had so many nodes.
_ANALYSED: ContextVar[tuple[fx.Graph, dict[int, Storages]] | None] = ContextVar("analysed", default=None)


@contextmanager
def analysing(graph: fx.Graph) -> Iterator[None]:
    """While nodes of `graph` are at most added: its storages are then found once for each number of nodes. Whoever asks for
    them once a layer would otherwise go through all layers each time."""
    token = _ANALYSED.set((graph, {}))
    try:
        yield
    finally:
        _ANALYSED.reset(token)


def storages(graph: fx.Graph) -> Storages:
    analysed = _ANALYSED.get()
    if analysed is None or analysed[0] is not graph:
        return _storages(graph)
    known, size = analysed[1], len(graph.nodes)
    if size not in known:
        known[size] = _storages(graph)
    return known[size]


def _storages(graph: fx.Graph) -> Storages:
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        roots[node] = root_of(node, roots)
    writes = tuple((node, target) for node in graph.nodes if (target := written(node)) is not None)
    last = {roots[target]: writer for writer, target in writes}
    return Storages(roots, writes, {node: last[root] for node, root in roots.items() if root in last})


def storage_roots(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """node -> the node that created its storage."""
    return storages(graph).roots


def effect_edges(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """node -> earlier nodes that wrote to a storage it may read (writers order among themselves the same
    way)."""
    writers: dict[fx.Node, frozenset[fx.Node]] = {}
    edges: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        read = {roots[source] for source in node.all_input_nodes}
        edges[node] = frozenset().union(*(writers.get(root, frozenset()) for root in read))
        target = written(node)
        if target is not None:
            root = roots[target]
            writers[root] = writers.get(root, frozenset()) | {node}
    return edges


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Every node that the output, a buffer or the storage of an input depends on, through data, effects or modes."""
    roots = storage_roots(graph)
    edges = effect_edges(graph, roots)
    blocks = transform_blocks(graph)
    live: set[fx.Node] = {node for node in graph.nodes if switches_mode(node)}
    pending = [
        node
        for node in graph.nodes
        if node.op == "output"
        or node.target is add_to_buffer
        or (written(node) is not None and roots[node].op == "placeholder")
    ]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += node.all_input_nodes
            pending += edges[node]
            pending += blocks.get(node, ())
    return live


def remove_dead(graph: fx.Graph) -> int:
    """Erases every node that is not live. Returns how many."""
    live = live_nodes(graph)
    dead = [node for node in graph.nodes if node not in live and node.op != "placeholder"]
    for node in reversed(dead):
        graph.erase_node(node)
    erase_idle_switches(graph)
    return len(dead)
