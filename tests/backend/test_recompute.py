"""recompute="stage": the same numbers bit for bit, masks and counts included, and fewer bytes held for backwards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from counting_models import CountingModel, counting_batch
from saved_bytes import SavedBytes
from test_dropout import Dropping, batch

from disagmoe_compile.plan.completeness import peak_activation_bytes
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.rng import derive_seed, private_rng
from disagmoe_compile.testing.virtual import VirtualRun, capture_call, run_captured

WORLD = {"attention_group_size": 2, "ffn_group_size": 2, "n_microbatches": 3}


def assert_bitwise_equal(one: VirtualRun, other: VirtualRun) -> None:
    assert one.loss == other.loss
    assert one.gradients.keys() == other.gradients.keys()
    assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


@pytest.fixture(scope="module")
def counting():
    torch.manual_seed(0)
    return capture_call(CountingModel(), counting_batch(batch=12))


@pytest.fixture(scope="module")
def plain(counting) -> tuple[VirtualRun, SavedBytes]:
    saved = SavedBytes()
    return run_captured(counting, **WORLD, stage_compiler="aot_eager", edit_workers=saved), saved


def test_numbers_and_counts_stay_and_held_bytes_shrink_on_the_side_that_recomputes(counting, plain):
    run, full = plain
    assert run.buffers["blocks.0.moe.tokens_per_expert"].sum() == 4 * 7 + 12 * 5 * 2
    for recompute, sides in (("stage", "AF"), ("ffn", "F")):
        kept = SavedBytes()
        again = run_captured(
            counting, **WORLD, stage_compiler="aot_eager", recompute=recompute, edit_workers=kept
        )
        assert again.plan.options["recompute"] == recompute
        assert_bitwise_equal(run, again)
        assert all(torch.equal(run.buffers[name], again.buffers[name]) for name in run.buffers)
        for rank, peak in kept.peak.items():
            side = "A" if rank < WORLD["attention_group_size"] else "F"
            assert (peak < full.peak[rank]) if side in sides else (peak == full.peak[rank])


COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "recompute", ["none", "attention", "ffn", pytest.param("stage", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_held_bytes_peak_where_the_plan_says(counting, compiler, recompute):
    """One FFN rank gets every token, so routing has no part in it."""
    saved = SavedBytes()
    world = {"attention_group_size": 2, "ffn_group_size": 1, "n_microbatches": 6, "microbatches_in_flight": 2}
    run = run_captured(counting, **world, stage_compiler=compiler, recompute=recompute, edit_workers=saved)
    planned = peak_activation_bytes(run.plan)
    for rank, peak in saved.peak.items():
        assert peak == pytest.approx(planned[run.plan.topology.group_of_rank(rank)], rel=0.1)


@pytest.fixture(scope="module")
def dropping():
    """Every token's scores are equal: a second routing that broke ties in another way would show."""
    model = Dropping()
    with torch.no_grad():
        model.moe.router.weight.zero_()
    return capture_call(model, batch())


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_second_forward_draws_the_same_masks_and_routes_ties_the_same_way(dropping, compiler):
    run, again = (
        run_captured(dropping, **WORLD | {"n_microbatches": 2}, stage_compiler=compiler, recompute=recompute)
        for recompute in ("none", "stage")
    )
    assert_bitwise_equal(run, again)


def test_other_masks_in_the_second_forward_are_noticed(dropping):
    calls: Counter[tuple[int, int]] = Counter()

    def draw_anew(workers):
        for worker in workers:
            if isinstance(worker, AttentionWorker):
                worker._rng = lambda spec, microbatch, w=worker: rng_of(w, spec.index, microbatch)

    def rng_of(worker, stage, microbatch):
        key = (worker.rank, stage, microbatch)
        calls[key] += 1
        seed = derive_seed(0, microbatch, stage, worker.member) + calls[key] - 1
        return private_rng(seed, worker.device)

    world = WORLD | {"n_microbatches": 2}
    run = run_captured(dropping, **world)
    again = run_captured(dropping, **world, recompute="stage", edit_workers=draw_anew)
    assert run.loss == again.loss
    with pytest.raises(AssertionError):
        assert_bitwise_equal(run, again)
