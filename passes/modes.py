"""Blocks of a graph in which another mode holds than outside, and how to keep it where nodes are moved.

    _set_grad_enabled(False) ... _set_grad_enabled(True)          torch.no_grad()
    e = _enter_autocast(...) ... _exit_autocast(e)                torch.autocast(...), the same for inference mode
    _vmap_increment_nesting(n) ... _vmap_decrement_nesting()      torch.vmap, torch.func.grad

Dynamo writes them as nodes that nobody reads: what follows depends on them by position alone. A copy of some
nodes must switch the same modes around the same nodes, or a value of a `no_grad` block gets a gradient it never
had. The blocks of function transforms are units besides: their values exist inside them only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from disagmoe_compile.passes.metadata import is_call, target_name

_EXITS: dict[Any, Callable[[Any], object]] = {
    _enter_autocast: _exit_autocast,
    _enter_inference_mode: _exit_inference_mode,
}
_SET_GRAD = torch._C._set_grad_enabled
_LEVELS: dict[str, Callable[[], object]] = {
    f"_{kind}_increment_nesting": getattr(torch._C._functorch, f"_{kind}_decrement_nesting")
    for kind in ("vmap", "grad", "jvp", "func")
    if hasattr(torch._C._functorch, f"_{kind}_decrement_nesting")
}


@dataclass(frozen=True, slots=True)
class Modes:
    """`opened`: the nodes that opened the blocks around a node, outermost first. `grad`: whether gradients are
    recorded; None in a graph that never switches it."""

    opened: tuple[fx.Node, ...] = ()
    grad: bool | None = None


def switches_mode(node: fx.Node) -> bool:
    """Whether the node changes the modes of the nodes after it, and does nothing else."""
    return node.op == "call_function" and (
        node.target is _SET_GRAD or node.target in _EXITS or node.target in _EXITS.values()
    )


def opens_block(node: fx.Node) -> bool:
    """Whether the node starts a block that a later node must end: autocast, inference mode, a function transform."""
    return node.op == "call_function" and (node.target in _EXITS or target_name(node) in _LEVELS)


def closes_block(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target in _EXITS.values() or target_name(node).endswith("_decrement_nesting")
    )


def leaving(opener: fx.Node, result: Any) -> Callable[[], object]:
    """What ends the block that running `opener` started, for a run that breaks off inside it."""
    if opener.target in _EXITS:
        return partial(_EXITS[opener.target], result)
    return _LEVELS[target_name(opener)]


def modes_of(graph: fx.Graph) -> tuple[dict[fx.Node, Modes], Modes]:
    """(node -> the modes it runs under, the modes around the graph)."""
    found: dict[fx.Node, Modes] = {}
    # Dynamo writes a switch only where it changes something, so the first one tells what held before.
    first = next((node for node in graph.nodes if node.target is _SET_GRAD), None)
    around = now = Modes(grad=None if first is None else not first.args[0])
    for node in graph.nodes:
        found[node] = now
        if node.op != "call_function":
            continue
        if node.target is _SET_GRAD:
            now = replace(now, grad=bool(node.args[0]))
        elif node.target in _EXITS:
            now = replace(now, opened=(*now.opened, node))
        elif node.target in _EXITS.values():
            now = replace(now, opened=tuple(opener for opener in now.opened if opener is not node.args[0]))
    return found, around


def transform_blocks(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """node -> every node of the outermost function-transform block around it; nodes outside have no entry."""
    blocks: dict[fx.Node, tuple[fx.Node, ...]] = {}
    depth, members = 0, []
    for node in graph.nodes:
        if node.op == "call_function" and target_name(node) in _LEVELS:
            depth += 1
            # The decompositions that the transform needs are loaded right before it.
            if depth == 1 and is_call(node.prev, "lazy_load_decompositions"):
                members.append(node.prev)
        if depth:
            members.append(node)
        if depth and target_name(node).endswith("_decrement_nesting"):
            depth -= 1
            if depth == 0:
                block = tuple(members)
                blocks.update(dict.fromkeys(block, block))
                members = []
    return blocks


class ModeWriter:
    """Writes switches into a graph under construction; `now` are the modes of the node that would come next."""

    def __init__(self, graph: fx.Graph, around: Modes) -> None:
        self.graph = graph
        self.now = around
        self._copies: dict[fx.Node, fx.Node] = {}

    def switch(self, to: Modes) -> None:
        """The nodes that follow run under `to`."""
        if to == self.now:
            return
        same = 0
        while same < min(len(to.opened), len(self.now.opened)) and to.opened[same] is self.now.opened[same]:
            same += 1
        for opener in reversed(self.now.opened[same:]):
            self.graph.call_function(_EXITS[opener.target], (self._copies.pop(opener),))  # type: ignore[index]
        for opener in to.opened[same:]:
            self._copies[opener] = self.graph.call_function(opener.target, opener.args, opener.kwargs)  # type: ignore[arg-type]
        if to.grad != self.now.grad:
            self.graph.call_function(_SET_GRAD, (to.grad,))
        self.now = to


def erase_idle_switches(graph: fx.Graph) -> None:
    """Erases switches that hold for no node, or change nothing: an autocast block without content, a gradient mode replaced at
    once. `modes_of` reads the modes around the graph from its first switch, so none may stay that sets what held already."""
    first = next((node for node in graph.nodes if node.target is _SET_GRAD), None)
    grads: list[Any] = [
        None if first is None else not first.args[0]
    ]  # around the graph, then after each switch kept
    kept: list[fx.Node] = []
    for node in list(graph.nodes):
        before = kept[-1] if kept else None
        if before is not None and node.target in _EXITS.values() and before is node.args[0]:
            graph.erase_node(node)
            graph.erase_node(kept.pop())
            continue
        if node.target is _SET_GRAD:
            if before is not None and before.target is _SET_GRAD:
                graph.erase_node(kept.pop())
                grads.pop()
            if node.args[0] == grads[-1]:
                graph.erase_node(node)
                continue
            grads.append(node.args[0])
        kept.append(node)


def mode_obstacle(graph: fx.Graph, nodes: Iterable[fx.Node]) -> tuple[fx.Node, str] | None:
    """(node, why) for the first of `nodes` that would compute something else outside its block, or None.

    Autocast that is switched off is no obstacle: extracted functions run without it.
    """
    modes, around = modes_of(graph)
    blocks = transform_blocks(graph)
    for node in nodes:
        if node in blocks:
            return node, "it is inside a function transform (vmap or grad)"
        if modes[node].grad is False and around.grad:
            return node, "it runs under no_grad, and a part of a trained region cannot"
        for opener in modes[node].opened:
            if opener.target is not _enter_autocast:
                return node, "it runs under inference mode"
            if opener.args[2]:
                return node, "it runs in an autocast block of the model's own"
    return None
