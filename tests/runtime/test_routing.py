"""Routing and the sums that undo it, against a dense computation in plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.runtime.routing import (
    receive_pairs,
    route,
    scatter_pairs,
    sum_pairs_to_rows,
    sum_partial_rows,
)

CASES = st.tuples(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31 - 1)
).map(lambda c: (c[0], min(c[1], c[2]), c[2], min(c[3], c[2]), c[4]))  # tokens, top-k, experts, ranks, seed


def routed(tokens: int, top_k: int, experts: int, ranks: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    token_P = torch.arange(tokens).repeat_interleave(top_k)
    expert_P = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.flatten()
    owners = [range(experts * n // ranks, experts * (n + 1) // ranks) for n in range(ranks)]
    return token_P, expert_P, owners, generator


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_every_pair_goes_to_the_rank_that_owns_its_expert_once(case):
    token_P, expert_P, owners, _ = routed(*case)
    routes = route(token_P, expert_P, owners, case[2])
    assert sorted(torch.cat([r.pairs_P for r in routes]).tolist()) == list(range(len(token_P)))
    for one, owned in zip(routes, owners):
        assert all(int(e) in owned for e in expert_P[one.pairs_P])
        assert one.rows_R.tolist() == sorted(set(token_P[one.pairs_P].tolist()))
        assert torch.equal(one.rows_R[one.pair_rows_P], token_P[one.pairs_P])


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_rows_summed_per_rank_and_then_over_ranks_equal_the_sum_over_pairs(case):
    token_P, expert_P, owners, generator = routed(*case)
    value_PD = torch.randn(len(token_P), 3, generator=generator, dtype=torch.float64)
    expected_TD = torch.zeros(case[0], 3, dtype=torch.float64)
    for token, value in zip(token_P.tolist(), value_PD):
        expected_TD[token] += value
    routes = route(token_P, expert_P, owners, case[2])
    partials = [sum_pairs_to_rows(value_PD[r.pairs_P], r.pair_rows_P, r.n_rows) for r in routes]
    torch.testing.assert_close(sum_partial_rows(partials, routes, case[0]), expected_TD)
    assert torch.equal(scatter_pairs([value_PD[r.pairs_P] for r in routes], routes, len(token_P)), value_PD)


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_a_row_for_every_pair_gives_the_same_sums(case):
    token_P, expert_P, owners, generator = routed(*case)
    value_PD = torch.randn(len(token_P), 3, generator=generator, dtype=torch.float64)
    sums = []
    for row_per_pair in (False, True):
        routes = route(token_P, expert_P, owners, case[2], row_per_pair=row_per_pair)
        partials = [sum_pairs_to_rows(value_PD[r.pairs_P], r.pair_rows_P, r.n_rows) for r in routes]
        sums.append(sum_partial_rows(partials, routes, case[0]))
    assert all(r.n_rows == r.n_pairs for r in routes)
    torch.testing.assert_close(*sums)


def test_partial_rows_of_several_ranks_are_summed_in_float32():
    routes = route(torch.zeros(4, dtype=torch.long), torch.arange(4), [range(n, n + 1) for n in range(4)], 4)
    partials = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (256.0, 0.5, 0.5, 0.5)]
    assert (
        sum_partial_rows(partials, routes, 1).item() == torch.tensor(257.5).to(torch.bfloat16).item() != 256
    )


def test_pairs_outside_the_experts_are_dropped():
    routes = route(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 4, -1, 3]), [range(0, 2), range(2, 4)], 4)
    assert [r.pairs_P.tolist() for r in routes] == [[0], [3]]


def test_a_rank_without_tokens_gets_empty_routes_and_returns_nothing():
    routes = route(torch.tensor([0, 1]), torch.tensor([0, 0]), [range(0, 1), range(1, 2)], 2)
    assert (routes[1].n_rows, routes[1].n_pairs) == (0, 0)
    empty = sum_pairs_to_rows(torch.zeros(0, 3), routes[1].pair_rows_P, 0)
    total = sum_partial_rows([torch.ones(2, 3), empty], routes, 2)
    assert torch.equal(total, torch.ones(2, 3))


def test_received_pairs_keep_the_order_of_sources_and_sort_by_expert():
    first = torch.tensor([[0, 0, 1], [1, 0, 1]], dtype=torch.int32)
    second = torch.tensor([[0], [0]], dtype=torch.int32)
    pairs = receive_pairs([first, second], [2, 1], 3)
    assert pairs.pair_rows_P.tolist() == [0, 0, 1, 2]
    assert pairs.by_expert_P.tolist() == [1, 3, 0, 2]
    assert pairs.offsets_E.tolist() == [2, 4, 4]
    assert (pairs.rows_per_source, pairs.pairs_per_source) == ((2, 1), (3, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_summed_in_float32(dtype):
    pairs_PD = torch.tensor([[256.0], [0.5], [0.5], [0.5]], dtype=dtype)
    total = sum_pairs_to_rows(pairs_PD, torch.zeros(4, dtype=torch.long), 1)
    assert total.dtype == dtype
    assert total.item() == torch.tensor(257.5).to(dtype).item()
