"""Why a node stands where it stands: the rule that placed it and the path through the graph that made it so.

Names are those of the dump after `label_roles` (`disagmoe inspect --out`). The path of a node at boundary b leads backwards along
what it reads to the experts of boundary b - 1, the last thing it had to wait for; that of a recomputed node leads to the inputs
or parameters that it depends on.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.readable_names import readable_names
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.label_roles import Placement
from disagmoe_compile.passes.metadata import EXPERTS, PLACEMENT, describe, source_of
from disagmoe_compile.plan.topology import Role

_SHOWN = 12  # steps of a path; the middle of a longer one is left out


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a path: its name, what it calls and where in the user's code, and its stage."""

    node: str
    what: str
    stage: str


@dataclass(frozen=True, slots=True)
class Why:
    """`path` leads from the node back to what decided its place."""

    node: str
    what: str
    stage: str
    rule: str
    path: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"{self.node}: {self.what}", f"stands in {self.stage}: {self.rule}"]
        steps = [f"  reads {step.node}: {step.what} [{step.stage}]" for step in self.path]
        if len(steps) > _SHOWN:
            half = _SHOWN // 2
            steps = [*steps[:half], f"  ... {len(steps) - 2 * half} more", *steps[-half:]]
        return "\n".join([*lines, *steps])


class WhyRecorder:
    """Observer of a pass manager: answers for one node, as soon as nodes have places. `answer` is None before."""

    def __init__(self, node: str) -> None:
        self._wanted = node
        self.answer: Why | None = None

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        if pass_name == "label_roles":
            self.answer = why(graph_module.graph, self._wanted)


def why(graph: fx.Graph, name: str) -> Why:
    """Of a graph whose nodes have places. Raises InputError for a name that no node has, with near ones."""
    names = readable_names(graph)
    by_name = {text: node for node, text in names.items()}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=5, cutoff=0.3)
        raise InputError(
            f"no node {name!r} in the graph after label_roles; "
            + (f"near names: {', '.join(near)}" if near else "see the dump of --out for names")
        )
    node = by_name[name]
    placement: Placement = node.meta[PLACEMENT]
    path = _to_inputs(node) if placement.recomputed else _to_experts(node, placement)
    return Why(
        name, _what(node), _stage(placement), placement.reason, tuple(_step(n, names[n]) for n in path)
    )


def _to_experts(node: fx.Node, placement: Placement) -> list[fx.Node]:
    """Along what is placed latest, until the experts that the node waits for."""
    path, current = [], node
    while not (EXPERTS in current.meta and current is not node):
        readable = [n for n in current.all_input_nodes if not n.meta[PLACEMENT].recomputed]
        if not readable:
            break
        current = max(readable, key=_level)
        path.append(current)
    return path if placement.boundary > 0 else []


def _level(node: fx.Node) -> int:
    placement: Placement = node.meta[PLACEMENT]
    return placement.boundary + (placement.role is Role.FFN)


def _to_inputs(node: fx.Node) -> list[fx.Node]:
    """Everything the node depends on down to the graph's inputs, nearest first."""
    found: dict[fx.Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending:
        current = pending.pop(0)
        if current not in found:
            found[current] = None
            pending += current.all_input_nodes
    return list(found)


def _step(node: fx.Node, name: str) -> Step:
    return Step(name, _what(node), _stage(node.meta[PLACEMENT]))


def _what(node: fx.Node) -> str:
    source = source_of(node)
    if source is not None:
        return f"{source.kind} `{source.name}`"
    return describe(node)


def _stage(placement: Placement) -> str:
    if placement.recomputed:
        return "every stage that reads it"
    return f"{'F' if placement.role is Role.FFN else 'A'}{placement.boundary}"
