"""Reading nodes: their value under fake tensors, their shape as expressions, the name of what they call,
where they come from.

Sizes are read by expression (`SymInt.node.expr`) and never compared or converted as live SymInts: either
would specialise the captured graph to the sizes of the first batch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.program import Dim, InputKind, StageInput

SOURCE = "disagmoe_source"  # node.meta key: the StageInput of a placeholder of the captured graph
PLACEMENT = "disagmoe_placement"  # node.meta key: see label_roles
EXPERTS = "disagmoe_experts"  # node.meta key: see canonicalize_experts
_LAYER = re.compile(r"(?:^|[.\[_])(?:layers?|blocks?|h)[.\[]?(\d+)")


def value(node: fx.Node) -> Any:
    """The fake value Dynamo computed for this node, or None."""
    return node.meta.get("example_value")


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def expression(size: int | torch.SymInt) -> Dim:
    """A size as an int or an expression; never specialises."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_Integer else expr
    return int(size)


def shape(node: fx.Node) -> tuple[Dim, ...]:
    """Shape of a tensor-valued node, by expression."""
    found = value(node)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{node.name} is not a tensor but {type(found).__name__}")
    return tuple(expression(size) for size in found.shape)


def rank_of(node: fx.Node) -> int | None:
    found = value(node)
    return found.dim() if isinstance(found, torch.Tensor) else None


def target_name(node: fx.Node) -> str:
    """`linear`, `view`, `grouped_mm_fallback`, ...: the bare name of what the node calls."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return getattr(target, "__name__", str(target))


def is_call(node: object, *names: str) -> bool:
    """Whether `node` calls a function or a tensor method with one of these bare names."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return target_name(node) in names


def is_gather(node: object) -> bool:
    """`x[index]` with one index tensor: rows of x."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[1], fx.Node)
        and is_tensor(node.args[1])
    )


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def source_of(node: fx.Node) -> StageInput | None:
    return node.meta.get(SOURCE)


def is_computed_size(node: fx.Node) -> bool:
    """Whether the node is a size (or a tuple of them) taken from a tensor that is not an input of the model."""
    is_call_node = node.op in ("call_function", "call_method")
    if not is_call_node or not isinstance(value(node), int | torch.SymInt | torch.Size):
        return False
    return any(
        isinstance(value(source), torch.Size) or (is_tensor(source) and not _is_model_input(source))
        for source in node.all_input_nodes
    )


def _is_model_input(node: fx.Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind is InputKind.INPUT


def same_value(left: Any, right: Any) -> bool:
    """Whether two arguments are one value: the same node, or the same pure arithmetic on the same nodes."""
    if left is right:
        return True
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        is_same_call = left.op == right.op and left.target == right.target and left.op == "call_function"
        if not is_same_call or not is_call(left, "floordiv", "floor_divide", "div", "getitem"):
            return False
        return left.kwargs == right.kwargs and same_value(left.args, right.args)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    return type(left) is type(right) and bool(left == right)


def output_node(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def where(node: fx.Node) -> str:
    """`file:line` of the user's code that made this node, or the node's name. A file of a package goes by its place in it."""
    trace = node.meta.get("stack_trace") or node.meta.get("source_location")
    found = re.findall(r'File "([^"]+)", line (\d+)', trace) if trace else []
    if not found:
        return node.name
    file, line = found[-1]
    return f"{re.sub(r'^.*/(site|dist)-packages/', '', file)}:{line}"


def describe(node: fx.Node) -> str:
    return f"`{target_name(node)}` ({where(node)})"


def layer_of(node: fx.Node) -> int | None:
    """Index of the decoder layer whose module made this node, from the names Dynamo recorded."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        found = _LAYER.search(path.replace("'", ""))
        if found:
            return int(found[1])
    return None


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake mode of the graph's values, or None for a graph without them."""
    for node in graph.nodes:
        mode = getattr(value(node), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def emit(graph: fx.Graph, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Adds a call (a method where `target` is a string) at the graph's insertion point, with its fake
    value."""
    kwargs = kwargs or {}
    op = "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(op, target, tuple(args), kwargs)
    mode = fake_mode_of(graph)
    if mode is not None:
        real_args, real_kwargs = fx.node.map_arg((tuple(args), kwargs), value)
        with mode, torch.enable_grad():
            function = getattr(type(real_args[0]), target) if isinstance(target, str) else target
            node.meta["example_value"] = function(*real_args, **real_kwargs)
    return node


def emit_for(
    graph: fx.Graph, origin: fx.Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """`emit`, naming the user's line that made `origin` as the source of the new node."""
    node = emit(graph, target, args, kwargs)
    node.meta["stack_trace"] = origin.meta.get("stack_trace")
    return node


def free_symbols(dims: Iterable[Dim]) -> set[sympy.Symbol]:
    return set().union(*(dim.free_symbols for dim in dims if isinstance(dim, sympy.Expr)), set())
