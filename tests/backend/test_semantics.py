"""What a script may do besides a plain loop, and what it is told when it may not. Real processes over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lockstep import outcomes_of_bad_calls, run_lockstep
from ranks import Case, die_in_the_middle_of_a_step

SMALL = Case(family="gathered_einsum", attention=1, ffn=2, n_microbatches=2, model={"n_layers": 1})


@pytest.fixture(scope="module")
def ranks(pool):
    return pool.run(run_lockstep, SMALL, world_size=3, process_group=False, timeout_s=500)


def test_evaluation_new_shapes_accumulation_and_clipping_equal_eager(ranks):
    for rank in ranks:
        assert len(rank["errors"]) == 11
        assert all(error <= 1e-4 for error in rank["errors"].values()), rank["errors"]


def test_the_state_dict_has_the_models_names_and_shapes_on_every_rank(ranks):
    for rank in ranks:
        assert rank["shapes"] == rank["expected_shapes"]


def test_the_global_random_state_stays_in_step(ranks):
    assert all(torch.equal(rank["random_state"], ranks[0]["random_state"]) for rank in ranks)


@pytest.fixture(scope="module")
def refusals(pool):
    case = replace(SMALL, ffn=1)
    return pool.run(outcomes_of_bad_calls, case, world_size=2, timeout_s=500)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("own clipping", "use disagmoe_compile.clip_grad_norm_"),
        ("touching logits", "gather_outputs"),
        ("twice backward", "backward() a second time"),
        ("other batches", "rank 1 differs from rank 0 in the batch"),
        ("eager call", "call what torch.compile(model) returned"),
        ("eager call of a copy", "call what torch.compile(model) returned"),
        ("compiled copy", "is a copy of a model that is spread over ranks"),
        ("pickled", "full_state_dict"),
        ("step after a skipped backward", "rank 1 differs from rank 0 in the backward() calls before"),
        ("call after a skipped backward", "rank 1 differs from rank 0 in the backward() calls before"),
        ("converted", "convert or move the model before its first call"),
        ("DistributedDataParallel", "compile the model itself"),
        ("no MoE region", "no MoE region found"),
        ("world size", "group sizes do not match the world size: attention_group_size=7, world size 2"),
        ("graph break", "lockstep.py:"),
        ("loop over hit experts", 'model.set_experts_implementation("grouped_mm")'),
    ],
)
def test_bad_input_is_one_clear_line_on_every_rank(refusals, what, says):
    for messages in refusals:
        assert says in messages[what]
        assert "\n" not in messages[what]


def test_a_rank_killed_in_the_middle_of_a_step_is_named_by_the_others(pool, tmp_path):
    folder = str(tmp_path)
    pool.outcomes(die_in_the_middle_of_a_step, SMALL, 2, folder, world_size=3, timeout_s=500)
    for survivor in ("0", "1"):
        told = (tmp_path / survivor).read_text()
        assert "rank 2" in told and "action" in told
