"""An input of one row beside a batch of several is read at its only row.

    mask[b, keys]   mask [1, S], b = arange(B)   ->   mask[zeros_like(b), keys]

A mask or a table of positions of one row is meant for every sample, and broadcasts wherever it meets the batch. Indexed by
the numbers of the samples it would raise instead, in code that eager may never reach (transformers leaves a mask of ones
out, which only eager can see). The one index that a row of one has is 0, so no program that runs changes its result.
Indices that depend on data stay: out of range, they are the user's to hear of.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from disagmoe_compile.passes.metadata import emit, is_tensor, shape, value


def index_the_only_row(graph: fx.Graph, arguments: Collection[fx.Node]) -> int:
    """`arguments`: the placeholders that the caller fills, not the model's state. Returns how many indices it replaced."""
    tensors = [node for node in graph.nodes if node.op in ("placeholder", "get_attr") and is_tensor(node)]
    from_data = _reached(graph, tensors)
    from_state = _reached(graph, [node for node in tensors if node not in arguments])
    replaced = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem:
            continue
        source, index = node.args
        if not is_tensor(source) or source in from_state or not isinstance(index, tuple):
            continue
        if not all(_is_row_number(one) for one in index):
            continue  # a slice, None or a mask: positions in the index are not dimensions
        with graph.inserting_before(node):
            fixed = tuple(
                emit(graph, torch.zeros_like, (one,)) if size == 1 and one not in from_data else one
                for one, size in zip(index, shape(source))
            )
        changed = sum(new is not old for new, old in zip(fixed, index))
        if changed:
            node.args = (source, fixed)
            replaced += changed
    return replaced


def _is_row_number(index: object) -> bool:
    return is_tensor(index) and value(index).dtype in (torch.int32, torch.int64)  # type: ignore[arg-type]


def _reached(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Tensors computed from the values, not from the sizes alone, of `sources`."""
    found = set(sources)
    for node in graph.nodes:
        if is_tensor(node) and found & set(node.all_input_nodes):
            found.add(node)
    return found
