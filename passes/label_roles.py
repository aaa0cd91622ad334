"""Gives every node its place: which stage it belongs to, or that each reader recomputes it.

Stage of a node: the experts of boundary b, or the attention part before boundary b, where b is the number of
boundaries it transitively reads. Everything runs as early as it can, so shared experts land beside the
attention they follow.

Recomputed by each reader, never sent: what depends on the model's inputs alone (masks, positions, cos and
sin, shifted labels), and what depends on parameters and buffers alone. Random numbers are never recomputed.

A storage that is written in place is one thing with all its views and writers: unless all of it can be
recomputed, it is created no earlier than its last write. The block of a function transform (vmap) is one
thing too: its values exist inside it only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aliasing import effect_edges, storage_roots, written
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import (
    EXPERTS,
    PLACEMENT,
    argument,
    describe,
    is_call,
    source_of,
    target_name,
)
from disagmoe_compile.passes.modes import transform_blocks
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.plan.topology import Role

_RANDOM = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli",
    "multinomial", "normal", "poisson", "rrelu", "bernoulli_", "normal_", "uniform_", "exponential_",
    "random_", "geometric_", "log_normal_", "cauchy_", "feature_dropout", "alpha_dropout",
    "native_dropout", "gumbel_softmax",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """`boundary` b: attention part before boundary b, or experts of boundary b. `recomputed`: each reader
    computes it itself."""

    role: Role
    boundary: int
    recomputed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LabelRoles:
    name: str = "label_roles"
    requires: frozenset[Capability] = frozenset({
        Capability.CANONICAL_EXPERTS, Capability.SIZES, Capability.BUFFER_UPDATES,
    })  # fmt: skip
    provides: frozenset[Capability] = frozenset({Capability.PLACED})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        roots = storage_roots(graph)
        edges = effect_edges(graph, roots)
        _reject_written_inputs(graph, roots)
        storages = _written_storages(graph, roots)
        blocks = tuple(dict.fromkeys(transform_blocks(graph).values()))
        inputs = _dependencies(graph, edges, (*storages.values(), *blocks))
        levels = _levels(graph, edges, storages, blocks, inputs)
        _reject_late_writes(graph, storages, levels)
        for node in graph.nodes:
            if node.op != "output":
                node.meta[PLACEMENT] = _placement(node, levels[node], inputs[node])
        placed = [node.meta[PLACEMENT] for node in graph.nodes if node.op != "output"]
        boundaries = 1 + max((p.boundary for p in placed), default=0)
        recomputed = sum(p.recomputed for p in placed)
        return PassReport(
            matched=len(placed),
            notes=(f"{boundaries} attention parts, {recomputed} nodes recomputed by readers",),
        )


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers as it stands in the graph."""
    if target_name(node) in _RANDOM:
        return True
    if is_call(node, "scaled_dot_product_attention"):
        return argument(node, 4, "dropout_p", 0.0) != 0.0
    if is_call(node, "dropout", "dropout1d", "dropout2d", "dropout3d"):
        return bool(argument(node, 2, "training", True)) and argument(node, 1, "p", 0.5) != 0.0
    return False


