"""Which parameters and inputs get a gradient when gradients come into some outputs of the model: those the outputs are made of.

Eager leaves `.grad` None where no path leads, and optimizers skip what has none; stages make zeros instead. Paths are data edges
and writes to storages; values that are not floating point carry no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from torch import fx

from disagmoe_compile.passes.aliasing import effect_edges, storage_roots, written
from disagmoe_compile.passes.metadata import is_tensor, output_node, placeholders, value
from disagmoe_compile.passes.program import AttentionProgram, InputKind, ModelPrograms


def reached_inputs(programs: ModelPrograms, outputs: Collection[int]) -> frozenset[int]:
    """Positions in the captured graph of parameters and inputs that gradients into `outputs` (indices) may reach."""
    reached: set[int] = set()
    needed: set[int] = set()  # positions of outputs of the stage at hand, for the stage behind it
    for program in reversed(programs.attention):
        needed |= {position for index, position in program.model_outputs.items() if index in outputs}
        if programs.loss is not None and programs.loss.output_index in outputs:
            needed |= set(program.loss_numerators)
        read = [program.inputs[i] for i in _inputs_of(program, needed)]
        reached |= {one.position for one in read if one.kind in (InputKind.PARAMETER, InputKind.INPUT)}
        needed = set()
        if program.boundary == 0:
            break
        before, experts = programs.attention[program.boundary - 1], programs.experts[program.boundary - 1]
        if any(one.kind is InputKind.COMBINED for one in read):
            assert before.dispatch is not None
            needed |= {before.dispatch.tokens, before.dispatch.weights}
            reached |= {one.position for one in experts.param_inputs}
        needed |= {before.carried[one.position] for one in read if one.kind is InputKind.CARRIED}
    return frozenset(reached)


def _inputs_of(program: AttentionProgram, outputs: Collection[int]) -> list[int]:
    """Positions among the stage's inputs that these of its outputs are made of."""
    graph = program.module.graph
    results = output_node(graph).args[0]
    found = _ancestors(graph, [results[position] for position in outputs])
    return [i for i, node in enumerate(placeholders(graph)) if node in found]


def _ancestors(graph: fx.Graph, results: Collection[fx.Node]) -> set[fx.Node]:
    roots = storage_roots(graph)
    edges: Mapping[fx.Node, frozenset[fx.Node]] = effect_edges(graph, roots)
    writers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if written(node) is not None:
            writers[roots[node]].append(node)
    pending = [*results, *(writer for node in results for writer in writers.get(roots[node], ()))]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in found or (is_tensor(node) and not value(node).is_floating_point()):
            continue
        found.add(node)
        pending += [*node.all_input_nodes, *edges[node]]
    return found
