"""Grouped products that are written out: sorted rows are cut at the experts' counts, every piece meets its own expert's
parameters, and the pieces are joined again.

    counts = bincount(ids).tolist()     joined = cat([F.linear(piece, w[e]) for e, piece in enumerate(rows.split(counts))])
                                        joined = cat([mlp_e(rows[start_e : start_e + counts[e]]) for e ...])

All pieces must be computed alike; then one of them says what an expert does to its rows.

Legend: E experts, e one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from disagmoe_compile.passes.metadata import argument, expression, is_call, is_tensor, shape, value
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch, ParamNodes
from disagmoe_compile.passes.styles.loop_routing import first_part
from disagmoe_compile.passes.styles.parameters import is_parameter


@dataclass(frozen=True, slots=True)
class Pieces:
    """`joined` joins the E `results`, result e computed from `cuts[e]`, the rows of expert e of `rows`."""

    joined: fx.Node
    results: tuple[fx.Node, ...]
    cuts: tuple[fx.Node, ...]
    rows: fx.Node

    def is_cut(self, node: fx.Node, e: int) -> bool:
        """Whether `node` is the rows of expert e."""
        return node is self.cuts[e]


@dataclass(frozen=True, slots=True)
class CountedPieces(Pieces):
    """Pieces of sorted rows, as long as `counts` [E] say."""

    counts: fx.Node


def read_pieces(node: fx.Node) -> CountedPieces | None:
    """The pieces that `node` joins, or None where it is no such call."""
    if not is_call(node, "cat", "concat", "concatenate") or argument(node, 1, "dim", 0) != 0:
        return None
    results = node.args[0]
    if not isinstance(results, tuple | list) or len(results) < 2 or not all(map(is_tensor, results)):
        return None
    cuts = [_cut_behind(result) for result in results]
    read = [_read_cut(cut) for cut in cuts if cut is not None]
    if len(read) != len(results) or None in read:
        return None
    rows = {source for source, _, _ in read}  # type: ignore[misc]
    ends = [0, *(end for _, _, end in read)]  # type: ignore[misc]
    starts = [start for _, start, _ in read]  # type: ignore[misc]
    if len(rows) != 1 or starts != ends[:-1]:
        return None
    counts = _counts(node.graph, [end - start for start, end in zip(starts, ends[1:])])  # type: ignore[operator]
    if counts is None:
        return None
    return CountedPieces(node, tuple(results), tuple(cuts), rows.pop(), counts)  # type: ignore[arg-type]


def _cut_behind(result: fx.Node) -> fx.Node | None:
    """The one piece of rows that `result` is computed from."""
    found: set[fx.Node] = set()
    pending, seen, n_rows = [result], {result}, shape(result)[:1]
    while pending:
        node = pending.pop()
        if _read_cut(node) is not None:
            found.add(node)
            continue
        for source in node.all_input_nodes:
            is_over_rows = not is_tensor(source) or shape(source)[:1] == n_rows
            if source not in seen and source.op != "placeholder" and is_over_rows:
                seen.add(source)
                pending.append(source)
    return found.pop() if len(found) == 1 else None


def _read_cut(node: fx.Node) -> tuple[fx.Node, Dim, Dim] | None:
    """(rows, first, last + 1) of a part of rows whose bounds depend on data."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    source, index = node.args
    if is_tensor(source) and isinstance(index, slice) and index.step is None and index.stop is not None:
        start, stop = _number(index.start), _number(index.stop)
        is_of_data = not isinstance(stop, int) and not isinstance(index.stop, int)
        return (source, start, stop) if is_of_data else None  # type: ignore[return-value]
    if is_call(source, "split", "split_with_sizes") and isinstance(index, int):
        sizes = argument(source, 1, "split_size_or_sections", argument(source, 1, "split_sizes"))  # type: ignore[arg-type]
        if argument(source, 2, "dim", 0) != 0 or not isinstance(sizes, tuple | list):  # type: ignore[arg-type]
            return None
        numbers = [_number(size) for size in sizes]
        if all(isinstance(number, int) for number in numbers):
            return None
        first: Dim = sum(numbers[:index])  # type: ignore[arg-type, assignment]
        return source.args[0], first, first + numbers[index]  # type: ignore[return-value, union-attr, operator]
    return None


