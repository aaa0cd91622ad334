"""What `disagmoe train` refuses before it starts any process."""

from __future__ import annotations

import shutil

import pytest
import torch

from disagmoe_compile.cli import train_checks
from disagmoe_compile.cli.train_checks import (
    GroupSizes,
    affordable_compiler,
    check_batch,
    check_experts,
    num_experts_of,
)
from disagmoe_compile.errors import InputError


def _sizes(**given: int) -> GroupSizes:
    names = ("attention", "ffn", "pipeline_groups", "n_microbatches", "nproc")
    return GroupSizes(*(given.get(name) for name in names))


@pytest.mark.parametrize(
    ("given", "world_size"),
    [
        ({}, 4),
        ({"attention": 2, "ffn": 2}, 4),
        ({"attention": 2, "ffn": 1, "pipeline_groups": 2}, 6),
        ({"attention": 1, "ffn": 1, "nproc": 4}, 4),
        ({"nproc": 6}, 6),
        ({"pipeline_groups": 3}, 6),
        ({"attention": 1}, 4),
    ],
)
def test_the_world_size_is_what_the_sizes_make(given: dict[str, int], world_size: int) -> None:
    assert _sizes(**given).world_size() == world_size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention": 2, "ffn": 2, "nproc": 6}, "--nproc 6.* need 4 ranks"),
        ({"attention": 4}, "4 ranks cannot be split: --attention-group-size 4"),
        ({"attention": 2, "nproc": 2}, "the least is --nproc 3"),
        ({"pipeline_groups": 3, "nproc": 4}, "4 ranks cannot be split"),
        ({"nproc": 1}, "1 ranks cannot be split"),
        ({"ffn": 0}, "--ffn-group-size must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_named(given: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _sizes(**given).world_size()


def test_the_ffn_size_that_an_attention_size_leaves_is_known() -> None:
    assert _sizes(attention=1, nproc=10).ffn_at(10) == 9
    assert _sizes(nproc=10).ffn_at(10) is None


def test_more_ffn_ranks_than_experts_are_refused() -> None:
    check_experts(8, 8)
    check_experts(9, None)
    with pytest.raises(InputError, match="--ffn-group-size 9 is more than the model's 8 experts"):
        check_experts(9, 8)


def test_a_batch_has_at_least_one_sample() -> None:
    check_batch(1)
    with pytest.raises(InputError, match="--batch-size must be at least 1, got 0"):
        check_batch(0)


def test_the_number_of_experts_is_read_from_any_familys_config() -> None:
    pytest.importorskip("transformers")
    from disagmoe_compile.models.hf import build

    assert num_experts_of(build("mixtral", num_experts=4)[0]) == 4
    assert num_experts_of(build("deepseek_v3")[0]) == 8
    assert num_experts_of(torch.nn.Linear(1, 1)) is None


def test_without_a_compiler_another_stage_compiler_is_chosen_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_checks.shutil, "which", lambda name: None)
    compiler, why = affordable_compiler(None)
    assert compiler == "aot_eager"
    assert why is not None and "C++" in why


def test_the_compiler_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert affordable_compiler("inductor") == ("inductor", None)
