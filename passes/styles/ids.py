"""What is known about ids without knowing their values: that they are not negative, that a token's are distinct.

Gathering takes a negative id from the end, the canonical form takes it for a dropped pair: where the two could differ, a
region of gathered weights is refused.
"""

from __future__ import annotations

import operator

from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, shape

_KEEPS_VALUES = (
    "view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "to", "long", "int", "expand", "detach", "clone",
    "transpose", "permute", "t", "repeat", "repeat_interleave", "type", "unflatten", "index_select", "gather", "flip", "float",
)  # fmt: skip
_POSITIONS = ("argmax", "argmin", "argsort", "multinomial", "arange", "randperm", "bincount")
_WITH_POSITIONS = ("topk", "sort", "max", "min", "kthvalue")


def is_not_negative(ids: fx.Node) -> bool:
    """Whether every id is certainly zero or more."""
    source = unmoved(ids)
    if is_written(source):
        return False
    if is_call(source, *_POSITIONS) or positions_of(source) is not None:
        return True
    if is_call(source, "remainder", "mod", "fmod"):
        divisor = source.args[1]
        floors = not is_call(source, "fmod") or is_not_negative(source.args[0])  # type: ignore[arg-type]
        return floors and isinstance(divisor, int) and divisor > 0
    if is_call(source, "clamp", "clip", "clamp_min", "relu"):
        low = argument(source, 1, "min", 0 if is_call(source, "relu") else None)
        return isinstance(low, int) and low >= 0
    if is_call(source, "cat", "stack"):
        parts = source.args[0]
        return isinstance(parts, tuple | list) and all(
            isinstance(p, fx.Node) and is_not_negative(p) for p in parts
        )
    return False


def are_below(ids: fx.Node, bound: object) -> bool:
    """Whether every id is certainly less than `bound`: a position along a dimension of that size."""
    source = unmoved(ids)
    selected = source if is_call(source, "argmax", "argmin", "argsort") else positions_of(source)
    if selected is None or is_written(source):
        return False
    place, default = (2, -1) if is_call(selected, "topk", "kthvalue") else (1, -1)
    dim = argument(selected, place, "dim", None if is_call(selected, "argmax", "argmin") else default)
    return isinstance(dim, int) and shape(selected.args[0])[dim] == bound  # type: ignore[arg-type]


def are_distinct(ids: fx.Node) -> bool:
    """Whether the ids along the last dimension certainly differ: they are positions that a top-k or a sort returned."""
    while is_call(ids, "to", "long", "int", "contiguous", "detach", "clone") and not is_written(ids):
        ids = ids.args[0]  # type: ignore[assignment]
    if is_written(ids):
        return False
    if ids.target is operator.getitem and is_tensor(ids.args[0]):  # the first few of a sort
        return _takes_a_slice(ids) and are_distinct(ids.args[0])  # type: ignore[arg-type]
    selected = positions_of(ids)
    if selected is not None and is_call(selected, "topk", "sort"):
        return argument(selected, 2 if is_call(selected, "topk") else 1, "dim", -1) in (-1, 1)
    return is_call(ids, "argsort") and argument(ids, 1, "dim", -1) in (-1, 1)


def positions_of(node: fx.Node) -> fx.Node | None:
    """The top-k (sort, max) whose second result `node` is."""
    if node.op == "call_function" and node.target is operator.getitem and node.args[1] == 1:
        source = node.args[0]
        return source if is_call(source, *_WITH_POSITIONS) else None  # type: ignore[return-value]
    if is_call(node, "getattr") and node.args[1] == "indices" and is_call(node.args[0], *_WITH_POSITIONS):
        return node.args[0]  # type: ignore[return-value]
    return None


def unmoved(node: fx.Node) -> fx.Node:
    """Through what only moves, repeats or picks elements, up to a value that is written in place."""
    while (
        (is_call(node, *_KEEPS_VALUES) or (node.target is operator.getitem and is_tensor(node.args[0])))
        and is_tensor(node.args[0])
        and not is_written(node)
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_written(node: fx.Node) -> bool:
    """Whether its values are not those that its own call computes alone: somebody writes to them in place."""
    return node in storages(node.graph).writers


def _takes_a_slice(node: fx.Node) -> bool:
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(isinstance(part, slice) or part is Ellipsis for part in parts)
