"""Operations that only move, repeat or convert values: the axes of what they read, from the axes of their result.

`reshaped`, `broadcast` (see `axes.py`), permutations, inserted and removed dimensions of size one, repetitions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.axes import ONE, Axes, Axis, broadcast, reshaped

CASTS = (
    "to",
    "float",
    "half",
    "bfloat16",
    "double",
    "long",
    "int",
    "type",
    "type_as",
    "contiguous",
    "clone",
    "detach",
)
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")


def moved(node: fx.Node, axes: Axes, sizes: Mapping[str, Dim]) -> tuple[fx.Node, Axes] | None:
    """(what `node` reads, its axes), or None where `node` does more than move values. Raises NoMatch."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    if is_call(node, *CASTS):
        return source, axes
    if is_call(node, *_RESHAPES):
        return source, reshaped(node, axes, shape(node), shape(source), sizes)
    if is_call(node, "expand", "expand_as", "broadcast_to"):
        return source, broadcast(node, axes, shape(node), shape(source))
    if is_call(node, "unsqueeze"):
        position = argument(node, 1, "dim") % len(axes)
        return source, (*axes[:position], *axes[position + 1 :])
    if is_call(node, "squeeze"):
        gone = squeezed(node)
        kept = iter(axes)
        return source, tuple(ONE if d in gone else next(kept) for d in range(rank_of(source) or 0))
    order = permutation(node, len(axes))
    if order is not None:
        return source, tuple(axes[order.index(d)] for d in range(len(axes)))
    if is_call(node, "repeat"):
        return source, _repeated(node, axes, sizes)
    if is_call(node, "repeat_interleave"):
        dim = argument(node, 2, "dim")
        if not isinstance(dim, int):
            raise NoMatch(node, "it flattens what it repeats")
        dim %= len(axes)
        own = _once(node, axes[dim], argument(node, 1, "repeats"), sizes, first=False)
        return source, (*axes[:dim], own, *axes[dim + 1 :])
    if node.target is operator.getitem:
        return _with_new_dimensions(node, source, axes)
    return None


def squeezed(node: fx.Node) -> set[int]:
    """Dimensions that a `squeeze` removes."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dims, rank = argument(node, 1, "dim"), rank_of(source) or 0
    listed: Sequence[int] = (
        range(rank) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    )
    return {d % rank for d in listed if shape(source)[d] == 1}


def permutation(node: fx.Node, rank: int) -> list[int] | None:
    """`order` where dimension i of the result is dimension `order[i]` of what `node` reads, or None."""
    order = list(range(rank))
    first, second = 0, rank - 1
    if is_call(node, "transpose", "swapaxes", "swapdims"):
        first, second = (d % rank for d in node.args[1:3])  # type: ignore[operator]
    elif is_call(node, "getattr") and node.args[1] in ("mT", "T") and rank >= 2:
        first = rank - 2
    elif is_call(node, "permute"):
        listed = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        return [d % rank for d in listed]  # type: ignore[operator, union-attr]
    elif is_call(node, "movedim", "moveaxis"):
        sources, targets = (
            [dims % rank] if isinstance(dims, int) else [d % rank for d in dims]  # type: ignore[union-attr]
            for dims in node.args[1:3]
        )
        rest = iter([d for d in range(rank) if d not in sources])
        return [sources[targets.index(d)] if d in targets else next(rest) for d in range(rank)]
    elif not is_call(node, "t"):
        return None
    order[first], order[second] = order[second], order[first]
    return order


def _repeated(node: fx.Node, axes: Axes, sizes: Mapping[str, Dim]) -> Axes:
    """[x, x, x]: the first name of the axis is the repetition."""
    repeats = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    new = len(axes) - (rank_of(node.args[0]) or 0)  # type: ignore[arg-type]
    own = [_once(node, axis, n, sizes, first=True) for axis, n in zip(axes, repeats, strict=True)]
    if any(axis != ONE for axis in own[:new]):
        raise NoMatch(node, "it repeats values in a way that is not once a pair")
    return tuple(own[new:])


def _once(node: fx.Node, axis: Axis, repeats: Any, sizes: Mapping[str, Dim], *, first: bool) -> Axis:
    """The axis of what is repeated `repeats` times along `axis`."""
    if isinstance(repeats, int) and repeats == 1:
        return axis
    if isinstance(axis, tuple) and isinstance(repeats, int):
        name, rest = (axis[0], axis[1:]) if first else (axis[-1], axis[:-1])
        if sizes[name] == repeats:
            return rest or ONE
    raise NoMatch(node, "it repeats values in a way that is not once a pair")


def _with_new_dimensions(node: fx.Node, source: fx.Node, axes: Axes) -> tuple[fx.Node, Axes] | None:
    """`x[:, None]`: an index that takes everything and adds dimensions."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(
        part is not None and part is not Ellipsis and part != slice(None)
        for part in parts
        if not is_tensor(part)
    ):
        return None
    if any(isinstance(part, fx.Node) for part in parts):
        return None
    named = sum(part is not None and part is not Ellipsis for part in parts)
    whole = [slice(None)] * ((rank_of(source) or 0) - named)
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    expanded = [*parts[:at], *whole, *parts[at + 1 :]]
    return source, tuple(axis for part, axis in zip(expanded, axes, strict=True) if part is not None)
