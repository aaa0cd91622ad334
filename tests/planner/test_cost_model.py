"""Sizes of groups from costs: inside torch.compile, different models must get different splits."""

from __future__ import annotations

import pytest
from specs import spec

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.cost_model import StageCosts, split_world
from disagmoe_compile.planner.hardware import find_cluster, local_cpu
from disagmoe_compile.planner.model_spec import AttentionKind, AttentionSpec, ModelSpec
from disagmoe_compile.planner.step_costs import Dedup, exchange_bytes, model_costs

_MHA = AttentionSpec(AttentionKind.MHA, heads=8, kv_heads=8, head_dim=32)
DENSE_HEAVY = spec(n_layers=1, hidden=256, attention=_MHA, expert_hidden=64, top_k=1)
EXPERT_HEAVY = spec(n_layers=1, hidden=256, attention=_MHA, expert_hidden=1024, top_k=4)


def layer_costs(model: ModelSpec, *, seq_length: int) -> StageCosts:
    costs = model_costs(model, seq_length=seq_length)
    exchange = exchange_bytes(costs, Dedup.NONE, ffn_ranks=1, ranks_per_node=1).nic
    return StageCosts(costs.attention[0].forward_flops, costs.experts[0].forward_flops, exchange)


def test_two_models_get_two_splits() -> None:
    splits = []
    for shape in (DENSE_HEAVY, EXPERT_HEAVY):
        costs = layer_costs(shape, seq_length=512)
        splits.append(split_world(costs, world_size=8, hardware=local_cpu(8), max_ffn_size=8)[:2])
    (dense_m, dense_n), (expert_m, expert_n) = splits
    assert dense_m > expert_m and dense_n < expert_n
    assert dense_m + dense_n == expert_m + expert_n == 8


def test_longer_sequences_move_ranks_to_attention() -> None:
    sizes = [
        split_world(layer_costs(EXPERT_HEAVY, seq_length=s), world_size=16, hardware=local_cpu(16))[0]
        for s in (256, 4096, 65536)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_the_split_does_not_depend_on_the_unit_of_work() -> None:
    costs = layer_costs(EXPERT_HEAVY, seq_length=512)
    one = split_world(costs, world_size=8, hardware=local_cpu(8))
    three = split_world(costs + costs + costs, world_size=8, hardware=local_cpu(8))
    assert one[:2] == three[:2]
    assert three[2].t_star_s == pytest.approx(3 * one[2].t_star_s)


def test_pipeline_groups_share_the_world() -> None:
    costs = StageCosts(3e9, 1e9, 1.0)
    m, n, allocation = split_world(costs, world_size=8, pipeline_groups=2, hardware=local_cpu(8))
    assert (m, n) == (3, 1) == (allocation.attention_gpus, allocation.ffn_gpus)


def test_no_more_ffn_ranks_than_experts() -> None:
    costs = StageCosts(1e9, 7e9, 1.0)
    assert split_world(costs, world_size=8, hardware=local_cpu(8))[:2] == (1, 7)
    assert split_world(costs, world_size=8, hardware=local_cpu(8), max_ffn_size=4)[:2] == (4, 4)


def test_only_allowed_attention_sizes_are_taken() -> None:
    costs = StageCosts(5e9, 3e9, 1.0)
    assert split_world(costs, world_size=8, hardware=local_cpu(8))[:2] == (5, 3)
    assert (
        split_world(costs, world_size=8, hardware=local_cpu(8), allowed_attention_sizes=(1, 2, 4, 8))[0] == 4
    )


def test_a_size_that_the_user_fixed_is_kept() -> None:
    costs = StageCosts(5e9, 3e9, 1.0)
    assert split_world(costs, world_size=8, hardware=local_cpu(8), allowed_attention_sizes=(2,))[:2] == (2, 6)
    assert split_world(costs, world_size=8, hardware=local_cpu(8), allowed_ffn_sizes=(1,))[:2] == (7, 1)


def test_a_rank_brings_its_own_nic() -> None:
    # Exchange bound: with free NICs attention would take few GPUs, here each side needs half of them.
    _, _, allocation = split_world(StageCosts(1e3, 1e6, 1e9), world_size=8, hardware=local_cpu(8))
    assert (allocation.attention_gpus, allocation.attention_nics) == (4, 4)


def test_a_cluster_with_fewer_nics_than_gpus_shares_them_out() -> None:
    from dataclasses import replace

    cluster = replace(find_cluster("h800", nodes=2), nics_per_node=4)
    _, _, allocation = split_world(StageCosts(1e12, 1e12, 1e9), world_size=16, hardware=cluster)
    assert allocation.attention_nics + allocation.ffn_nics == 8


def test_all_rules_that_no_split_satisfies_are_named() -> None:
    with pytest.raises(InputError) as caught:
        split_world(
            StageCosts(1, 1, 1),
            world_size=8,
            hardware=local_cpu(8),
            max_ffn_size=2,
            allowed_attention_sizes=(1, 2, 4),
        )
    message = str(caught.value)
    for rule in (
        "= 8",
        "attention_group_size is one of 1, 2, 4",
        "ffn_group_size is one of 1, 2 ",
        "divides the batch",
    ):
        assert rule in message


@pytest.mark.parametrize(
    ("world_size", "groups", "message"),
    [
        (1, 1, "at least 2 ranks"),
        (5, 2, "not divisible by pipeline_groups 2"),
        (2, 2, "at least 4"),
        (4, 0, "at least 1"),
    ],
)
def test_a_world_that_cannot_form_the_groups(world_size: int, groups: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_world(StageCosts(1, 1, 1), world_size=world_size, pipeline_groups=groups, hardware=local_cpu(8))


def test_more_ranks_than_devices() -> None:
    with pytest.raises(InputError, match="16 ranks do not fit on 8"):
        split_world(StageCosts(1, 1, 1), world_size=16, hardware=find_cluster("h800"))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(InputError, match="ffn_flops"):
        StageCosts(1.0, value, 1.0)
