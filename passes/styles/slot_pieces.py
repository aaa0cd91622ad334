"""Experts that each take their own slots: a buffer is cut along its experts, every piece meets its own expert's parameters,
and the results are joined again.

    out = stack([mlp_e(slots[e]) for e ...])            out = cat([mlp_e(piece) for e, piece in enumerate(slots.chunk(E))])

All pieces must be computed alike (see `pieces.py`); then the first says what an expert does to its slots.

Legend: E experts, e one of them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape
from disagmoe_compile.passes.regions import NoMatch, ParamNodes
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes, Axis
from disagmoe_compile.passes.styles.loop_routing import first_part
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.parameters import is_parameter, is_stacked, parameter_leaf
from disagmoe_compile.passes.styles.pieces import Alike, Pieces

_ALL = slice(None)
_EXPERT: Axis = ("expert",)
_Cut: TypeAlias = tuple[fx.Node, int, int]  # rows, dim, e


@dataclass(frozen=True, slots=True)
class SlotPieces(Pieces):
    """Pieces of `rows`, one for each expert along dimension `dim`, joined along the same dimension."""

    dim: int

    def axes_of_result(self, axes: Axes) -> Axes:
        """Axes of the first result where `axes` are those of `joined`."""
        kept = (ONE,) if rank_of(self.results[0]) == rank_of(self.joined) else ()
        return (*axes[: self.dim], *kept, *axes[self.dim + 1 :])

    def is_cut(self, node: fx.Node, e: int) -> bool:
        return _read_cut(node) == (self.rows, self.dim, e)

    def axes_of_rows(self, cut: fx.Node, axes: Axes, expert: Axis) -> Axes:
        """Axes of `rows` where `axes` are those of a `cut`, and `expert` is the axis of `joined` along `dim`."""
        if ROW in axes[:-1]:
            raise NoMatch(cut, "slots of an expert meet")
        kept = rank_of(cut) == rank_of(self.rows)
        if kept and axes[self.dim] != ONE:
            raise NoMatch(cut, "its one row is not that of an expert")
        return (*axes[: self.dim], expert, *axes[self.dim + kept :])


def read_slot_pieces(node: fx.Node) -> SlotPieces | None:
    """The pieces of slots that `node` joins, or None where it is no such call."""
    if not is_call(node, "stack", "cat", "concat", "concatenate"):
        return None
    results, dim, rank = node.args[0], argument(node, 1, "dim", 0), rank_of(node) or 0
    if not isinstance(results, tuple | list) or len(results) < 2 or not all(map(is_tensor, results)):
        return None
    if not isinstance(dim, int) or rank < 3 or dim % rank == rank - 1:
        return None
    dim %= rank
    if not is_call(node, "stack") and any(shape(result)[dim : dim + 1] != (1,) for result in results):
        return None  # `cat` also takes an empty vector among tensors of other ranks, as an empty cache of keys is
    cuts = [_cut_behind(result) for result in results]
    read = [_read_cut(cut) for cut in cuts if cut is not None]
    rows = read[0][0] if read and read[0] is not None else None
    if rows is None or read != [(rows, dim, e) for e in range(len(results))]:
        return None
    if shape(rows)[:-1] != shape(node)[:-1]:
        return None
    return SlotPieces(node, tuple(results), tuple(cuts), rows, dim)  # type: ignore[arg-type]


def _cut_behind(result: fx.Node) -> fx.Node | None:
    """The one piece, of something else than parameters, that `result` is computed from, however often it is cut."""
    found: dict[_Cut, fx.Node] = {}
    pending, seen = [result], {result}
    while pending and len(found) < 2:
        node = pending.pop()
        cut = _read_cut(node)
        if cut is not None and is_tensor(cut[0]):
            found |= {} if is_stacked(cut[0]) else {cut: node}
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return found.popitem()[1] if len(found) == 1 else None


def _read_cut(node: fx.Node) -> _Cut | None:
    """(rows, dim, e) of one row of `rows` along `dim`, or None."""
    if is_call(node, "select"):
        return _at(node.args[0], argument(node, 1, "dim"), argument(node, 2, "index"))
    if is_call(node, "narrow"):
        is_single = argument(node, 3, "length") == 1
        return _at(node.args[0], argument(node, 1, "dim"), argument(node, 2, "start")) if is_single else None
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    source, index = node.args
    if is_call(source, "unbind"):
        return _at(source.args[0], argument(source, 1, "dim", 0), index)  # type: ignore[arg-type, union-attr]
    if is_call(source, "chunk", "split", "tensor_split"):
        dim = argument(source, 2, "dim", 0)  # type: ignore[arg-type]
        is_single = isinstance(dim, int) and shape(node)[dim] == 1
        return _at(source.args[0], dim, index) if is_single else None  # type: ignore[union-attr]
    if not is_tensor(source):
        return None
    parts = index if isinstance(index, tuple) else (index,)
    named = [dim for dim, part in enumerate(parts) if part != _ALL]
    if len(named) != 1:
        return None
    (dim,) = named
    part = parts[dim]
    if isinstance(part, slice) and isinstance(part.start, int) and part.stop == part.start + 1:
        part = part.start if part.step in (None, 1) else None
    return _at(source, dim, part)


def _at(rows: object, dim: object, e: object) -> _Cut | None:
    is_certain = isinstance(rows, fx.Node) and isinstance(dim, int) and isinstance(e, int)
    return (rows, dim % (rank_of(rows) or 1), e) if is_certain and e >= 0 else None  # type: ignore[operator, arg-type, return-value]


class ExpertsLeaf:
    """The leaf rule of what is the experts' own: parameters stacked over them, or separate where each takes its own slots."""

    def __init__(self, function: PairFunction) -> None:
        self._function = function
        self._pieces: list[SlotPieces] = []
        self._separate: dict[fx.Node, ParamNodes] = {}  # of the first expert: those of all experts

    def __call__(self, node: fx.Node, axes: Axes) -> Converted | None:
        pieces = next((one for one in self._pieces if one.is_cut(node, 0)), None)
        if pieces is not None:
            return self._function.convert(pieces.rows, pieces.axes_of_rows(node, axes, _EXPERT))
        if node in self._separate:
            if set(axes) - {ROW}:
                raise NoMatch(node, f"the parameter `{node.name}` of one expert lies along its slots")
            return self._function.parameter(self._separate[node])
        if is_parameter(node):
            return parameter_leaf(self._function, node, axes)
        stacked, _ = first_part(node)
        if stacked is not None and self._pieces and is_stacked(stacked):
            return self._function.convert(stacked, (_EXPERT, *axes))
        joined = read_slot_pieces(node)
        return None if joined is None else self._joined(joined, axes)

    def _joined(self, pieces: SlotPieces, axes: Axes) -> Converted:
        alike = Alike(pieces)
        alike.check()
        if axes[pieces.dim] != _EXPERT:
            raise NoMatch(pieces.joined, "its pieces are not those of the experts")
        self._pieces.append(pieces)
        self._separate |= {parameter: alike.separate(parameter) for parameter in alike.params}
        return self._function.convert(pieces.results[0], pieces.axes_of_result(axes))
