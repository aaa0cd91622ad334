"""A backward graph in two: the input gradient, which others wait for, and the weight gradient, which can run later.

The two graphs together hold exactly the nodes of the whole, so their gradients are bit for bit those of the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.aot.joint import graph_outputs


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """`input_graph(*input_sources)` -> gradients of inputs `input_gradients`, then `n_boundary` values.

    `weight_graph(*weight_sources, *boundary)` -> gradients of inputs `weight_gradients`. The sources are positions in
    `StageGraphs.backward_inputs`.
    """

    input_graph: fx.GraphModule
    input_sources: tuple[int, ...]
    input_gradients: tuple[int, ...]
    n_boundary: int
    weight_graph: fx.GraphModule
    weight_sources: tuple[int, ...]
    weight_gradients: tuple[int, ...]


def _ancestors(roots: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The roots and all they depend on, not looking behind nodes in `stop`."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                stack.extend(node.all_input_nodes)
    return seen


def _subgraph(
    whole: fx.GraphModule, keep: Collection[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in keep and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(whole, graph)


def split_backward(
    backward: fx.GraphModule, gradients: Sequence[int | None], weight_inputs: Collection[int]
) -> SplitBackward | None:
    """None where there is nothing to split: no input gradient, or no work that only weight gradients need."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    outputs = graph_outputs(backward.graph)
    pairs = [
        (index, node)
        for index, node in zip(gradients, outputs)
        if index is not None and isinstance(node, fx.Node)
    ]
    of_inputs = [(index, node) for index, node in pairs if index not in weight_inputs]
    of_weights = [(index, node) for index, node in pairs if index in weight_inputs]
    if not of_inputs or not of_weights:
        return None
    early = _ancestors(node for _, node in of_inputs)
    for node in backward.graph.nodes:  # an operator with several results is never cut between them
        if node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    late = _ancestors((node for _, node in of_weights), stop=early)
    if not any(node.op == "call_function" for node in late - early):
        return None
    boundary = [n for n in backward.graph.nodes if n in late and n in early and n.op != "placeholder"]
    input_placeholders = [n for n in placeholders if n in early]
    weight_placeholders = [n for n in placeholders if n in late]
    position = {node: i for i, node in enumerate(placeholders)}
    return SplitBackward(
        input_graph=_subgraph(backward, early, input_placeholders, [n for _, n in of_inputs] + boundary),
        input_sources=tuple(position[n] for n in input_placeholders),
        input_gradients=tuple(index for index, _ in of_inputs),
        n_boundary=len(boundary),
        weight_graph=_subgraph(
            backward, late - set(boundary), weight_placeholders + boundary, [n for _, n in of_weights]
        ),
        weight_sources=tuple(position[n] for n in weight_placeholders),
        weight_gradients=tuple(index for index, _ in of_weights),
    )
