"""Computes size expressions inside a graph from the sizes of the model's inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from disagmoe_compile.passes.metadata import placeholders, source_of
from disagmoe_compile.passes.program import InputKind

_OPERATIONS: Mapping[type, Callable[..., object]] = {
    sympy.Mul: operator.mul,
    sympy.Add: operator.add,
    sympy.Pow: operator.pow,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
}


class NoExpression(Exception):
    """A size that these operations do not express."""


@dataclass(slots=True)
class SizeBuilder:
    """Emits nodes at the graph's insertion point. `symbol_node(symbol)` gives the node of a symbol."""

    graph: fx.Graph
    symbol_node: Callable[[sympy.Symbol], fx.Node]
    _known: dict[sympy.Symbol, fx.Node] = field(default_factory=dict)

    def build(self, expr: int | sympy.Expr) -> fx.Node | int:
        """Raises NoExpression."""
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            if expr not in self._known:
                self._known[expr] = self.symbol_node(expr)
            return self._known[expr]
        function = _OPERATIONS.get(type(expr))
        if function is None:
            raise NoExpression(str(expr))
        result, *rest = (self.build(part) for part in expr.args)
        for part in rest:
            result = self.graph.call_function(function, (result, part))
        return result


def symbol_sources(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int | None]]:
    """symbol -> (placeholder, dimension); dimension is None where the placeholder is the size itself."""
    found: dict[sympy.Symbol, tuple[fx.Node, int | None]] = {}
    for node in placeholders(graph):
        source = source_of(node)
        if source is None or source.kind not in (InputKind.INPUT, InputKind.SYMBOL):
            continue
        for dim, size in enumerate(source.shape):
            is_size = source.kind is InputKind.SYMBOL
            if isinstance(size, sympy.Symbol) and (size not in found or is_size):
                found[size] = (node, None if is_size else dim)
    return found
