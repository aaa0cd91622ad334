"""Losses that the script computes from the outputs, batches that do not divide, gradients of inputs: real ranks equal eager."""

from __future__ import annotations

import pytest
from outside_losses import (
    outcomes_of_bad_backwards,
    run_losses_of_both_kinds,
    run_outside_losses,
    run_uneven_batches,
)

WORLDS = [(1, 1, 1), (2, 2, 1), (1, 3, 1), (3, 2, 1), (1, 1, 2), (2, 2, 2)]
BATCH = 5  # divides among the ranks and micro-batches of no world but the first


def options(world: tuple[int, int, int], compiler: str = "eager") -> dict[str, object]:
    attention, ffn, groups = world
    return {
        "attention_group_size": attention,
        "ffn_group_size": ffn,
        "pipeline_groups": groups,
        "n_microbatches": 2,
        "stage_compiler": compiler,
        "timeout_s": 60,
    }


def ranks_of(pool, script, world, *args, compiler="eager"):
    attention, ffn, groups = world
    size = groups * (attention + ffn)
    chosen = options(world, compiler)
    return pool.run(script, chosen, *args, world_size=size, process_group=False, timeout_s=500)


def assert_equal_to_eager(ranks, at_least: int) -> None:
    for errors in ranks:
        assert len(errors) >= at_least
        assert all(error <= 1e-4 for error in errors.values()), errors


def test_losses_outside_the_model_equal_eager(pool):
    assert_equal_to_eager(ranks_of(pool, run_outside_losses, (2, 1, 1), BATCH), 16)


def test_a_loss_of_the_model_and_one_of_its_outputs_together_equal_eager(pool):
    ranks = ranks_of(pool, run_losses_of_both_kinds, (1, 1, 2), BATCH, compiler="aot_eager")
    assert_equal_to_eager(ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("script", "argument", "at_least"),
    [
        (run_outside_losses, BATCH, 16),
        (run_losses_of_both_kinds, BATCH, 2),
        (run_uneven_batches, (5, 3, 1, 7), 6),
    ],
)
def test_every_world_equals_eager(pool, world, script, argument, at_least):
    assert_equal_to_eager(ranks_of(pool, script, world, argument), at_least)


def test_backwards_that_cannot_be_right_are_one_clear_line_and_the_next_call_works(pool):
    chosen = options((1, 1, 1))
    for told in pool.run(outcomes_of_bad_backwards, chosen, world_size=2, timeout_s=500):
        assert "backward() a second time" in told["twice"]
        assert "differentiate twice" in told["second derivative"]
        assert (
            "rank 1 differs from rank 0 in the gradients that backward() starts from" in told["other losses"]
        )
        assert "was changed in place after the forward" in told["parameter changed"]
        assert "rank 1 is at optimizer.step() where rank 0 is at backward()" in told["skipped"]
        assert told["executors left"] == 0
        assert told["afterwards"] == "no error"
