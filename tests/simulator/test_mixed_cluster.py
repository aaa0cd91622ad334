"""Attention ranks on one kind of nodes, FFN ranks on another: each side is judged by its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.efficiency import uniform
from disagmoe_compile.planner.hardware import GPU, Cluster, find_cluster
from disagmoe_compile.planner.layer_costs import ComponentCosts
from disagmoe_compile.planner.model_spec import layer_pattern
from disagmoe_compile.planner.step_costs import CostSet, Dedup, ModelCosts, model_costs
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.assumptions import Assumptions
from disagmoe_compile.simulator.mixed_cluster import MixedCluster
from disagmoe_compile.simulator.results import USABLE_MEMORY, Result, af_result, model_flops
from disagmoe_compile.simulator.search import Setting, best
from disagmoe_compile.simulator.stage_times import Speed
from disagmoe_compile.simulator.timeline import simulate_program


@pytest.fixture(scope="module")
def model() -> ModelCosts:
    """DeepSeek-MoE with eight layers, all with experts."""
    spec = replace(find_model("DeepSeek-MoE-16B"), layers=layer_pattern(8))
    return model_costs(spec, seq_length=4096)


@pytest.fixture(scope="module")
def mixed() -> MixedCluster:
    return MixedCluster(find_cluster("H800-SXM5", 2), find_cluster("H20", 2))


def _nodes(name: str, **changes: float) -> Cluster:
    """One node of one GPU and one NIC that reaches its peaks; 1 TFLOP/s and 1 GB/s unless stated."""
    numbers = {"flops": 1e12, "memory_bytes": 1e12, "memory_bytes_per_s": 1e12, "link_bytes_per_s": 1e9}
    nic = changes.pop("nic_bytes_per_s", 1e9)
    return Cluster(name, GPU(name, **numbers | changes, sources=("test",)), 1, 1, nic)


def _numbers(result: Result) -> dict[str, Any]:
    """Everything that is reported but where it runs."""
    document = result.to_dict()
    document["options"].pop("placement", None)
    return document


@pytest.mark.parametrize(
    "choice",
    [
        AFChoice(1, 16, 16, 1, 8, Dedup.NODE, recompute_ffn=True, in_flight=4, order="list"),
        AFChoice(2, 8, 8, 1, 8, shared_on_ffn=True),
    ],
)
def test_equal_kinds_on_both_sides_give_the_bits_of_one_cluster(choice: AFChoice, model: ModelCosts) -> None:
    half = find_cluster("H800-SXM5", 2)
    whole = af_result(AFModel(model, half.with_nodes(4), choice))
    assert _numbers(af_result(AFModel(model, MixedCluster(half, half), choice))) == _numbers(whole)


def test_rivals_on_equal_kinds_are_those_of_one_cluster(model: ModelCosts) -> None:
    cluster = find_cluster("H800-SXM5", 4)
    setting = Setting(model, cluster, 128, simulated=1)
    split = replace(setting, cluster=MixedCluster(cluster.with_nodes(3), cluster.with_nodes(1)))
    assert _numbers(best(split, "dualpipe")) == _numbers(best(setting, "dualpipe"))


def test_a_step_of_one_micro_batch_is_the_sum_of_its_parts() -> None:
    """Attention at 1 TFLOP/s, experts at 4 with 192 of 256 rows full, messages at the 0.5 GB/s of the slower NIC."""
    attention, experts = (
        ComponentCosts(forward_flops=2e12, backward_flops=4e12),
        ComponentCosts(forward_flops=3e12, backward_flops=6e12),
    )
    model = ModelCosts(
        "one layer",
        192,
        CostSet.CORRECTED,
        2,
        (attention,),
        (experts,),
        (ComponentCosts(),),
        ComponentCosts(),
        token_bytes=10**6,
        residual_bytes_per_token=0,
        num_experts=1,
        top_k=1,
        tied_embeddings=False,
    )
    cluster = MixedCluster(_nodes("a"), _nodes("f", flops=4e12, nic_bytes_per_s=5e8))
    choice = AFChoice(1, 1, 1, 1, 1, split_weight_gradient=False)
    result = af_result(AFModel(model, cluster, choice, Assumptions(0.0, 0.0)))
    message = 192 * 10**6 / 5e8
    assert result.step_s == pytest.approx((2 + 4) + (3 + 6) / (4 * 0.75) + 4 * message)
    assert result.mfu == pytest.approx((2 + 4 + 3 + 6) / (result.step_s * (1 + 4)))


@pytest.mark.parametrize("role", Role)
def test_the_memory_limit_of_a_side_is_its_own(role: Role, model: ModelCosts, mixed: MixedCluster) -> None:
    choice = AFChoice(1, 16, 16, 1, 8)
    needed = af_result(AFModel(model, mixed, choice)).peak_bytes

    def holding(share: float) -> MixedCluster:
        """Each side has just what it needs, but `role` only so much of it."""
        sides = (
            replace(nodes, gpu=replace(nodes.gpu, memory_bytes=needed[side] * short / USABLE_MEMORY))
            for nodes, side in ((mixed.attention, Role.ATTENTION), (mixed.ffn, Role.FFN))
            for short in (share if side is role else 1.001,)
        )
        return MixedCluster(*sides)

    assert af_result(AFModel(model, holding(1.001), choice)).fits
    assert not af_result(AFModel(model, holding(0.999), choice)).fits


@pytest.mark.parametrize("role", Role)
def test_links_and_seconds_of_a_side_are_those_of_its_nodes(
    role: Role, model: ModelCosts, mixed: MixedCluster
) -> None:
    choice = AFChoice(2, 8, 8, 1, 8)
    alone = AFModel(model, mixed.of(role).with_nodes(4), choice)
    both = AFModel(model, mixed, choice)
    assert {key: rate for key, rate in both.links().items() if key[0].startswith(role)} == {
        key: rate for key, rate in alone.links().items() if key[0].startswith(role)
    }
    for stage in range(both.topology.n_stages):
        same = both.stage_seconds(stage) == alone.stage_seconds(stage)
        assert same is (both.topology.group_of_stage(stage).role is role)


def test_ranks_per_node_are_those_of_the_side(model: ModelCosts) -> None:
    """Node de-duplication counts nodes of experts; gradients of attention stay in a node where the group fits."""
    small = replace(find_cluster("H800-SXM5", 4), gpus_per_node=4, nics_per_node=4, nodes=8)
    large = find_cluster("H800-SXM5", 2)
    choice = AFChoice(1, 8, 16, 1, 8, Dedup.NODE)

    def of(attention: Cluster, ffn: Cluster) -> tuple[float, str]:
        af = AFModel(model, MixedCluster(attention, ffn), choice)
        reduction = next(t for t in af.transfers() if t.name.startswith("grad"))
        return af.exchange()[0], af.legs(reduction)[0].links[0][1]

    assert of(large, small)[0] > of(large, large)[0] == of(small, large)[0]
    assert (of(large, small)[1], of(small, large)[1]) == ("link", "nic out")


def test_a_rehearsal_knows_the_links_of_both_sides(model: ModelCosts, mixed: MixedCluster) -> None:
    """As long as the simulated step, where no gradients are summed; with the slower NICs on either side."""
    slow = replace(mixed.ffn, nic_bytes_per_s=mixed.ffn.nic_bytes_per_s / 8)
    choice = AFChoice(2, 1, 8, 1, 8, Dedup.NODE, in_flight=8, order="list")
    for cluster in (MixedCluster(mixed.attention, slow), MixedCluster(slow, mixed.attention)):
        af = AFModel(model, cluster, choice)
        order = af.orders()[0]
        step = simulate_program(af.program(order.schedule())).makespan
        assert step == pytest.approx(order.makespan, rel=1e-9)


def test_all_gpus_count_whether_they_have_a_rank_or_not(model: ModelCosts, mixed: MixedCluster) -> None:
    choice = AFChoice(1, 8, 16, 1, 8)
    small = MixedCluster(mixed.attention.with_nodes(1), mixed.ffn)
    full, idle = (af_result(AFModel(model, on, choice)) for on in (small, mixed))
    assert idle.step_s == full.step_s and (full.gpus, idle.gpus) == (24, 32)
    assert idle.tokens_per_s_per_gpu == pytest.approx(full.tokens_per_s_per_gpu * 24 / 32)
    peak = 16 * 989e12 + 16 * 148e12
    assert idle.mfu == pytest.approx(64 * model_flops(model) / (idle.step_s * peak))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 17, 16), "17 attention ranks do not fit on 16 GPUs"), ((2, 8, 9), "18 ffn ranks do not fit on 16")],
)
def test_ranks_need_gpus_of_their_own_kind(
    sizes: tuple[int, int, int], message: str, model: ModelCosts, mixed: MixedCluster
) -> None:
    with pytest.raises(InputError, match=message):
        AFModel(model, mixed, AFChoice(*sizes, 1, 8))


def test_sizes_of_each_side_are_searched_apart(model: ModelCosts) -> None:
    uneven = MixedCluster(find_cluster("H800-SXM5", 1), find_cluster("H20", 3))
    setting = Setting(model, uneven, 64, micro_batch_size=1, in_flight=4, recompute=False, simulated=1)
    found = best(setting, "af_pipe")
    groups, o = found.options["pipeline_groups"], found.options
    assert groups * o["attention_group_size"] <= 8 < groups * o["ffn_group_size"] <= 24
    assert o["placement"] == "attention on H800-SXM5, FFN on H20" and found.gpus == 32
    pinned = replace(setting, pipeline_groups=3, attention_group_size=2, ffn_group_size=7)
    o = best(pinned, "af_pipe").options
    assert (o["pipeline_groups"], o["attention_group_size"], o["ffn_group_size"]) == (3, 2, 7)


def test_in_step_with_equal_shares_is_the_worse_of_each(mixed: MixedCluster) -> None:
    """H800 has fewer bytes/s between GPUs and less memory, H20 fewer FLOP/s; a NIC for two GPUs is half a NIC."""
    scarce = replace(mixed.ffn, nics_per_node=2, gpus_per_node=4, nodes=4, nic_bytes_per_s=20e9)
    slow = MixedCluster(mixed.attention, scarce).in_step()
    h800, h20 = mixed.attention, mixed.ffn
    assert (slow.gpus, slow.gpus_per_node, Speed(slow).nic) == (32, 4, pytest.approx(0.9 * 10e9))
    assert (slow.gpu.flops, slow.gpu.memory_bytes) == (h20.gpu.flops, h800.gpu.memory_bytes)
    assert (slow.gpu.link_bytes_per_s, slow.gpu.memory_bytes_per_s) == (200e9, 3350e9)


def test_in_step_with_shares_by_speed_computes_at_the_mean_and_loads_the_faster_kind_more() -> None:
    """3 and 1 TFLOP/s on as many GPUs: shares of 1.5 and 0.5. Half of the way 1.25 and 0.75, and 1 / 0.75 is the slowest."""
    mixed = MixedCluster(_nodes("fast", flops=3e12), _nodes("slow"))
    whole, half = mixed.in_step(1.0), mixed.in_step(0.5)
    assert (whole.gpu.flops, half.gpu.flops) == (2e12, pytest.approx(1e12 / 0.75))
    assert (whole.gpu.memory_bytes, half.gpu.memory_bytes) == (pytest.approx(1e12 / 1.5), 1e12 / 1.25)
    assert (Speed(whole).nic, Speed(whole).link) == (pytest.approx(1e9 / 1.5), pytest.approx(1e9 / 1.5))


def test_in_step_compares_what_is_reached_not_peaks() -> None:
    """2 TFLOP/s of which a quarter is reached are slower than 1 of which 0.9 is."""
    fast = replace(_nodes("fast", flops=2e12), efficiencies=uniform(0.25))
    slow = replace(_nodes("slow", flops=1e12), efficiencies=uniform(0.9))
    together = MixedCluster(fast, slow).in_step()
    assert together.gpu.flops * together.efficiencies.gemm.value == pytest.approx(0.5e12)


def test_both_sides_must_be_clusters(mixed: MixedCluster) -> None:
    with pytest.raises(InputError, match="ffn nodes must be a Cluster, got 'H20'"):
        MixedCluster(mixed.attention, "H20")  # type: ignore[arg-type]


def test_two_kinds_are_refused_where_one_is_needed(model: ModelCosts, mixed: MixedCluster) -> None:
    with pytest.raises(InputError, match="needs nodes of one kind, not 2 x H800-SXM5 \\+ 2 x H20"):
        str(Setting(model, mixed, 64).equal_nodes)
