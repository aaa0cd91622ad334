"""A file of `disagmoe plan` inside the backend: its sizes are used, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.backend.sizing_file import with_sizing
from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError, PlanError
from disagmoe_compile.plan.serialize import dump
from disagmoe_compile.plan.sizing import Sizing, dump_sizing
from disagmoe_compile.testing.plans import example_plan

SIZING = Sizing(
    world_size=4, attention_gpus=3, ffn_gpus=1, pipeline_groups=1, attention_group_size=3, ffn_group_size=1,
    attention_nics=3, ffn_nics=1, n_microbatches=2, micro_batch_size=2, microbatches_in_flight=1, global_batch_size=12,
    seq_length=16, n_boundaries=1, num_experts=8, recompute={"attention": "none", "ffn": "none"}, shared_experts_on="attention",
    shard_optimizer=False, dedup="rank", t_attention_s=1.0, t_ffn_s=2.0, t_star_s=2.0, step_s=9.0, balance_score=2.0,
    tokens_per_s=10.0, memory_bytes={}, solver={}, binding=(),
)  # fmt: skip


PROGRAMS: Any = SimpleNamespace(experts=[SimpleNamespace(num_experts=8)], n_boundaries=1, tied_head=False)
"""Of a model with one layer of 8 experts: all that sizes are checked against."""


def options(folder: Path, sizing: Sizing = SIZING, **given: Any) -> Options:
    dump_sizing(sizing, folder / "plan.json")
    return Options(plan=str(folder / "plan.json"), **given)


def test_sizes_come_from_the_file(tmp_path: Path) -> None:
    topology, filled = choose_sizes(PROGRAMS, {}, options(tmp_path), 4)
    assert (topology.attention_group_size, topology.ffn_group_size) == (3, 1)
    assert (filled.n_microbatches, filled.microbatches_in_flight) == (2, 1)


@pytest.mark.parametrize(
    ("attention", "ffn", "option"),
    [
        ("none", "none", "none"),
        ("stage", "none", "attention"),
        ("none", "stage", "ffn"),
        ("stage", "stage", "stage"),
    ],
)
def test_recompute_of_either_side_and_deduplication_come_from_the_file(
    tmp_path: Path, attention: str, ffn: str, option: str
) -> None:
    sizing = replace(SIZING, recompute={"attention": attention, "ffn": ffn}, dedup="none")
    filled = with_sizing(options(tmp_path, sizing), PROGRAMS)
    assert (filled.recompute, filled.dedup) == (option, "none")
    with pytest.raises(PlanError, match="dedup=rank, and the option says none"):
        with_sizing(options(tmp_path, replace(sizing, dedup="rank"), dedup="none"), PROGRAMS)


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"do not match the world size: attention_group_size=3.*world size 6"
    ):
        choose_sizes(PROGRAMS, {}, options(tmp_path), 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 64}, "1 layers with 64 experts each, this model has 1 with 8"),
        ({"n_boundaries": 27}, "27 layers"),
        ({"shared_experts_on": "ffn"}, "plan again with --shared-experts-on attention"),
        ({"shard_optimizer": True}, "sharded optimizer state"),
        ({"dedup": "node"}, "dedup=node"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        with_sizing(options(tmp_path, replace(SIZING, **changes)), PROGRAMS)


def test_an_option_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="n_microbatches=2, and the option says 3"):
        with_sizing(options(tmp_path, n_microbatches=3), PROGRAMS)


def test_a_plan_of_actions_gives_its_schedule_and_refuses_another(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = replace(example_plan(schedule="af_pipe_in_order"), options={"schedule": "af_pipe_in_order"})
    dump(plan, path)
    assert with_sizing(Options(plan=str(path)), PROGRAMS).schedule == "af_pipe_in_order"
    with pytest.raises(
        PlanError, match="it has schedule=af_pipe_in_order, and the option says gpipe; leave the option out"
    ):
        with_sizing(Options(plan=str(path), schedule="gpipe"), PROGRAMS)
