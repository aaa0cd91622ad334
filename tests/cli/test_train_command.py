"""`disagmoe train` from end to end: two real ranks, eager beside them, and what is left in the folder."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.plan.serialize import load

pytest.importorskip("transformers")

STEPS = 3
CommandLine = Callable[..., tuple[int, str, str]]


def _disagmoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from disagmoe_compile.cli.main import run; run()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunFolder, Path]:
    root = tmp_path_factory.mktemp("train")
    log = root / "steps.jsonl"
    result = _disagmoe(
        "train", "style:gathered_einsum", "--attention-group-size", "1", "--ffn-group-size", "1", "--n-microbatches", "2",
        "--steps", str(STEPS), "--batch-size", "4", "--seq-length", "16", "--stage-compiler", "eager", "--check",
        "--dedup", "none", "--payload-dtype", "float32", "--recompute", "ffn",
        "--json", "--output-dir", str(root / "run"), "--log-jsonl", str(log),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), RunFolder(root / "run"), log


def test_losses_equal_those_of_eager(trained: tuple[dict[str, Any], RunFolder, Path]) -> None:
    document, _, _ = trained
    assert len(document["losses"]) == len(document["eager_losses"]) == STEPS
    assert document["losses"] == pytest.approx(document["eager_losses"], rel=1e-5)
    assert document["max_relative_error"] < 1e-5


@pytest.mark.slow
def test_eager_takes_the_slices_of_the_ranks_where_a_model_mixes_samples() -> None:
    result = _disagmoe(
        "train", "style:gshard", "--attention-group-size", "1", "--ffn-group-size", "1", "--n-microbatches", "2",
        "--steps", "2", "--batch-size", "3", "--seq-length", "16", "--stage-compiler", "eager", "--check", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["max_relative_error"] < 1e-5


def test_each_rank_says_its_role_and_bytes(trained: tuple[dict[str, Any], RunFolder, Path]) -> None:
    attention, ffn = trained[0]["ranks"]
    assert (attention["role"], ffn["role"]) == ("attention", "ffn")
    expert = 32 * 96 + 96 + 48 * 32 + 32
    assert ffn["param_bytes"] == 2 * 8 * expert * 4, "both layers' experts and nothing else"
    for rank in (attention, ffn):
        assert rank["optimizer_bytes"] == 2 * rank["param_bytes"], "two moments of AdamW for what it owns"
        assert rank["sent_bytes"] > 0


def test_the_log_has_a_line_a_step(trained: tuple[dict[str, Any], RunFolder, Path]) -> None:
    document, folder, log = trained
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in lines] == document["losses"]
    assert log.read_text() == folder.losses.read_text()


def test_the_timeline_shows_the_actions_of_the_plan(trained: tuple[dict[str, Any], RunFolder, Path]) -> None:
    document, folder, _ = trained
    plan = load(folder.plan)
    assert plan.fingerprint == document["plan"]
    assert plan.training is not None
    slices = [row for row in json.loads(folder.timeline.read_text())["traceEvents"] if row["ph"] == "X"]
    for rank in range(2):
        actions = plan.training.of(plan.topology.group_of_rank(rank))
        shown = Counter(row["name"] for row in slices if row["pid"] == rank and row["args"]["step"] == 0)
        assert shown == Counter(map(str, actions))


def test_the_plan_has_the_options_of_the_command_line(
    trained: tuple[dict[str, Any], RunFolder, Path],
) -> None:
    options = load(trained[1].plan).options
    names = ("dedup", "payload_dtype", "recompute", "stage_compiler")
    assert [options[name] for name in names] == ["none", "float32", "ffn", "eager"]


def test_the_graph_after_every_pass_is_kept(trained: tuple[dict[str, Any], RunFolder, Path]) -> None:
    names = sorted(path.name for path in trained[1].graphs.iterdir())
    assert len(names) >= 5
    assert [name[:2] for name in names] == [f"{i:02d}" for i in range(len(names))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf:qwen3moe",), "unknown MoE family 'qwen3moe'"),
        (("hf:qwen3_moe", "--schedule", "fast"), "option schedule must be one of"),
        (("hf:qwen3_moe", "--dedup", "node"), "dedup='node' is not supported by this version"),
        (("hf:qwen3_moe", "--payload-dtype", "int8"), "option payload_dtype must be one of"),
        (("hf:qwen3_moe", "--plan", "/no/such/plan.json"), "cannot read plan file"),
        (
            ("hf:qwen3_moe", "--plan", "p.json", "--recompute", "stage"),
            "--recompute is in the plan file already",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_two(
    disagmoe: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = disagmoe("train", *arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("disagmoe: error: ")
    assert message in line


def test_a_port_in_use_is_one_line_and_nothing_starts(disagmoe: CommandLine, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        folder = tmp_path / "run"
        status, _, err = disagmoe(
            "train", "hf:qwen3_moe", "--master-port", str(port), "--output-dir", str(folder)
        )
    assert status == 2
    assert err.startswith(f"disagmoe: error: port {port} cannot be used")
    assert not folder.exists()
