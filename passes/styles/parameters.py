"""Parameters stacked over experts [E, ...], through casts and through permutations of the other dimensions."""

from __future__ import annotations

import operator

from torch import fx

from disagmoe_compile.passes.metadata import is_call, rank_of, source_of
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.axes import ROW
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction

_VIEWS = (
    "to", "float", "half", "bfloat16", "double", "type", "contiguous", "type_as", "detach", "clone", "transpose",
    "permute", "swapaxes", "swapdims", "getattr", "movedim", "moveaxis", "unsqueeze", "squeeze", "chunk", "split",
    "t", "expand", "expand_as",
)  # fmt: skip


def is_parameter(node: object) -> bool:
    source = source_of(node) if isinstance(node, fx.Node) else None
    return source is not None and source.kind is InputKind.PARAMETER


def is_stacked(node: object) -> bool:
    """Whether `node` is a parameter or a part of one, behind casts and moved dimensions."""
    while isinstance(node, fx.Node) and (is_call(node, *_VIEWS) or _is_part(node)):
        node = node.args[0]
    return is_parameter(node)


def _is_part(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return not any(isinstance(part, fx.Node | list) for part in parts)


def stacked_parameter(function: PairFunction, node: fx.Node) -> Converted:
    """One expert's slice of `node`, whose first dimension is the experts. Raises NoMatch."""
    return function.convert(node, (("expert",), *[ROW] * ((rank_of(node) or 1) - 1)))


def parameter_leaf(function: PairFunction, node: fx.Node, axes: object) -> Converted | None:
    """The leaf rule of parameters: [expert, ROW, ...], with nothing else along the experts."""
    if not is_parameter(node):
        return None
    if axes != (("expert",), *[ROW] * ((rank_of(node) or 1) - 1)):
        raise NoMatch(node, f"the parameter `{node.name}` is not stacked over experts in its first dimension")
    return function.parameter(node)