def _number(size: object) -> Dim:
    if isinstance(size, fx.Node):
        return expression(value(size))
    return size or 0  # type: ignore[return-value]


def _counts(graph: fx.Graph, sizes: Sequence[Dim]) -> fx.Node | None:
    """The tensor [E] whose elements the sizes are, each at its place."""
    items = {expression(value(node)): node for node in graph.nodes if is_call(node, "item")}
    parts = [first_part(items[size].args[0]) if size in items else (None, -1) for size in sizes]  # type: ignore[arg-type]
    counts = {source for source, _ in parts}
    if len(counts) != 1 or [e for _, e in parts] != list(range(len(sizes))):
        return None
    (found,) = counts
    return found if found is not None and shape(found) == (len(sizes),) else None


class Alike:
    """Checks that the results of all pieces are computed alike. `params`: the E parameters behind one of the first expert."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.params: dict[fx.Node, list[fx.Node]] = {}

    def check(self) -> None:
        """Raises NoMatch where an expert is computed in another way than the first."""
        for e, result in enumerate(self.pieces.results[1:], 1):
            self._known: set[tuple[fx.Node, fx.Node]] = set()
            self._compare(self.pieces.results[0], result, e)
        used: dict[fx.Node, fx.Node] = {}  # by the parameter of the first expert in whose place it is
        for first, parameters in self.params.items():
            for parameter in parameters:
                if used.setdefault(parameter, first) is not first:
                    raise NoMatch(
                        parameter, f"one expert uses the parameter `{parameter.name}` twice, another does not"
                    )
            if len({id(p) for p in parameters}) != len(self.pieces.results):
                raise NoMatch(
                    parameters[0], f"the parameter `{parameters[0].name}` belongs to several experts"
                )

    def separate(self, parameter: fx.Node) -> ParamNodes:
        """The parameters of all experts, if they are not stacked in one."""
        return tuple(self.params[parameter]) if parameter in self.params else parameter

    def _compare(self, first: Any, other: Any, e: int) -> None:
        if isinstance(first, fx.Node) and isinstance(other, fx.Node):
            if (first, other) not in self._known:
                self._known.add((first, other))
                self._compare_nodes(first, other, e)
        elif isinstance(first, tuple | list) and isinstance(other, tuple | list) and len(first) == len(other):
            for one, another in zip(first, other):
                self._compare(one, another, e)
        elif isinstance(first, fx.Node) or type(first) is not type(other) or first != other:
            raise NoMatch(self.pieces.results[e], f"experts 0 and {e} compute different functions")

    def _compare_nodes(self, first: fx.Node, other: fx.Node, e: int) -> None:
        if self.pieces.is_cut(first, 0) and self.pieces.is_cut(other, e):
            return
        stacked, number = first_part(first)
        if stacked is not None and is_parameter(stacked):
            if first_part(other) != (stacked, e) or number != 0:
                raise NoMatch(other, f"it is not the slice of expert {e}")
            return
        if is_parameter(first) and is_parameter(other):
            if shape(first) != shape(other) or value(first).dtype != value(other).dtype:
                raise NoMatch(other, f"the parameters of experts 0 and {e} differ in shape or type")
            self.params.setdefault(first, [first]).append(other)
            return
        if first is other or (first.op, first.target) != (other.op, other.target):
            raise NoMatch(other, f"experts 0 and {e} compute different functions")
        self._compare(first.args, other.args, e)
        self._compare(sorted(first.kwargs.items()), sorted(other.kwargs.items()), e)
