"""Whether a value of a batch is the sum of the same value of its parts.

    histc(ids.float(), E, 0, E - 1)    bincount(ids, minlength=E)    one_hot(ids, E).sum((0, 1))
    zeros(E).scatter_add(0, ids, ones)    (ids == 3).sum()    x.shape[0] * x.shape[1]

A sum over rows that samples have to themselves, and what is linear in such sums. Means, maxima, signs and constants are not. A
value that no sample has a part in is the same for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.aliasing import effect_edges, storage_roots, written
from disagmoe_compile.passes.label_roles import is_random
from disagmoe_compile.passes.metadata import (
    argument,
    describe,
    expression,
    free_symbols,
    is_call,
    is_tensor,
    shape,
    source_of,
    target_name,
    value,
)
from disagmoe_compile.passes.modes import transform_blocks
from disagmoe_compile.passes.program import InputKind

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short"})
# Linear in their first argument, which says all that matters here: the others place or pick values.
_PLACES = frozenset({
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "expand", "clone", "contiguous",
    "detach", "neg", "negative", "select", "narrow", "view_as", "reshape_as", "expand_as",
})  # fmt: skip
_CONCATENATIONS = frozenset({"stack", "cat", "concat", "concatenate"})
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_ONES = frozenset({"ones", "ones_like", "new_ones"})


class NotAdditive(Exception):
    """The message completes `because ...`."""


@dataclass(frozen=True, slots=True)
class Additive:
    """Answers for one graph, in which regions of experts are single nodes already. `batch` None: one sample, nothing is split."""

    batch: sympy.Symbol | None
    depends: Mapping[fx.Node, bool]  # whether a node's values depend on samples (sizes alone do not count)
    edges: Mapping[fx.Node, frozenset[fx.Node]]  # a node -> who wrote in place to what it reads
    inside: frozenset[
        fx.Node
    ]  # values inside a function transform, whose shapes lack the transformed dimension

    @staticmethod
    def of(graph: fx.Graph, batch: sympy.Symbol | None) -> Additive:
        edges = effect_edges(graph, storage_roots(graph))
        return Additive(batch, _dependence(graph, edges), edges, frozenset(transform_blocks(graph)))

    def is_once(self, delta: object) -> bool:
        """Whether the delta is the same for every batch; otherwise it adds up over samples. Raises NotAdditive for neither."""
        if self.batch is None:
            return True
        if not isinstance(delta, fx.Node):
            return True
        if not is_tensor(delta):
            return self._is_once_size(delta)
        if not self.depends[delta] and not self._reads_batch_size(delta):
            return True
        self._sums(delta)
        return False

    def _is_once_size(self, delta: fx.Node) -> bool:
        size = sympy.sympify(expression(value(delta)))
        if self.batch not in size.free_symbols:
            return True
        if self.batch in sympy.expand(size / self.batch).free_symbols:
            raise NotAdditive(f"{describe(delta)} is not proportional to the number of samples")
        return False

    def _reads_batch_size(self, node: fx.Node) -> bool:
        """Whether a value that no sample has a part in depends on how many there are."""
        pending, seen = [node], {node}
        while pending:
            one = pending.pop()
            found = value(one)
            sizes = shape(one) if is_tensor(one) else (expression(found),) if _is_size(found) else ()
            if self.batch in free_symbols(sizes):
                return True
            fresh = [n for n in one.all_input_nodes if n not in seen and n.op != "placeholder"]
            seen.update(fresh)
            pending += fresh
        return False

    # ---- sums
    def _sums(self, node: object) -> None:
        """Raises NotAdditive unless `node` is a sum over samples."""
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise NotAdditive(f"{node} does not add up over samples")
        if written(node) is not None or self.edges[node]:
            raise NotAdditive(f"{describe(node)} takes part in writing in place")
        if value(node).dtype is torch.bool:
            raise NotAdditive(f"{describe(node)} is true or false")
        reduce = _REDUCTIONS.get(target_name(node))
        rows = node.args[0] if node.args else None
        if reduce is not None and is_tensor(rows) and self._has_rows(rows):
            if self._has_rows(node):
                raise NotAdditive(f"{describe(node)} keeps a dimension of the samples")
            reason = reduce(node)
            if reason is not None:
                raise NotAdditive(f"{describe(node)} {reason}")
            self._own_rows(rows)
            return
        if is_call(node, "scatter_add", "index_add"):
            self.scattered(node)
            if not is_call(node.args[0], *_ZEROS):
                self._sums(node.args[0])
            return
        self._linear(node)

    def _linear(self, node: fx.Node) -> None:
        first = node.args[0] if node.args else None
        if is_call(node, *_CASTS):
            if not value(node).is_floating_point() and value(first).is_floating_point() and not counts(first):
                raise NotAdditive(f"{describe(node)} rounds")
            self._sums(first)
        elif is_call(node, *_PLACES) or (is_call(node, "sum") and "dtype" not in node.kwargs):
            self._sums(first)
        elif is_call(node, "getitem"):
            for index in node.all_input_nodes[1:]:
                self._constant(node, index)
            self._sums(first)
        elif is_call(node, "add", "sub") and not node.kwargs:
            for term in node.args[:2]:
                self._sums(term)
        elif is_call(node, "mul", "multiply") and not node.kwargs:
            scaled, factor = node.args[:2] if self._varies(first) else reversed(node.args[:2])
            self._constant(node, factor)
            self._sums(scaled)
        elif is_call(node, "div", "truediv") and not node.kwargs:
            self._constant(node, node.args[1])
            self._sums(first)
        elif is_call(node, *_CONCATENATIONS) and isinstance(first, tuple | list):
            for part in first:
                self._sums(part)
        else:
            raise NotAdditive(f"nothing shows that {describe(node)} adds up over samples")

    def scattered(self, node: fx.Node) -> None:
        """Raises NotAdditive unless what `base.scatter_add(dim, index, rows)` adds to its base is a sum over samples."""
        _, _, index, rows = (*node.args, None, None, None)[:4]
        alpha = node.kwargs.get("alpha", 1)
        if (
            isinstance(alpha, fx.Node)
            or set(node.kwargs) - {"alpha"}
            or not is_tensor(index)
            or not is_tensor(rows)
        ):
            raise NotAdditive(f"{describe(node)} is written in a way that is not known")
        if self._has_rows(node) or not self._has_rows(index):
            raise NotAdditive(f"{describe(node)} does not scatter the rows of samples")
        if not self._has_rows(rows):
            raise NotAdditive(f"{describe(node)} adds values that have no sample")
        self._own_rows(index)
        self._own_rows(rows)

    def _constant(self, node: fx.Node, factor: object) -> None:
        if self._varies(factor) or (isinstance(factor, fx.Node) and self._reads_batch_size(factor)):
            raise NotAdditive(f"{describe(node)} is not linear in its sum over samples")

    def _varies(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self.depends[node]

    # ---- rows
    def _has_rows(self, node: fx.Node) -> bool:
        return self.batch in free_symbols(shape(node))

    def _own_rows(self, rows: fx.Node) -> None:
        """Raises NotAdditive where rows are made of a value of all samples: then what is summed changes with the batch."""
        pending, seen = [rows], {rows}
        while pending:
            node = pending.pop()
            if (
                node not in self.inside
                and is_tensor(node)
                and self._varies(node)
                and not self._has_rows(node)
            ):
                raise NotAdditive(
                    f"{describe(node)} is one value of all samples, and what is counted depends on it"
                )
            fresh = [n for n in (*node.all_input_nodes, *self.edges[node]) if n not in seen]
            seen.update(fresh)
            pending += fresh


def counts(node: object) -> bool:
    """Whether a value holds whole numbers, whatever its dtype."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int) or (isinstance(node, float) and node.is_integer())
    found = value(node)
    if not isinstance(found, torch.Tensor):
        return isinstance(found, int | torch.SymInt)
    if not found.is_floating_point():
        return True
    if is_call(node, "histc"):
        return True
    if is_call(node, *_CASTS, *_PLACES, "sum", "getitem"):
        return counts(node.args[0])
    if is_call(node, "add", "sub", "mul"):
        return not node.kwargs and all(map(counts, node.args[:2]))
    if is_call(node, "scatter_add", "index_add"):
        return not node.kwargs and counts(node.args[0]) and counts(argument(node, 3, "src"))
    return is_call(node, *_ZEROS, *_ONES)


