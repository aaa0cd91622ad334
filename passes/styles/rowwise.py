"""Turns a stretch of graph over sorted rows into a function of one expert's rows.

Legal only if rows do not interact: every operation must act on each row alone. Operations are allowed by
name, with their dimensions checked; anything else stops the match and is named.

Legend: P rows (routed pairs), E experts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import argument, is_tensor, rank_of, source_of, target_name, value
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.regions import NoMatch

POINTWISE = frozenset({
    "add", "sub", "mul", "div", "truediv", "floordiv", "true_divide", "neg", "pow", "exp", "exp2",
    "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "abs", "reciprocal", "sigmoid", "silu", "swish",
    "gelu", "relu", "relu6", "relu2", "leaky_relu", "elu", "selu", "celu", "mish", "softplus",
    "softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "tanh", "erf", "sin", "cos",
    "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "where", "lerp", "addcmul",
    "addcdiv", "sign", "round", "to", "type", "float", "half", "bfloat16", "double", "contiguous",
    "clone", "detach", "rsub", "lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and",
    "logical_or", "nan_to_num",
})  # fmt: skip
_LAST_DIM = {  # name -> (position of its dim argument, its default)
    "chunk": (2, 0), "split": (2, 0), "unbind": (1, 0), "softmax": (1, None), "log_softmax": (1, None),
    "glu": (1, -1), "mean": (1, None), "sum": (1, None), "var": (1, None), "amax": (1, None),
    "amin": (1, None), "cat": (1, 0), "concat": (1, 0), "flip": (1, None), "narrow": (1, None),
}  # fmt: skip
_NORMS = frozenset({"layer_norm", "rms_norm"})

Leaf = Callable[[fx.Node], fx.Node | None]


@dataclass(slots=True)
class RowFunction:
    """Builds `function(rows_PD, weight_P, *params)`.

    `leaf(node)` returns the function's node for a value that enters the region (rows, weights, parameters),
    or None to go on.
    """

    leaf: Leaf
    graph: fx.Graph = field(default_factory=fx.Graph)
    params: list[fx.Node] = field(default_factory=list)
    _env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _param_placeholders: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _count: int = 0
    _writers: Mapping[fx.Node, fx.Node] | None = None

    def __post_init__(self) -> None:
        self.rows = self.graph.placeholder("rows")
        self.weight = self.graph.placeholder("weight")
        self._last_placeholder = self.weight

    rows: fx.Node = field(init=False)
    weight: fx.Node = field(init=False)
    _last_placeholder: fx.Node = field(init=False)

    def parameter(self, node: fx.Node) -> fx.Node:
        """The function's placeholder for one expert's slice of a stacked parameter."""
        if node not in self._param_placeholders:
            with self.graph.inserting_after(self._last_placeholder):
                placeholder = self.graph.placeholder(f"param_{len(self.params)}")
            self._last_placeholder = placeholder
            self._param_placeholders[node] = placeholder
            self.params.append(node)
        return self._param_placeholders[node]

    def call(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        self._count += 1
        return self.graph.create_node(op, target, args, kwargs or {}, name=f"v{self._count}")

    def convert(self, node: fx.Node) -> fx.Node:
        """The function's node for a value over rows. Raises NoMatch at the first operation that is not row
        by row."""
        if node not in self._env:
            entered = self.leaf(node)
            if entered is None and node in self._written(node.graph):
                raise NoMatch(
                    self._written(node.graph)[node], "it writes in place to a value inside the experts"
                )
            self._env[node] = self._operation(node) if entered is None else entered
        return self._env[node]

    def _written(self, graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
        if self._writers is None:
            self._writers = storages(graph).writers
        return self._writers

    def finish(self, result: fx.Node) -> fx.GraphModule:
        """The function that returns `result`, one of its own nodes."""
        self.graph.output(result)
        return fx.GraphModule({}, self.graph, class_name="ExpertFunction")

    def _operation(self, node: fx.Node) -> fx.Node:
        check_rowwise(node)
        if target_name(node) == "type_as":
            source = self.convert(node.args[0])  # type: ignore[arg-type]
            return self.call("call_method", "to", (source, value(node).dtype))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.convert)
        if target_name(node) in _LAST_DIM:
            args, kwargs = _with_last_dim(target_name(node), args, kwargs)
        if target_name(node) == "unsqueeze" or _is_column(node):
            return self.call("call_method", "unsqueeze", (args[0], -1))
        return self.call(node.op, node.target, args, kwargs)


def _with_last_dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
    """The same call with its dimension written as -1: the function's values have fewer dimensions."""
    position, _ = _LAST_DIM[name]
    if len(args) > position:
        return (*args[:position], -1, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dim": -1}


def check_rowwise(node: fx.Node) -> None:
    """Raises NoMatch unless `node` computes each row of its result from the same rows of its arguments.

    A row is the last dimension; what is before it (rows, or experts and rows) must not be touched.
    """
    if node.op not in ("call_function", "call_method"):
        raise NoMatch(node, "a value from outside enters the experts' rows")
    name = target_name(node)
    if name == "type_as":
        return
    if name in POINTWISE:
        ranks = {rank_of(source) for source in node.all_input_nodes}
        if not ranks <= {rank_of(node), 0}:
            if any(map(_is_of_parameters, node.all_input_nodes)):
                raise NoMatch(
                    node,
                    "a parameter that all experts share takes part, and an FFN rank holds whole experts only",
                )
            raise NoMatch(
                node, "it broadcasts one value over rows against another along a different dimension"
            )
        return
    if name in _LAST_DIM:
        position, default = _LAST_DIM[name]
        dims = argument(node, position, "dim", default)
        first = node.args[0]
        sample = first[0] if isinstance(first, tuple | list) else first
        rank = rank_of(sample) if isinstance(sample, fx.Node) else None
        listed = dims if isinstance(dims, tuple | list) else (dims,)
        if rank is None or rank < 2 or any(not isinstance(d, int) or d % rank != rank - 1 for d in listed):
            raise NoMatch(node, "it may mix rows")
        return
    if name in _NORMS:
        normalised = argument(node, 1, "normalized_shape")
        if len(normalised) >= (rank_of(node) or 0):
            raise NoMatch(node, "it normalises over rows")
        return
    if name == "dropout":
        if argument(node, 1, "p", 0.5) == 0 or not argument(node, 2, "training", True):
            return
        raise NoMatch(node, "random numbers inside an expert depend on the order of its rows")
    if name == "unsqueeze":
        rank = rank_of(node.args[0])  # type: ignore[arg-type]
        if rank is not None and argument(node, 1, "dim") % (rank + 1) == rank:
            return
    if node.target is operator.getitem and (_is_column(node) or _keeps_rows(node)):
        return
    raise NoMatch(node, "no rule shows that it acts on each row alone")


def _is_of_parameters(node: fx.Node) -> bool:
    """Whether parameters alone decide this value."""
    source = source_of(node)
    if source is not None:
        return source.kind is InputKind.PARAMETER
    return bool(node.all_input_nodes) and all(map(_is_of_parameters, node.all_input_nodes))


def _is_column(node: fx.Node) -> bool:
    """`x[:, None]` of one number a row."""
    return (
        node.target is operator.getitem
        and is_tensor(node.args[0])
        and rank_of(node.args[0]) == 1  # type: ignore[arg-type]
        and node.args[1] == (slice(None), None)
    )


def _keeps_rows(node: fx.Node) -> bool:
    source, index = node.args
    if not is_tensor(source):
        return isinstance(index, int)  # a part of a chunk or a split along the last dimension
    if not isinstance(index, tuple) or any(isinstance(part, fx.Node | list) for part in index):
        return False
    rank, whole = rank_of(source) or 0, slice(None, None, None)  # type: ignore[arg-type]
    if index[0] is Ellipsis:
        return rank > 1 and len(index) == 2 and index[1] is not None
    return len(index) == rank and all(part == whole for part in index[:-1])


def strip_casts(node: fx.Node) -> fx.Node:
    """Through conversions that keep the order of elements."""
    while (before := without_a_cast(node)) is not None:
        node = before
    return node


def without_a_cast(node: fx.Node) -> fx.Node | None:
    """What `node` converts, keeping the order of elements, or None where it is no such call."""
    casts = ("to", "float", "int", "long", "type", "contiguous", "detach")
    return node.args[0] if target_name(node) in casts and node.args else None  # type: ignore[return-value]