def _reject_written_inputs(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> None:
    for node in graph.nodes:
        target = written(node)
        if target is not None and roots[target].op == "placeholder":
            source = source_of(roots[target])
            kind, name = (source.kind, source.name) if source else ("input", roots[target].name)
            raise UnsupportedModelError(
                f"the model updates its {kind} `{name}` at {describe(node)}, which each micro-batch would do again on its own "
                "samples; compute a new tensor instead"
            )


def _written_storages(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """root -> every node of a storage that some node writes to in place."""
    roots_written = {roots[target] for node in graph.nodes if (target := written(node)) is not None}
    storages: dict[fx.Node, list[fx.Node]] = {root: [] for root in roots_written}
    for node in graph.nodes:
        if roots[node] in storages:
            storages[roots[node]].append(node)
    return storages


def _dependencies(
    graph: fx.Graph, edges: Mapping[fx.Node, frozenset[fx.Node]], together: Sequence[Sequence[fx.Node]]
) -> dict[fx.Node, frozenset[str]]:
    """node -> which of {"parameter", "input"} it depends on. Buffers count as neither; random numbers as
    both."""
    found: dict[fx.Node, frozenset[str]] = {}
    both = frozenset({"parameter", "input"})
    while True:
        before = dict(found)
        for node in graph.nodes:
            source = source_of(node) if node.op == "placeholder" else None
            if source is not None:
                names = {InputKind.PARAMETER: {"parameter"}, InputKind.BUFFER: set()}.get(
                    source.kind, {"input"}
                )
                found[node] = frozenset(names)
            elif is_random(node) or EXPERTS in node.meta:
                found[node] = both
            else:
                read = [found[n] for n in (*node.all_input_nodes, *edges[node])]
                found[node] = frozenset().union(*read, found.get(node, frozenset()))
        for members in together:
            shared = frozenset().union(*(found[member] for member in members))
            found.update(dict.fromkeys(members, shared))
        if found == before:
            return found


def _levels(
    graph: fx.Graph,
    edges: Mapping[fx.Node, frozenset[fx.Node]],
    storages: Mapping[fx.Node, list[fx.Node]],
    blocks: Sequence[Sequence[fx.Node]],
    inputs: Mapping[fx.Node, frozenset[str]],
) -> dict[fx.Node, int]:
    """node -> number of boundaries it reads; a written storage is created no earlier than its last write, and a
    block no earlier than its last value."""
    # (members, those of them that decide how early all of them can be)
    groups = [(m, [n for n in m if written(n) or n is root]) for root, m in storages.items()]
    groups += [(list(block), list(block)) for block in blocks]
    groups_of: dict[fx.Node, list[int]] = defaultdict(list)
    for index, (members, _) in enumerate(groups):
        for node in members:
            groups_of[node].append(index)
    levels: dict[fx.Node, int] = {}
    floors = [0] * len(groups)
    while True:
        for node in graph.nodes:
            read = [levels[n] for n in (*node.all_input_nodes, *edges[node])]
            level = max(read, default=0)
            if EXPERTS in node.meta:
                boundary = node.meta[EXPERTS].boundary
                if level > boundary:
                    raise UnsupportedModelError(
                        f"what boundary {boundary} sends to its experts is written in place after them, "
                        f"near {describe(node)}; "
                        "replace the in-place operation by one that returns a new tensor"
                    )
                level = boundary + 1
            if len(inputs[node]) == 2:
                level = max([level, *(floors[index] for index in groups_of.get(node, ()))])
            levels[node] = level
        new = [max(levels[node] for node in deciding) for _, deciding in groups]
        if new == floors:
            return levels
        floors = new


def _reject_late_writes(
    graph: fx.Graph, together: Mapping[fx.Node, list[fx.Node]], levels: Mapping[fx.Node, int]
) -> None:
    """A later part reads a storage as the earlier part left it, so all writes must come before it in the model too."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for root, members in together.items():
        last = max((member for member in members if written(member)), key=position.__getitem__)
        for reader in (user for member in members for user in member.users if user.op != "output"):
            if levels[reader] > levels[root] and position[reader] < position[last]:
                raise UnsupportedModelError(
                    f"{describe(last)} writes in place to what {describe(reader)}, behind an MoE layer, read before; "
                    "replace the in-place operation by one that returns a new tensor"
                )


def _placement(node: fx.Node, level: int, inputs: frozenset[str]) -> Placement:
    if EXPERTS in node.meta:
        return Placement(Role.FFN, node.meta[EXPERTS].boundary, False, "the experts of a boundary")
    if len(inputs) < 2:
        what = next(iter(inputs), "constant")
        return Placement(Role.ATTENTION, level, True, f"depends on {what}s alone: each reader recomputes it")
    waits = f"waits for the experts of boundary {level - 1}" if level else "waits for no experts"
    return Placement(Role.ATTENTION, level, False, f"{waits}; runs as early as it can")
