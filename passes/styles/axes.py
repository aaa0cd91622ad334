"""What each dimension of a value inside an experts' region means, followed from a result back to its operands.

A dimension is a *pair axis* (which token, which of its experts, which expert, which slot of an expert), a `ROW`
dimension (features of one row), or `ONE`: of size one, to be broadcast over a pair axis. A pair axis is a tuple of
names, because dimensions get flattened: `("token", "choice")` is [T * k] with the choice running fastest.

Labels flow from results to operands only. They are claims, which the values that enter the region must confirm
(tokens [token, ROW], a parameter [expert, ROW, ROW], ...): a wrong guess on the way ends in a mismatch there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import sympy
from torch import fx

from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch

ROW = "row"
ONE = "one"
Axis: TypeAlias = tuple[str, ...] | str
Axes: TypeAlias = tuple[Axis, ...]


def same_size(left: Dim, right: Dim) -> bool:
    return left == right or sympy.expand(sympy.sympify(left) - sympy.sympify(right)) == 0


def row_rank(axes: Axes) -> int:
    return sum(axis == ROW for axis in axes)


def broadcast(node: fx.Node, axes: Axes, result: Sequence[Dim], operand: Sequence[Dim]) -> Axes:
    """Axes of an operand that `node` broadcasts to its result."""
    found: list[Axis] = []
    for axis, size, own in zip(reversed(axes), reversed(result), reversed(operand)):
        if same_size(size, own):
            found.append(axis)
        elif own == 1:
            found.append(ONE)
        else:
            raise NoMatch(node, f"its operand of shape {tuple(operand)} is not broadcast to its result")
    if len(operand) > len(result):
        raise NoMatch(node, "its operand has more dimensions than its result")
    return tuple(reversed(found))


def reshaped(
    node: fx.Node, axes: Axes, result: Sequence[Dim], source: Sequence[Dim], sizes: Mapping[str, Dim]
) -> Axes:
    """Axes of what `node` reshapes. Pair axes may be split and merged, and rows among themselves; never both."""
    names: list[str] = []
    rows: list[Dim] = []
    for axis, size in zip(axes, result, strict=True):
        if axis == ROW:
            rows.append(size)
        elif axis != ONE:
            if rows:
                raise NoMatch(node, "it reshapes rows and pairs together")
            names += axis
    found: list[Axis] = []
    for position, size in enumerate(source):
        if not names:
            return (*found, *_row_axes(node, rows, source[position:]))
        if size == 1 and sizes[names[0]] != 1:
            found.append(ONE)
            continue
        taken = [names.pop(0)]
        while not same_size(_product(sizes[name] for name in taken), size):
            if not names:
                raise NoMatch(node, "it splits or merges rows")
            taken.append(names.pop(0))
        found.append(tuple(taken))
    if names or any(size != 1 for size in rows):
        raise NoMatch(node, "it splits or merges rows")
    return tuple(found)


def _row_axes(node: fx.Node, rows: Sequence[Dim], source: Sequence[Dim]) -> Axes:
    """Where dimensions of size one come and go they are broadcast; otherwise all that is left are rows."""
    if [size for size in source if size != 1] == list(rows):
        return tuple(ONE if size == 1 else ROW for size in source)
    if not same_size(_product(rows), _product(source)):
        raise NoMatch(node, "it splits or merges rows")
    return (ROW,) * len(source)


def _product(sizes: Iterable[Dim]) -> Dim:
    total: Dim = 1
    for size in sizes:
        total = total * size
    return total
