"""AF-Pipe and its rivals on a real model: one cost model, the same options, honest memory."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import Cluster, find_cluster
from disagmoe_compile.planner.model_spec import layer_pattern
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts, model_costs
from disagmoe_compile.simulator import search
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.results import Beaten, Result, af_faster, af_result, model_flops, rival_result
from disagmoe_compile.simulator.rival_model import RIVALS, RivalChoice, RivalModel
from disagmoe_compile.simulator.search import Setting, best
from disagmoe_compile.simulator.timeline import least_bytes, simulate_program


@pytest.fixture(scope="module")
def model() -> ModelCosts:
    """DeepSeek-MoE with eight layers, all with experts."""
    spec = replace(find_model("DeepSeek-MoE-16B"), layers=layer_pattern(8))
    return model_costs(spec, seq_length=4096)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return find_cluster("H800-SXM5", 4)


def _result(fits: bool, tokens_per_s_per_gpu: float, **changes: Any) -> Result:
    """As little of one as the search looks at."""
    kept = dict.fromkeys((field.name for field in fields(Result)), None)
    return Result(**kept | {"fits": fits, "step_s": 1.0, "tokens": tokens_per_s_per_gpu, "gpus": 1} | changes)  # type: ignore[arg-type]


def _rival(model: ModelCosts, cluster: Cluster, system: str, **changes: object) -> RivalModel:
    choice = RivalChoice(system, 2, 16, 1, 1, 8)
    return RivalModel(model, cluster, replace(choice, **changes))  # type: ignore[arg-type]


def test_every_system_computes_the_same_work(model: ModelCosts, cluster: Cluster) -> None:
    """GPU seconds a sequence agree between AF-Pipe and Megatron, but for the rows an expert gets and kernel launches."""
    af = AFModel(model, cluster, AFChoice(1, 16, 16, 1, 8, shared_on_ffn=False))
    rival = _rival(model, cluster, "megatron_1f1b", pipeline_ranks=1, ep_size=16)
    timeline, other = af_result(af).timeline, rival_result(rival).timeline
    spent = sum(float(timeline.share(g).busy) * 16 for g in timeline.groups) / af.choice.sequences
    theirs = sum(float(other.share(g).busy) * 32 for g in other.groups) / rival.sequences
    assert spent == pytest.approx(theirs, rel=0.06)


def test_overlap_hides_communication_in_the_order_of_the_systems_claims(
    model: ModelCosts, cluster: Cluster
) -> None:
    exposed = {
        system: rival_result(_rival(model, cluster, system, parts=parts)).exposed_s
        for system, parts in (("megatron_1f1b", 1), ("tutel", 4), ("comet", 8))
    }
    assert exposed["comet"] < exposed["tutel"] < exposed["megatron_1f1b"]


def test_dualpipe_is_faster_than_exposed_all_to_all_and_slower_than_ideal(
    model: ModelCosts, cluster: Cluster
) -> None:
    steps = {
        s: rival_result(_rival(model, cluster, s)).step_s
        for s in ("megatron_1f1b", "dualpipe", "dualpipe_ideal")
    }
    assert steps["dualpipe_ideal"] <= steps["dualpipe"] < steps["megatron_1f1b"]


@pytest.mark.parametrize("system", RIVALS)
def test_every_rival_gets_deduplication(system: str, model: ModelCosts, cluster: Cluster) -> None:
    sent = [
        _rival(model, cluster, system, dedup=d).exchange()[0] for d in (Dedup.NONE, Dedup.RANK, Dedup.NODE)
    ]
    assert sent[0] > sent[1] > sent[2] > 0


def test_experts_in_one_node_send_nothing_over_nics(model: ModelCosts, cluster: Cluster) -> None:
    nic, link = _rival(model, cluster, "megatron_1f1b", ep_size=8).exchange()
    assert nic == 0 and link > 0


@pytest.mark.parametrize("n_nodes", [2, 4])
def test_an_all_to_all_keeps_the_share_of_the_own_rank(
    n_nodes: int, model: ModelCosts, cluster: Cluster
) -> None:
    """Of N GPUs in nodes of n, (N-1)/N of a GPU's rows leave it and (N-n)/N pass its NIC (the bus bandwidth of nccl-tests)."""
    size, per_node = 8 * n_nodes, 8
    sent = _rival(model, cluster, "megatron_1f1b", pipeline_ranks=1, ep_size=size, dedup=Dedup.NONE)
    nic, link = sent.exchange()
    rows = model.top_k * model.token_bytes * model.seq_length
    assert (nic + link) / rows == pytest.approx((size - 1) / size)
    assert nic / rows == pytest.approx((size - per_node) / size)


