"""The file of a sizing: what is written is read back, and a file that makes no sense is one clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import disagmoe_compile
from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.sizing import Sizing, dump_sizing, parse_sizing


def a_sizing(**changes: Any) -> Sizing:
    fields: dict[str, Any] = {
        "world_size": 4,
        "attention_gpus": 3,
        "ffn_gpus": 1,
        "pipeline_groups": 1,
        "attention_group_size": 3,
        "ffn_group_size": 1,
        "attention_nics": 3,
        "ffn_nics": 1,
        "n_microbatches": 2,
        "micro_batch_size": 1,
        "microbatches_in_flight": 1,
        "global_batch_size": 6,
        "seq_length": 16,
        "n_boundaries": 1,
        "num_experts": 8,
        "recompute": {"attention": "none", "ffn": "none"},
        "shared_experts_on": "attention",
        "shard_optimizer": False,
        "dedup": "rank",
        "t_attention_s": 1.0,
        "t_ffn_s": 2.0,
        "t_star_s": 2.0,
        "step_s": 9.0,
        "balance_score": 2.0,
        "tokens_per_s": 10.0,
        "memory_bytes": {"attention": 1.0, "ffn": 1.0},
        "solver": {"name": "HiGHS", "seconds": 0.1},
        "binding": ("compute[ffn]",),
    }
    return Sizing(**{**fields, **changes})


def test_a_file_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    dump_sizing(a_sizing(), path)
    assert load_plan(path) == a_sizing()


def test_the_fingerprint_is_of_the_content_and_not_of_the_solvers_clock() -> None:
    assert a_sizing().fingerprint == a_sizing(solver={"seconds": 3.0}).fingerprint
    assert a_sizing().fingerprint != a_sizing(seq_length=17).fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_gpus": 4}, "attention_gpus is 4, and pipeline_groups \\* attention_group_size is 3"),
        ({"world_size": 5}, "world_size is 5"),
        ({"global_batch_size": 7}, "global_batch_size is 7"),
        ({"ffn_group_size": 0}, "ffn_group_size must be a whole number"),
        ({"step_s": -1.0}, "step_s must be a positive number"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        a_sizing(**changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=9), "schema_version 9"),
        (lambda d: d.update(gpus=3), "unknown key gpus"),
        (lambda d: d.pop("dedup"), "missing key dedup"),
        (lambda d: d.update(binding="x"), "binding must be a list"),
        (lambda d: d.update(seq_length=17), "it was edited"),
    ],
)
def test_a_malformed_file_is_named_with_its_fault(edit: Any, message: str, tmp_path: Path) -> None:
    document = a_sizing().to_dict()
    edit(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=f"plan.json: .*{message}"):
        load_plan(path)


def test_an_edited_file_is_taken_once_its_fingerprint_is_gone() -> None:
    document = {**a_sizing().to_dict(), "microbatches_in_flight": 2}
    document.pop("fingerprint")
    assert parse_sizing(document).microbatches_in_flight == 2


def test_it_loads_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    dump_sizing(a_sizing(), path)
    code = (
        f"import sys, disagmoe_compile as dm; dm.load_plan({str(path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_planner_is_called_by_its_public_name() -> None:
    with pytest.raises(TypeError, match="model_spec"):
        disagmoe_compile.plan()
