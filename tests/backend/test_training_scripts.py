"""What training scripts do, on real ranks, against eager. The default run has the habits that reach deepest into autograd, in the
smallest world with two ranks of one kind; every habit in every world is marked slow."""

from __future__ import annotations

import pytest
from training_scripts import SCRIPTS, run_scripts, threads_of_process_groups

SHAPES = [(1, 1, 1), (2, 2, 1), (1, 3, 1), (3, 2, 1), (1, 1, 2), (2, 2, 2)]
DEEPEST = (
    "gradient_scaler_with_an_overflow",
    "gradient_hooks",
    "frozen_parameters",
    "unusual_signatures",
)
# Rounding of half precision, otherwise only the order of sums differs.
TOLERANCE = {"half precision": 1e-3, "half precision outside": 1e-3}


def run(pool, shape: tuple[int, int, int], names: tuple[str, ...]) -> None:
    attention, ffn, groups = shape
    options = {
        "attention_group_size": attention,
        "ffn_group_size": ffn,
        "pipeline_groups": groups,
        "n_microbatches": 2,
        "stage_compiler": "eager",
        "timeout_s": 60,
    }
    world_size = groups * (attention + ffn)
    for rank, found in enumerate(
        pool.run(run_scripts, options, names, world_size=world_size, process_group=False, timeout_s=500)
    ):
        for name in names:
            errors = found.get(name, "not run: a script before it failed")
            assert isinstance(errors, dict), f"rank {rank}, {name}: {errors}"
            assert errors and all(error <= TOLERANCE.get(what, 1e-4) for what, error in errors.items()), (
                f"rank {rank}, {name}: {errors}"
            )


def test_scripts_train_as_eager(pool):
    run(pool, (1, 2, 1), DEEPEST)
    # the models are gone, and nothing may hold their process groups: their threads would wake up hundreds of times a second
    left = pool.run(threads_of_process_groups, world_size=3, process_group=False)
    assert left == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_train_as_eager_in_every_world(pool, shape, name):
    run(pool, shape, (name,))
