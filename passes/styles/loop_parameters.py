"""Parameters of an unrolled expert: its own, or its slice of one stacked over experts, `w[e]`, `w.unbind()[e]`,
`w.view(E, H, D)[e]`, `w.chunk(E)[e].squeeze(0)`.

Legend: E experts, e one of them, H and D the dimensions of one expert's matrix.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, shape, source_of
from disagmoe_compile.passes.program import InputKind

CASTS = ("to", "float", "half", "bfloat16", "double", "type", "contiguous", "detach", "clone")
_VIEWS = ("view", "reshape", "unflatten")
_CUTS = ("chunk", "split", "tensor_split", "unbind")
_MOVES = ("transpose", "permute", "t", "swapaxes", "getattr")


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of the function: `parameter` is the expert's own, or it is seen as `stacked` [E, ...]."""

    parameter: fx.Node
    stacked: fx.Node | None

    @property
    def shape(self) -> tuple[object, ...]:
        return shape(self.stacked or self.parameter)


def piece(node: object, *names: str) -> tuple[fx.Node | None, int]:
    """(stacked, e) of piece e of a tensor cut along its first dimension into single rows."""
    if (
        not isinstance(node, fx.Node)
        or node.target is not operator.getitem
        or not isinstance(node.args[1], int)
    ):
        return None, -1
    call = node.args[0]
    if not is_call(call, *(names or _CUTS[:3])):
        return None, -1
    dim = argument(call, 1 if is_call(call, "unbind") else 2, "dim", 0)  # type: ignore[arg-type]
    is_single = is_call(call, "unbind") or shape(node)[0] == 1
    return (call.args[0], node.args[1]) if dim == 0 and is_single else (None, -1)  # type: ignore[union-attr, return-value]


def parameter_behind(node: fx.Node) -> fx.Node | None:
    """The parameter that `node` is, or cuts up, but for casts, views and moved dimensions."""
    while is_tensor(node.args[0] if node.args else None) and (
        is_call(node, *_CUTS) or (is_call(node, *CASTS, *_VIEWS, *_MOVES) and is_tensor(node))
    ):
        node = node.args[0]  # type: ignore[assignment]
    source = source_of(node)
    return node if source is not None and source.kind is InputKind.PARAMETER else None


def is_view_of_parameter(node: fx.Node) -> bool:
    """[E * H, D] of a parameter seen as [E, H, D]: expert by expert in dim 0."""
    if (
        not is_call(node, *_VIEWS)
        or not isinstance(node.args[0], fx.Node)
        or node.args[0].op != "placeholder"
    ):
        return False
    sizes, whole = shape(node), shape(node.args[0])
    return (
        bool(sizes and whole)
        and isinstance(sizes[0], int)
        and isinstance(whole[0], int)
        and not whole[0] % sizes[0]
    )
