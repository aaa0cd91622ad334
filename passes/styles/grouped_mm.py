"""Regions that sort their pairs by expert and multiply with `grouped_mm` (Hugging Face's default,
torchtitan).

    perm = sort(expert_ids)          rows = tokens[perm // k]       offs = cumsum(histogram(expert_ids))
    out  = grouped_mm(act(grouped_mm(rows, W1, offs)), W2, offs) * weights[perm]
    exit = out[inverse(perm)].view(T, k, D).sum(1)      or      zeros(T, D).index_add(0, perm // k, out)

The products may be written out, a piece of the rows for each expert (`pieces.py`). Where rows come in pair by pair, or leave
unsummed (experts inside an attention), pairs take the place of tokens: `zeros(P, D).index_add(0, perm, out)`.

What enters the rows: `grouped_rows.py`; how they leave: `grouped_exit.py`.

Legend: T tokens, k experts a token, P = T * k pairs, D hidden size, E experts.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from disagmoe_compile.passes.metadata import argument, emit_for, is_call, is_gather, shape
from disagmoe_compile.passes.regions import Found, NoMatch, Region
from disagmoe_compile.passes.styles.grouped_exit import last_rows, summed_rows
from disagmoe_compile.passes.styles.grouped_rows import GROUPED, EnteringRows
from disagmoe_compile.passes.styles.pieces import CountedPieces, read_pieces
from disagmoe_compile.passes.styles.sorting import Sorting, sorting_behind_counts, sorting_behind_offsets


@dataclass(frozen=True, slots=True)
class GroupedMM:
    name: str = "grouped_mm"

    def find(self, graph: fx.Graph) -> Found:
        by_offsets: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        stopped = []
        for node in graph.nodes:
            if is_call(node, *GROUPED):
                offsets = argument(node, 2, "offs")
                if isinstance(offsets, fx.Node):
                    by_offsets[offsets].append(node)
                else:
                    stopped.append(NoMatch(node, "it has no group offsets"))
        candidates = [partial(_of_offsets, offsets, matmuls) for offsets, matmuls in by_offsets.items()]
        candidates += [partial(_of_pieces, group) for group in _groups_of_pieces(graph)]
        regions = []
        for candidate in candidates:
            try:
                regions.append(candidate())
            except NoMatch as reason:
                stopped.append(reason)
        return Found(tuple(regions), tuple(stopped))


def _of_offsets(offsets: fx.Node, matmuls: list[fx.Node]) -> Region:
    experts = shape(offsets)[0]
    if not isinstance(experts, int):
        raise NoMatch(offsets, "the number of experts is not fixed")
    return _region(sorting_behind_offsets(offsets), experts, matmuls)


def _of_pieces(group: list[CountedPieces]) -> Region:
    sorting = sorting_behind_counts(group[0].counts)
    return _region(sorting, len(group[0].results), [one.joined for one in group], group)


def _groups_of_pieces(graph: fx.Graph) -> list[list[CountedPieces]]:
    """Joined pieces, each with those that its rows are computed from."""
    group_of: dict[fx.Node, list[CountedPieces]] = {}
    groups = []
    for node in graph.nodes:
        pieces = read_pieces(node)
        if pieces is None:
            continue
        before = pieces.rows
        while before not in group_of and not is_gather(before) and before.all_input_nodes:
            before = before.all_input_nodes[0]
        group = group_of.get(before, [])
        if not group or group[0].counts is not pieces.counts:
            group = []
            groups.append(group)
        group.append(pieces)
        group_of[node] = group
    return groups


def _region(
    sorting: Sorting, num_experts: int, matmuls: list[fx.Node], pieces: Sequence[CountedPieces] = ()
) -> Region:
    """The region of the products of all experts with their rows of one sorting. Raises NoMatch where there is none."""
    entered = EnteringRows(sorting, num_experts, pieces)
    rows, leaving = last_rows(matmuls[-1], entered)
    result = entered.convert(rows)
    if entered.tokens is None:
        raise NoMatch(matmuls[0], "its rows are not gathered from tokens")
    summed, tokens, token_ids, weights = (
        summed_rows(leaving, entered),
        entered.tokens,
        entered.token_ids,
        entered.weights,
    )
    if summed is not None and summed.weights is not None:
        weights = summed.weights
        column = entered.function.call("call_method", "unsqueeze", (entered.function.weight, -1))
        result = entered.function.call("call_function", torch.mul, (result, column))
    if summed is None and not entered.by_pair:
        tokens, token_ids = _repeated_tokens(tokens, entered, leaving), None
    top_k = 1 if summed is None else summed.top_k
    return Region(
        style="grouped_mm",
        tokens=tokens,
        token_ids=token_ids,
        expert_ids=entered.expert_ids,
        weights=weights,
        params=entered.params(),
        function=entered.function.finish(result),
        exit=leaving if summed is None else summed.exit,
        num_experts=num_experts,
        top_k=1 if entered.by_pair else top_k,
        summed=top_k if entered.by_pair else 1,
        base=None if summed is None else summed.base,
    )


def _repeated_tokens(tokens: fx.Node, entered: EnteringRows, leaving: fx.Node) -> fx.Node:
    """Rows leave pair by pair: every pair is a token of its own."""
    graph = leaving.graph
    with graph.inserting_before(leaving):
        if entered.token_ids is not None:
            return emit_for(graph, leaving, operator.getitem, (tokens, entered.token_ids))
        repeats = {"dim": 0}
        return emit_for(graph, leaving, "repeat_interleave", (tokens, entered.gathered_top_k), repeats)
