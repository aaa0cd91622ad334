"""Sizes of a run: from the user, or from the planner on the costs of the traced graph."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.backend.planning import choose_topology, choose_workload
from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.hf import build
from disagmoe_compile.planner.cost_model import StageCosts
from disagmoe_compile.testing.virtual import CapturedCall, capture_call


def captured(**overrides: int) -> CapturedCall:
    model = build("qwen3_moe", n_layers=1, seed=0, **overrides)[0]
    ids = torch.randint(3, 250, (12, 16), generator=torch.Generator().manual_seed(0))
    return capture_call(model, {"input_ids": ids, "labels": ids.clone()})


@pytest.fixture(scope="module")
def narrow() -> CapturedCall:
    return captured(moe_intermediate_size=16)


@pytest.fixture(scope="module")
def wide() -> CapturedCall:
    return captured(moe_intermediate_size=512)


def split(call: CapturedCall, world_size: int, **options: object) -> tuple[int, int, int]:
    sizes = call.captured.sizes(call.arguments)
    topology = choose_topology(call.partition.programs, sizes, Options(**options), world_size)  # type: ignore[arg-type]
    return topology.attention_group_size, topology.ffn_group_size, topology.attention_groups


def test_a_model_with_wide_experts_gets_more_ffn_ranks_than_one_with_narrow_experts(narrow, wide):
    assert split(narrow, 8) == (6, 2, 1)
    assert split(wide, 8) == (1, 7, 1)


def test_costs_are_those_of_the_traced_graph(narrow, wide):
    thin = StageCosts.mean(traced_costs(narrow.partition.programs, narrow.captured.sizes(narrow.arguments)))
    thick = StageCosts.mean(traced_costs(wide.partition.programs, wide.captured.sizes(wide.arguments)))
    pairs = 16 * 2  # of one sample
    assert thin.ffn_flops == pairs * 6 * 64 * 16  # three matmuls of a gated MLP, two FLOPs a multiply-add
    assert thick.ffn_flops == 32 * thin.ffn_flops
    assert thick.attention_flops == thin.attention_flops
    assert thin.exchange_bytes == pairs * 64 * 4


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        ({"attention_group_size": 2}, 5, (2, 3, 1)),
        ({"ffn_group_size": 1, "pipeline_groups": 2}, 6, (2, 1, 2)),
        ({"attention_group_size": 1, "ffn_group_size": 1}, 6, (1, 1, 3)),
    ],
)
def test_sizes_that_are_left_out_follow_from_the_world_size(narrow, options, world_size, expected):
    assert split(narrow, world_size, **options) == expected


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({"attention_group_size": 2, "ffn_group_size": 2}, 5),
        ({"attention_group_size": 4}, 4),
        ({"pipeline_groups": 3}, 4),
        ({"attention_group_size": 2, "ffn_group_size": 2, "pipeline_groups": 2}, 4),
    ],
)
def test_sizes_that_do_not_multiply_up_to_the_world_size_are_named(narrow, options, world_size):
    with pytest.raises(InputError, match=f"do not match the world size: .*world size {world_size}"):
        split(narrow, world_size, **options)


def test_as_many_microbatches_as_divide_the_batch_up_to_the_pipelines_fill(narrow):
    sizes = narrow.captured.sizes(narrow.arguments)
    topology = choose_topology(
        narrow.partition.programs, sizes, Options(attention_group_size=1, ffn_group_size=1), 2
    )
    workload = choose_workload(narrow.partition.programs, sizes, topology, Options())
    assert (workload.n_microbatches, workload.microbatch_size, workload.tokens_per_sample) == (6, 2, 16)