def test_af_pipe_sends_less_with_deduplication(model: ModelCosts, cluster: Cluster) -> None:
    choice = AFChoice(1, 16, 16, 1, 8)
    sent = [AFModel(model, cluster, replace(choice, dedup=d)).exchange()[0] for d in Dedup]
    assert sent[0] > sent[1] > sent[2]


def test_recompute_costs_time_and_saves_memory(model: ModelCosts, cluster: Cluster) -> None:
    plain = af_result(AFModel(model, cluster, AFChoice(1, 16, 16, 1, 8)))
    saved = af_result(
        AFModel(model, cluster, AFChoice(1, 16, 16, 1, 8, recompute_attention=True, recompute_ffn=True))
    )
    assert float(saved.critical.busy) > float(plain.critical.busy)
    assert all(saved.activation_bytes[role] < plain.activation_bytes[role] for role in ("attention", "ffn"))


def test_mfu_counts_no_recompute(model: ModelCosts, cluster: Cluster) -> None:
    result = af_result(AFModel(model, cluster, AFChoice(1, 16, 16, 1, 8, recompute_attention=True)))
    flops = 128 * model_flops(model) / result.step_s / 32 / cluster.gpu.flops
    assert result.mfu == pytest.approx(flops)


def test_the_search_pins_what_is_given(model: ModelCosts, cluster: Cluster) -> None:
    setting = Setting(model, cluster, 128, micro_batch_size=1, ep_size=16, simulated=1)
    assert best(setting, "megatron_1f1b").options["ep_size"] == 16
    found = best(replace(setting, pipeline_groups=2, ffn_group_size=8), "af_pipe").options
    assert (found["pipeline_groups"], found["ffn_group_size"]) == (2, 8)


def test_a_choice_that_fits_though_its_estimate_says_otherwise_is_found() -> None:
    """Name, estimated tokens/s, estimated memory, whether it fits when simulated; it is as fast as estimated."""
    choices = [
        ("slow", 2.0, 0.5, True),
        ("slower", 1.0, 0.5, True),
        ("fits", 3.0, 1.2, True),
        ("full", 4.0, 1.3, False),
        ("huge", 9.0, 3.0, True),
    ]
    models = [SimpleNamespace(depth=1, choice=choice) for choice in choices]
    simulated: list[str] = []

    def run(model: Any, _: Any) -> Any:
        name, speed, _, fits = model.choice
        simulated.append(name)
        return _result(fits, speed, options={"name": name})

    found = search._fastest(models, lambda m: search.Estimate(*m.choice[1:3]), run, 2)  # type: ignore[type-var]
    assert found is not None and found.options["name"] == "fits"
    assert simulated == ["slow", "slower", "full", "fits"]


def test_the_best_of_each_depth_is_simulated_unless_it_cannot_be_faster() -> None:
    """(groups, estimate, truth): estimates of two groups are too high here; four cannot reach what was found. The shallowest
    is simulated first.
    """
    choices = [(2, 9.0, 3.0), (2, 8.0, 3.0), (1, 6.0, 5.0), (1, 5.0, 9.0), (4, 3.0, 4.0)]
    models = [SimpleNamespace(depth=c[0], choice=c) for c in choices]
    simulated: list[float] = []

    def run(model: Any, _: Any) -> Any:
        simulated.append(model.choice[1])
        return _result(True, model.choice[2])

    found = search._fastest(models, lambda m: search.Estimate(m.choice[1], 0.5), run, 1)  # type: ignore[type-var]
    assert found is not None and found.tokens_per_s_per_gpu == 5.0 and simulated == [6.0, 9.0]


