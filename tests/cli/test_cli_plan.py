from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CommandLine = Callable[..., tuple[int, str, str]]

PROBLEM = {
    "attention_flops": 3e12,
    "ffn_flops": 1e12,
    "exchange_bytes": 1e6,
    "gpus": 8,
    "nics": 8,
    "gpu_flops": 989e12,
    "nic_bytes_per_s": 50e9,
}


def written(folder: Path, document: object) -> str:
    path = folder / "problem.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_json_has_the_promised_fields(tmp_path: Path, disagmoe: CommandLine) -> None:
    status, out, err = disagmoe("plan", "--problem", written(tmp_path, PROBLEM), "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert set(document) == {
        "schema_version", "attention_gpus", "ffn_gpus", "attention_nics", "ffn_nics", "t_attention_s", "t_ffn_s",
        "t_star_s", "balance_score", "solver",
    }  # fmt: skip
    assert set(document["solver"]) == {"name", "status", "bound", "gap", "seconds"}
    assert (document["attention_gpus"], document["ffn_gpus"]) == (6, 2)


def test_people_see_the_split_and_what_limits_it(tmp_path: Path, disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe("plan", "--problem", written(tmp_path, PROBLEM))
    assert status == 0
    for word in ("attention", "experts", "compute", "optimal", "bound"):
        assert word in out


def test_allowed_sizes_restrict_the_split(tmp_path: Path, disagmoe: CommandLine) -> None:
    problem = written(tmp_path, {**PROBLEM, "allowed_ffn_gpus": [4, 5]})
    _, out, _ = disagmoe("plan", "--problem", problem, "--json")
    assert json.loads(out)["ffn_gpus"] == 4


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ({}, "missing field 'attention_flops', 'ffn_flops'"),
        ({**PROBLEM, "gpu": 3}, "unknown field 'gpu'"),
        ({**PROBLEM, "gpus": 1}, "gpus must be a whole number from 2"),
        ({**PROBLEM, "gpus": None}, "got None"),
        ({**PROBLEM, "ffn_flops": -1}, "ffn_flops must be a positive number"),
        ({**PROBLEM, "ffn_flops": float("nan")}, "ffn_flops must be a positive number"),
        ({**PROBLEM, "ffn_flops": {"a": 1}}, "ffn_flops must be a positive number"),
        ({**PROBLEM, "allowed_attention_gpus": [9]}, "no split of 8 GPUs"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_problem_is_one_line_and_status_2(
    document: object, message: str, tmp_path: Path, disagmoe: CommandLine
) -> None:
    status, out, err = disagmoe("plan", "--problem", written(tmp_path, document), "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("disagmoe: error: ") and message in err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, disagmoe: CommandLine) -> None:
    status, _, err = disagmoe("plan", "--problem", str(tmp_path / "none.json"))
    assert status == 2 and "none.json" in err and "No such file" in err


def test_a_problem_and_a_model_do_not_go_together(tmp_path: Path, disagmoe: CommandLine) -> None:
    status, _, err = disagmoe("plan", "--problem", written(tmp_path, PROBLEM), "--model", "deepseek-moe")
    assert status == 2 and "--model" in err