def _is_size(found: object) -> bool:
    return isinstance(found, int | torch.SymInt) and not isinstance(found, bool)


def _dependence(graph: fx.Graph, edges: Mapping[fx.Node, frozenset[fx.Node]]) -> dict[fx.Node, bool]:
    """node -> whether its values depend on samples. A tensor's size does not depend on its values."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        source = source_of(node) if node.op == "placeholder" else None
        if source is not None:
            found[node] = source.kind is InputKind.INPUT and source.per_sample
        elif _is_size(value(node)) or isinstance(value(node), torch.Size) or is_call(node, *_ZEROS, *_ONES):
            found[node] = False
        else:
            found[node] = is_random(node) or any(found[n] for n in (*node.all_input_nodes, *edges[node]))
    return found


# ---- reductions: (call) -> why it is no sum of whole rows, or None


def _sum(node: fx.Node) -> str | None:
    return None


def _histc(node: fx.Node) -> str | None:
    bounds = (argument(node, 2, "min", 0), argument(node, 3, "max", 0))
    if any(isinstance(bound, fx.Node) for bound in bounds) or bounds[0] == bounds[1]:
        return "takes its range from the values; give it min and max as numbers"
    return None


def _bincount(node: fx.Node) -> str | None:
    if argument(node, 1, "weights") is not None:
        return "weighs what it counts"
    return None


_REDUCTIONS: Mapping[str, Callable[[fx.Node], str | None]] = {
    "sum": _sum,
    "count_nonzero": _sum,
    "histc": _histc,
    "bincount": _bincount,
}