def test_where_the_shortest_order_does_not_fit_one_that_holds_less_is_taken() -> None:
    whole = model_costs(find_model("DeepSeek-MoE-16B"), seq_length=8192)
    choice = AFChoice(1, 32, 32, 1, 16, Dedup.NODE, recompute_ffn=True, in_flight=4, order="list")
    af = AFModel(whole, find_cluster("H800-SXM5", 8), choice)
    alone = [af_result(af, program=af.program(order.schedule())) for order in af.orders()]
    assert not alone[0].fits and any(one.fits for one in alone)
    found = af_result(af)
    assert found.fits and found.step_s > alone[0].step_s


def test_a_choice_is_simulated_only_if_it_can_beat_what_was_found(
    model: ModelCosts, cluster: Cluster
) -> None:
    af = AFModel(model, cluster, AFChoice(2, 8, 8, 1, 16, Dedup.NODE, in_flight=8, order="list"))
    alone = af_result(af)
    slower = replace(alone, step_s=1.1 * alone.step_s)
    found = af_faster(af, slower)
    assert isinstance(found, Result) and found.step_s == alone.step_s
    assert af_faster(af, replace(alone, step_s=0.9 * alone.step_s)) == Beaten(fits=True)


@pytest.mark.parametrize(("in_flight", "order"), [(4, "in_order"), (6, "list")])
def test_in_order_is_taken_where_it_is_faster_than_any_list(in_flight: int, order: str) -> None:
    spec = replace(find_model("DeepSeek-MoE-16B"), layers=layer_pattern(6))
    choice = AFChoice(2, 16, 16, 1, 16, Dedup.NODE, in_flight=in_flight, order="list")
    af = AFModel(model_costs(spec, seq_length=8192), find_cluster("H800-SXM5", 8), choice)
    by_order = {
        "list": af_result(af),
        "in_order": af_result(replace(af, choice=replace(choice, order="in_order"))),
    }
    found = af_faster(af, None)
    assert isinstance(found, Result) and found.options["order"] == order
    assert found.step_s == by_order[order].step_s == min(result.step_s for result in by_order.values())


def test_a_choice_that_does_not_fit_is_worth_simulating_only_where_nothing_fits(model: ModelCosts) -> None:
    small = find_cluster("H800-SXM5", 4)
    tight = replace(small, gpu=replace(small.gpu, memory_bytes=10**10))
    choice = AFChoice(2, 8, 8, 1, 16, Dedup.NODE, in_flight=8, order="list")
    full, roomy = (af_result(AFModel(model, on, choice)) for on in (tight, small))
    assert not full.fits and roomy.fits
    again = af_faster(AFModel(model, tight, choice), None)
    assert isinstance(again, Result) and again.step_s == full.step_s
    slow = replace(roomy, step_s=10 * roomy.step_s)
    assert af_faster(AFModel(model, tight, choice), slow) == Beaten(fits=False)


def test_what_lists_hold_at_least_is_never_more_than_a_run_of_them_holds(
    model: ModelCosts, cluster: Cluster
) -> None:
    af = AFModel(model, cluster, AFChoice(2, 8, 8, 1, 16, Dedup.NODE, in_flight=8, order="list"))
    order = af.orders()[0]
    program = af.program(order.schedule())
    kept, received = af.activation_bytes(), af.message_bytes()
    activations, least = order.held(kept), least_bytes(program.schedule, kept, received)
    peak = simulate_program(program).peak_bytes(kept, received)
    for group in af.topology.groups:
        assert activations[group] < least[group] <= peak[group]


def test_no_sizes_that_fit_is_an_error(model: ModelCosts, cluster: Cluster) -> None:
    with pytest.raises(InputError, match="no sizes of megatron_1f1b fit"):
        best(Setting(model, cluster, 128, ep_size=24), "megatron_1f1b")


def test_sizes_that_contradict_each_other_are_refused(model: ModelCosts, cluster: Cluster) -> None:
    with pytest.raises(InputError, match="does not divide 32 GPUs"):
        _rival(model, cluster, "tutel", pipeline_ranks=3)
    with pytest.raises(InputError, match="do not fit on 32 GPUs"):
        AFModel(model, cluster, AFChoice(1, 32, 16, 1, 8))
