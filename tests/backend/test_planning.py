"""Sizes of a run: from the user, or from the planner on the costs of the traced graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from disagmoe_compile.backend import sizing
from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.backend.planning import choose_workload
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.hf import build
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.planner.exhaustive import ranked
from disagmoe_compile.planner.hardware import Cluster, local_cpu
from disagmoe_compile.planner.sizing_problem import (
    SizingOptions,
    SizingProblem,
    TrainingState,
    TrainingWorkload,
)
from disagmoe_compile.planner.step_costs import ModelCosts
from disagmoe_compile.testing.virtual import CapturedCall, capture_call


def captured(**overrides: int) -> CapturedCall:
    model = build("qwen3_moe", **{"n_layers": 1, "seed": 0, **overrides})[0]
    ids = torch.randint(3, 250, (12, 16), generator=torch.Generator().manual_seed(0))
    return capture_call(model, {"input_ids": ids, "labels": ids.clone()})


@pytest.fixture(scope="module")
def narrow() -> CapturedCall:
    return captured(moe_intermediate_size=16)


@pytest.fixture(scope="module")
def wide() -> CapturedCall:
    return captured(moe_intermediate_size=512)


def sized(call: CapturedCall, world_size: int, **options: object) -> tuple[Topology, Options]:
    sizes = call.captured.sizes(call.arguments)
    return choose_sizes(call.partition.programs, sizes, Options(**options), world_size)  # type: ignore[arg-type]


FFN_RANKS = {"attention": 3, "ffn": 1}  # so that this side is short of memory


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=memory_bytes))


def split(call: CapturedCall, world_size: int, **options: object) -> tuple[int, int, int]:
    topology, _ = sized(call, world_size, **options)
    return topology.attention_group_size, topology.ffn_group_size, topology.attention_groups


def test_a_model_with_wide_experts_gets_more_ffn_ranks_than_one_with_narrow_experts(narrow, wide):
    assert split(narrow, 4) == (2, 2, 1)
    assert split(wide, 4) == (1, 3, 1)


def test_costs_are_those_of_the_traced_graph(narrow, wide):
    thin = traced_costs(narrow.partition.programs, narrow.captured.sizes(narrow.arguments))
    thick = traced_costs(wide.partition.programs, wide.captured.sizes(wide.arguments))
    pairs = 16 * 2  # of one sample
    assert (
        thin.experts[0].forward_flops == pairs * 6 * 64 * 16
    )  # three matmuls of a gated MLP, two FLOPs a multiply-add
    assert thick.experts[0].forward_flops == 32 * thin.experts[0].forward_flops
    assert thick.attention == thin.attention
    assert thin.token_bytes == 64 * 4


def test_other_costs_of_the_same_graph_are_another_split(narrow, monkeypatch):
    """The planner sees what is counted, and nothing else of the graph."""

    def with_slow_experts(*arguments: object) -> ModelCosts:
        costs = traced_costs(*arguments)  # type: ignore[arg-type]
        heavy = [
            dataclasses.replace(e, forward_flops=50 * e.forward_flops, backward_flops=50 * e.backward_flops)
            for e in costs.experts
        ]
        return dataclasses.replace(costs, experts=tuple(heavy))

    assert split(narrow, 4) == (2, 2, 1)
    monkeypatch.setattr(sizing, "traced_costs", with_slow_experts)
    assert split(narrow, 4) == (1, 3, 1)


def test_the_choice_is_that_of_the_planner_of_the_command(narrow):
    """The same problem searched exhaustively: no choice has more tokens a second."""
    programs, sizes = narrow.partition.programs, narrow.captured.sizes(narrow.arguments)
    costs = traced_costs(programs, sizes)
    workload = TrainingWorkload(costs.seq_length, global_batch_size=12, fills_pipeline=True)
    state = TrainingState(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    options = SizingOptions(recompute="none", shared_experts_on="attention", state=state)
    best = ranked(SizingProblem(costs, local_cpu(8), workload, options))[0][1]
    topology, chosen = sized(narrow, 8)
    assert best.layout.sizes == (
        topology.attention_groups,
        topology.attention_group_size,
        topology.ffn_group_size,
    )
    assert best.policy.in_flight == chosen.microbatches_in_flight


@pytest.mark.parametrize("side", ["attention", "ffn"])
def test_recompute_of_one_side_makes_the_room_that_no_plan_without_it_has(narrow, side, monkeypatch):
    """Of memory there is more than the leanest plan with it needs, and less than any without."""
    call = narrow if side == "attention" else captured(moe_intermediate_size=512, n_layers=2)
    programs, sizes = call.partition.programs, call.captured.sizes(call.arguments)
    costs = traced_costs(programs, sizes)
    workload = TrainingWorkload(costs.seq_length, global_batch_size=12, fills_pipeline=True)
    state = TrainingState(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)

    def problem(recompute: str, memory_bytes: float = 1e12) -> SizingProblem:
        cluster = with_memory(local_cpu(4), memory_bytes)
        options = SizingOptions(
            ffn_group_size=FFN_RANKS[side], recompute=recompute, shared_experts_on="attention", state=state
        )
        return SizingProblem(costs, cluster, workload, options)

    def least(recompute: str) -> float:
        found = [prediction for prediction, _ in ranked(problem(recompute))]
        return min(max(p.attention.memory_bytes, p.ffn.memory_bytes) for p in found)

    assert least(side) < least("none")
    between = (least(side) + least("none")) / 2 / SizingOptions().usable_memory
    monkeypatch.setattr(sizing, "_this_machine", lambda ranks: with_memory(local_cpu(ranks), between))
    with pytest.raises(InputError, match=rf"memory\[{side}\]"):
        sized(call, 4, recompute="none", ffn_group_size=FFN_RANKS[side])
    best = ranked(problem(side, between))[0][1]
    topology, chosen = sized(call, 4, recompute=side, ffn_group_size=FFN_RANKS[side])
    assert best.layout.attention_group_size == topology.attention_group_size
    assert best.policy.in_flight == chosen.microbatches_in_flight
    assert (best.policy.recompute_attention, best.policy.recompute_ffn) == (
        side == "attention",
        side == "ffn",
    )


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
    topology, _ = sized(narrow, 2, attention_group_size=1, ffn_group_size=1)
    workload = choose_workload(narrow.partition.programs, sizes, topology, Options())
    assert (workload.n_microbatches, workload.microbatch_size, workload.tokens_per_sample) == (6, 2, 16)
