"""Costs of whole models by stage, and of the exchange between them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from specs import EVERY_KIND, spec

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.layer_costs import total_parameters
from disagmoe_compile.planner.step_costs import (
    ComponentCosts,
    CostSet,
    Dedup,
    exchange_bytes,
    expected_copies,
    grouped_gemm_efficiency,
    model_costs,
    with_recompute,
)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("cost_set", CostSet)
def test_stages_hold_every_parameter_once_and_cost_something(kind: str, cost_set: CostSet) -> None:
    model = EVERY_KIND[kind]
    costs = model_costs(model, seq_length=32, cost_set=cost_set)
    assert costs.n_boundaries == len(model.expert_layers)
    assert costs.parameters == total_parameters(model)
    for part in (*costs.attention, *costs.experts, costs.head):
        assert part.backward_flops >= 2 * part.forward_flops > 0
        assert 0 <= part.core_forward_flops <= part.forward_flops
        assert 0 <= part.activation_bytes_recompute < part.activation_bytes


def test_layers_without_experts_belong_to_the_attention_stage_that_follows() -> None:
    plain, first = model_costs(spec(), seq_length=32), model_costs(EVERY_KIND["dense_first"], seq_length=32)
    extra = first.attention[0].forward_flops - plain.attention[0].forward_flops
    dense_mlp = 2 * 32 * 3 * 48 * 96
    without_router = plain.attention[1].forward_flops - 2 * 32 * 48 * 8
    assert extra == pytest.approx(without_router + dense_mlp)
    assert first.attention[1] == plain.attention[1]


def test_layers_after_the_last_experts_belong_to_the_head() -> None:
    last, plain = model_costs(EVERY_KIND["dense_last"], seq_length=32), model_costs(spec(), seq_length=32)
    assert last.n_boundaries == 1
    assert last.head.forward_flops > plain.head.forward_flops
    assert last.head.core_forward_flops > 0 == plain.head.core_forward_flops


def test_the_embedding_is_in_the_first_stage_and_a_tied_head_holds_no_copy() -> None:
    plain, tied = model_costs(spec(), seq_length=32), model_costs(EVERY_KIND["tied"], seq_length=32)
    assert plain.attention[0].parameters - plain.attention[1].parameters == 48 * 100
    assert plain.head.parameters - tied.head.parameters == 48 * 100
    assert plain.head.forward_flops == tied.head.forward_flops


def test_equal_layers_cost_the_same() -> None:
    costs = model_costs(spec(n_layers=5), seq_length=64)
    assert len(set(costs.attention[1:])) == len(set(costs.experts)) == 1


def test_bytes_follow_the_element_size_and_flops_do_not() -> None:
    two, four = (model_costs(spec(), seq_length=64, element_bytes=size) for size in (2, 4))
    assert four.token_bytes == 2 * two.token_bytes == 4 * 48
    assert four.residual_bytes_per_token == 2 * two.residual_bytes_per_token
    assert four.attention[1].forward_flops == two.attention[1].forward_flops
    assert four.experts[0].activation_bytes == 2 * two.experts[0].activation_bytes


def test_attention_grows_with_the_square_of_the_length_and_experts_in_proportion() -> None:
    short, long = (model_costs(spec(), seq_length=s) for s in (4096, 8192))
    assert long.experts[0].forward_flops == 2 * short.experts[0].forward_flops
    assert long.attention[1].core_forward_flops == pytest.approx(
        4 * short.attention[1].core_forward_flops, rel=1e-3
    )


def test_recompute_trades_a_forward_for_memory() -> None:
    part = model_costs(spec(), seq_length=64).attention[1]
    assert with_recompute(part, recompute=False) is part
    again = with_recompute(part, recompute=True)
    assert again.backward_flops == part.backward_flops + part.forward_flops
    assert again.core_backward_flops == part.core_backward_flops + part.core_forward_flops
    assert again.activation_bytes == part.activation_bytes_recompute == 64 * 2 * 2 * 48
    assert again.parameters == part.parameters


def test_components_add_up() -> None:
    one = ComponentCosts(1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert one + one == ComponentCosts(2, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (7, 3), (6, 1), (5, 5)])
def test_expected_copies_equal_a_walk_over_all_choices(experts: int, top_k: int) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    for destinations in range(1, experts + 1):
        small, larger = divmod(experts, destinations)
        home = [d for d in range(destinations) for _ in range(small + (d < larger))]
        mean = sum(len({home[e] for e in choice}) for choice in choices) / len(choices)
        assert expected_copies(experts, top_k, destinations) == pytest.approx(mean, rel=1e-12)


def test_expected_copies_at_both_ends_and_for_large_models() -> None:
    assert expected_copies(64, 6, 1) == 1
    assert expected_copies(64, 6, 64) == pytest.approx(6)
    assert expected_copies(64, 6, 4) == pytest.approx(
        4 * (1 - (48 * 47 * 46 * 45 * 44 * 43) / (64 * 63 * 62 * 61 * 60 * 59))
    )
    assert 0 < expected_copies(512, 10, 500) < 10


@pytest.mark.parametrize(("experts", "top_k", "destinations"), [(8, 2, 9), (8, 0, 2), (8, 9, 2), (8, 2, 0)])
def test_impossible_copies_are_refused(experts: int, top_k: int, destinations: int) -> None:
    with pytest.raises(InputError, match="each destination needs an expert"):
        expected_copies(experts, top_k, destinations)


def test_without_de_duplication_an_exchange_is_the_papers_volume() -> None:
    model, s = spec(), 4096
    sent = exchange_bytes(model_costs(model, seq_length=s), Dedup.NONE, ffn_ranks=4, ranks_per_node=2)
    assert (sent.nic, sent.link) == (2 * s * model.top_k * model.hidden, 0)


def test_de_duplication_sends_a_row_a_rank_or_a_row_a_node() -> None:
    costs = model_costs(spec(top_k=4), seq_length=10)
    row_bytes = 10 * 2 * 48
    a_rank = exchange_bytes(costs, Dedup.RANK, ffn_ranks=4, ranks_per_node=2)
    a_node = exchange_bytes(costs, Dedup.NODE, ffn_ranks=4, ranks_per_node=2)
    assert a_rank.nic == pytest.approx(row_bytes * expected_copies(8, 4, 4)) and a_rank.link == 0
    assert a_node.nic == pytest.approx(row_bytes * expected_copies(8, 4, 2))
    assert a_node.nic + a_node.link == pytest.approx(a_rank.nic)
    assert a_node.nic < a_rank.nic < exchange_bytes(costs, Dedup.NONE, ffn_ranks=4, ranks_per_node=2).nic


def test_nodes_hold_the_experts_of_their_ranks() -> None:
    """Three ranks on nodes of two: the last node has one rank and fewer experts."""
    costs = replace(model_costs(spec(), seq_length=1), num_experts=9, top_k=2)
    sent = exchange_bytes(costs, Dedup.NODE, ffn_ranks=3, ranks_per_node=2).nic / costs.token_bytes
    pairs = list(itertools.combinations(range(9), 2))
    node = [0] * 6 + [1] * 3
    assert sent == pytest.approx(sum(len({node[e] for e in pair}) for pair in pairs) / len(pairs))


@pytest.mark.parametrize("sizes", [(0, 8), (4, 0), (9, 8)])
def test_impossible_groups_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        exchange_bytes(
            model_costs(spec(), seq_length=8), Dedup.RANK, ffn_ranks=sizes[0], ranks_per_node=sizes[1]
        )


def test_grouped_matmuls_lose_with_few_rows() -> None:
    shares = [
        grouped_gemm_efficiency(rows, ridge_flops_per_byte=258) for rows in (1, 16, 64, 256, 1024, 65536)
    ]
    assert shares == sorted(shares) and 0 < shares[0] < 0.01 and shares[-1] > 0.99
    assert (
        grouped_gemm_efficiency(64, ridge_flops_per_byte=1, tile_rows=128) == 0.5
    )  # half a tile of padding on average
    assert grouped_gemm_efficiency(64, ridge_flops_per_byte=640, tile_rows=0) == pytest.approx(
        0.1
    )  # reading weights


@pytest.mark.parametrize("rows", [0, -1, float("nan")])
def test_a_grouped_matmul_without_rows_is_refused(rows: float) -> None:
    with pytest.raises(InputError, match="rows_per_expert"):
        grouped_gemm_efficiency(rows, ridge_flops_per_byte=258)
