"""Cuts the part of a graph that computes given outputs into a module of its own, on demand from the outputs
backwards.

`split_module` would need a place for every node and loses writers that nobody reads. Here a node comes along
because an output depends on it, through data or through an effect on a storage (`aliasing.py`). Names are
canonical (`a0`, `a1`, ... inputs, `v0`, ... values), so equal layers have equal code, and the code is the
hash. Modes (`no_grad`, autocast) are switched around the same nodes as in the source (`modes.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import written
from disagmoe_compile.passes.metadata import is_tensor
from disagmoe_compile.passes.modes import ModeWriter, modes_of, switches_mode, transform_blocks

Stop = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True)
class Extracted:
    """`module(*inputs)` returns a tuple, one value per requested output. `inputs`: nodes of the source
    graph, in order."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]


class Cutter:
    """The source graph with what is known about its storages and modes; cuts any number of parts."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        roots: Mapping[fx.Node, fx.Node],
        edges: Mapping[fx.Node, frozenset[fx.Node]],
    ) -> None:
        self.graph_module = graph_module
        self.roots = roots
        self.edges = edges
        nodes = list(graph_module.graph.nodes)
        self.positions = {node: index for index, node in enumerate(nodes)}
        self.modes, self.modes_around = modes_of(graph_module.graph)
        self.blocks = transform_blocks(graph_module.graph)
        self.writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if written(node):
                self.writers[roots[node]].append(node)

    def extract(
        self, outputs: Sequence[fx.Node], stop: Stop, name: str, order: Callable[[fx.Node], int] | None = None
    ) -> Extracted:
        """`stop(node)`: the node is an input of the part (placeholders always are). `order` sorts inputs by
        class first.

        Outputs are contiguous and share no storage with an input or another output.
        """
        inner, inputs = self._reach(outputs, stop)
        rank = order or (lambda node: 0)
        ordered_inputs = sorted(inputs, key=lambda node: (rank(node), self.positions[node]))
        graph = fx.Graph()
        modes = ModeWriter(graph, self.modes_around)
        env: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(ordered_inputs):
            env[node] = graph.placeholder(f"a{index}")
            env[node].meta = _kept(node)
        for index, node in enumerate(sorted(inner, key=self.positions.__getitem__)):
            modes.switch(self.modes[node])
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"v{index}")
            env[node].meta = _kept(node)
        modes.switch(self.modes_around)
        graph.output(tuple(self._owned(graph, env, node, outputs, ordered_inputs) for node in outputs))
        module = fx.GraphModule(self.graph_module, graph, class_name=name)
        return Extracted(module, tuple(ordered_inputs))

    def _reach(self, outputs: Sequence[fx.Node], stop: Stop) -> tuple[set[fx.Node], set[fx.Node]]:
        inner: set[fx.Node] = set()
        inputs: set[fx.Node] = set()
        # An output is read when the part is done: whatever the part writes to its storage belongs to it.
        pending = [
            *outputs,
            *(w for n in outputs for w in self.writers.get(self.roots[n], ()) if not stop(w)),
        ]
        while pending:
            node = pending.pop()
            if node in inner or node in inputs or switches_mode(node):
                continue
            if node.op == "placeholder" or stop(node):
                inputs.add(node)
                continue
            inner.add(node)
            pending += node.all_input_nodes
            # A storage that comes from an earlier part comes as that part left it, its writes done.
            pending += [writer for writer in self.edges[node] if not stop(writer)]
            pending += self.blocks.get(node, ())
        return inner, inputs

    def _owned(
        self,
        graph: fx.Graph,
        env: Mapping[fx.Node, fx.Node],
        node: fx.Node,
        outputs: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
    ) -> fx.Node:
        """`node` as an output that owns a contiguous storage; a copy only where it may share one."""
        if not is_tensor(node):
            return env[node]
        root = self.roots[node]
        sharing = [other for other in (*outputs, *inputs) if self.roots[other] is root]
        method, kwargs = "contiguous", {}
        if root is not node or len(sharing) > 1:
            method, kwargs = "clone", {"memory_format": torch.contiguous_format}
        copy = graph.create_node("call_method", method, (env[node],), kwargs, name=f"out{len(graph.nodes)}")
        copy.meta = _kept(node)
        return copy


def _kept(node: fx.Node) -> dict[str, object]:
    keys = ("example_value", "nn_module_stack", "stack_trace", "recompute")
    return {key: node.meta[key] for key in keys if key in node.meta}
