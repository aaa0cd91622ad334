"""Which token rows go to which FFN rank, and the sums that bring them back. Pure functions of tensors, deterministic.

Legend: T tokens, P routed pairs, R rows sent between two ranks (distinct tokens), D hidden size, E experts.
The experts' output is a plain sum over pairs, so it is also a sum over ranks of each rank's pairs: one row per (token, rank)
goes out and one pre-summed row comes back. Without de-duplication a row per pair goes out and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RankRoute:
    """What one attention rank exchanges with one FFN rank.

    `rows_R`: the token of each row, ascending; distinct unless `row_per_pair`. `pairs_P`: positions in the routed pairs, sorted
    by (token, expert). `pair_rows_P`: for each of these the row in `rows_R`.
    """

    rows_R: torch.Tensor
    pairs_P: torch.Tensor
    pair_rows_P: torch.Tensor
    row_per_pair: bool = False

    @property
    def n_rows(self) -> int:
        return self.rows_R.numel()

    @property
    def n_pairs(self) -> int:
        return self.pairs_P.numel()


def route(
    token_P: torch.Tensor,
    expert_P: torch.Tensor,
    owners: Sequence[range],
    num_experts: int,
    *,
    row_per_pair: bool = False,
) -> tuple[RankRoute, ...]:
    """One RankRoute per FFN rank, `owners[n]` being the experts of rank n. Ids outside 0..E-1 are dropped pairs: sent nowhere."""
    valid = (expert_P >= 0) & (expert_P < num_experts)
    order_P = torch.argsort(token_P * num_experts + expert_P.clamp(0, num_experts - 1), stable=True)
    order_P = order_P[valid[order_P]]
    sorted_expert_P = expert_P[order_P]
    routes = []
    for owned in owners:
        pairs_P = order_P[(sorted_expert_P >= owned.start) & (sorted_expert_P < owned.stop)]
        if row_per_pair:
            pair_rows_P = torch.arange(pairs_P.numel(), device=pairs_P.device)
            routes.append(RankRoute(token_P[pairs_P], pairs_P, pair_rows_P, row_per_pair=True))
            continue
        rows_R, pair_rows_P = torch.unique_consecutive(token_P[pairs_P], return_inverse=True)
        routes.append(RankRoute(rows_R, pairs_P, pair_rows_P))
    return tuple(routes)


def sum_partial_rows(
    partials: Sequence[torch.Tensor], routes: Sequence[RankRoute], n_tokens: int
) -> torch.Tensor:
    """[T, D] sum of the rows each rank returned, added in rank order. 16-bit rows are summed in float32.

    Tokens of one rank are made distinct first, so no add collides and the order of additions is fixed.
    """
    dtype = partials[0].dtype
    total_TD = partials[0].new_zeros((n_tokens, *partials[0].shape[1:]), dtype=_wide(dtype))
    for partial_RD, one in zip(partials, routes, strict=True):
        tokens_R, wide_RD = one.rows_R, partial_RD.to(total_TD.dtype)
        if one.row_per_pair:
            tokens_R, row_P = torch.unique_consecutive(one.rows_R, return_inverse=True)
            wide_RD = sum_pairs_to_rows(wide_RD, row_P, tokens_R.numel())
        total_TD[tokens_R] += wide_RD
    return total_TD.to(dtype)


def scatter_pairs(values: Sequence[torch.Tensor], routes: Sequence[RankRoute], n_pairs: int) -> torch.Tensor:
    """[P] each rank's values at their pairs; a dropped pair gets zero."""
    out_P = values[0].new_zeros((n_pairs, *values[0].shape[1:]))
    for value_P, one in zip(values, routes, strict=True):
        out_P[one.pairs_P] = value_P
    return out_P


@dataclass(frozen=True, slots=True)
class ReceivedPairs:
    """An FFN rank's view of one dispatched micro-batch: rows of all sources in rank order, pairs sorted by row.

    `by_expert_P` sorts the pairs by local expert (stable); `offsets_E` are the inclusive row ends per local expert in that order.
    """

    rows_per_source: tuple[int, ...]
    pairs_per_source: tuple[int, ...]
    pair_rows_P: torch.Tensor
    expert_P: torch.Tensor
    by_expert_P: torch.Tensor
    offsets_E: torch.Tensor

    @property
    def n_rows(self) -> int:
        return sum(self.rows_per_source)

    @property
    def n_pairs(self) -> int:
        return sum(self.pairs_per_source)


def receive_pairs(
    routing_2P: Sequence[torch.Tensor], rows_per_source: Sequence[int], n_local_experts: int
) -> ReceivedPairs:
    """`routing_2P[m]`: of source m, [row in its message, local expert] per pair, int32 as it travels."""
    first_row, pair_rows, experts = 0, [], []
    for routing, n_rows in zip(routing_2P, rows_per_source, strict=True):
        pair_rows.append(routing[0].long() + first_row)
        experts.append(routing[1].long())
        first_row += n_rows
    expert_P = torch.cat(experts)
    return ReceivedPairs(
        rows_per_source=tuple(rows_per_source),
        pairs_per_source=tuple(r.shape[1] for r in routing_2P),
        pair_rows_P=torch.cat(pair_rows),
        expert_P=expert_P,
        by_expert_P=torch.argsort(expert_P, stable=True),
        offsets_E=torch.bincount(expert_P, minlength=n_local_experts).cumsum(0).to(torch.int32),
    )


def sum_pairs_to_rows(pairs_PD: torch.Tensor, pair_rows_P: torch.Tensor, n_rows: int) -> torch.Tensor:
    """[R, D] sum of each row's pairs, in pair order; every row has at least one pair, pairs are sorted by row.

    Each round adds the j-th pair of every row that has one: rows are distinct within a round, so the order of additions is
    fixed. 16-bit values are summed in float32, as `sum` over top-k does.
    """
    if not n_rows:
        return pairs_PD.new_zeros((0, *pairs_PD.shape[1:]))
    count_R = torch.bincount(pair_rows_P, minlength=n_rows)
    first_R = count_R.cumsum(0) - count_R
    wide = _wide(pairs_PD.dtype)
    total_RD = pairs_PD[first_R].to(wide)
    for j in range(1, int(count_R.max())):
        rows = (count_R > j).nonzero().flatten()
        total_RD[rows] += pairs_PD[first_R[rows] + j].to(wide)
    return total_RD.to(pairs_PD.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up values of `dtype` in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
