"""`disagmoe simulate` and `disagmoe reproduce` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from disagmoe_compile.cli.main import run
from disagmoe_compile.plan.action import COMPUTE_KINDS
from disagmoe_compile.plan.serialize import dump
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.simulator.plan_program import Durations
from disagmoe_compile.simulator.simulate import simulate
from disagmoe_compile.testing.plans import example_plan


def _json(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        run([*arguments, "--json"])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def _abstract(name: str, times: str, *options: str) -> list[str]:
    return ["simulate", "--schedule", name, "--stage-times", times, *options]


def test_abstract_pipelines_give_makespan_bubble_and_idle(capsys: pytest.CaptureFixture[str]) -> None:
    document = _json(
        capsys, _abstract("1f1b", '{"F": 0.1, "B": 0.2}', "--ranks", "4", "--n-microbatches", "8")
    )
    assert (document["makespan"], document["bubble"]) == (3.3, 0.9)
    assert set(document["idle"]) == {f"rank.{k}" for k in range(4)}


def test_abstract_af_pipe_forward(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--pipeline-groups", "2", "--layers", "4", "--n-microbatches", "8", "--forward-only")
    document = _json(capsys, _abstract("af_pipe", '{"A": 3, "F": 2, "C": 1}', *options))
    assert document["bubble"] == 10
    assert set(document["idle"]) == {"attention.0", "attention.1", "ffn.0", "ffn.1"}


def _mixed(*options: str) -> list[str]:
    fixed = "simulate --model OLMoE --cluster H800 --seq-length 2048 --sequences-per-gpu 2"
    return [*fixed.split(), *options]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_abstract("nothing", "{}"), "unknown schedule 'nothing'; one of 1f1b"),
        (
            _abstract("1f1b", '{"F": -1, "B": 2}', "--ranks", "2", "--n-microbatches", "2"),
            "at least 0, got -1",
        ),
        (
            _abstract("1f1b", '{"F": 1, "B": 2}', "--ranks", "2", "--n-microbatches", "0"),
            "n_microbatches must be",
        ),
        (_abstract("1f1b", '{"F": 1}', "--ranks", "2", "--n-microbatches", "2"), "needs the stage time B"),
        (_abstract("1f1b", "{", "--ranks", "2", "--n-microbatches", "2"), "is not JSON"),
        (_abstract("1f1b", '{"F": 1, "B": 2}', "--n-microbatches", "2"), "needs --ranks"),
        (
            _abstract("zb1p", '{"F": 1, "B": 2, "W": 3}', "--ranks", "2", "--n-microbatches", "2"),
            "cannot be longer",
        ),
        (
            _abstract(
                "af_pipe",
                '{"A":1,"F":1,"C":1}',
                "--pipeline-groups",
                "3",
                "--layers",
                "4",
                "--n-microbatches",
                "2",
            ),
            "4 layers are not divisible by 3",
        ),
        (
            _abstract("dualpipe", '{"F":1,"B":2,"W":1,"FB":3}', "--ranks", "3", "--n-microbatches", "8"),
            "even number of ranks",
        ),
        (["simulate"], "give --model, --cluster and --seq-length"),
        (["simulate", "--plan", "nowhere.json"], "cannot read plan file nowhere.json"),
        (["reproduce", "fig99"], "unknown figure 'fig99'"),
        (_mixed("--ffn-cluster", "H99", "--ffn-nodes", "1"), "cluster 'H99' is not in the catalogue"),
        (_mixed("--nodes", "1", "--ffn-cluster", "H20"), "say with --ffn-nodes how many --ffn-cluster has"),
        (_mixed("--ffn-nodes", "1"), "--ffn-nodes needs --ffn-cluster"),
        (_mixed("--ffn-cluster", "H20", "--plan", "plan.json"), "a plan has one kind of nodes"),
        (_mixed("--ffn-cluster", "H20", "--schedule", "1f1b"), "a plan has one kind of nodes"),
        (_mixed("--ffn-cluster", "H20", "--ffn-nodes", "0"), "nodes of cluster 'H20' must be a whole number"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error and error.count("\n") == 1


def test_a_model_on_a_cluster_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    arguments = (
        "simulate --model OLMoE --cluster H800 --nodes 1 --seq-length 2048 --sequences-per-gpu 2 --ep-size 8 "
        "--pipeline-groups 1 --micro-batch-size 1"
    )
    extra = ["--schedules", "af_pipe,megatron_1f1b", "--trace", str(trace), "--picture", str(picture)]
    document = _json(capsys, [*arguments.split(), *extra])
    assert [row["schedule"] for row in document["results"]] == ["af_pipe", "megatron_1f1b"]
    for row in document["results"]:
        assert row["step_s"] >= row["lower_bound_s"] * 0.999
        assert {
            "tokens_per_s_per_gpu",
            "exposed_comm_s",
            "bubble_s",
            "peak_activation_bytes",
            "options",
        } <= set(row)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "0SEND[dispatch.0]0"} <= names
    assert picture.stat().st_size > 0


def test_two_kinds_of_nodes_keep_the_keys_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "--nodes 1 --ep-size 4 --micro-batch-size 1 --pipeline-groups 1 --schedules af_pipe,megatron_1f1b"
    one = _json(capsys, _mixed(*fixed.split()))
    two = _json(capsys, _mixed(*fixed.split(), "--ffn-cluster", "H20", "--ffn-nodes", "1"))
    assert (two["cluster"], two["gpus"]) == ("1 x H800-SXM5 + 1 x H20", 16)
    for row, other in zip(one["results"], two["results"], strict=True):
        assert row.keys() == other.keys()
    ours, rival = (row["options"]["placement"] for row in two["results"])
    assert ours == "attention on H800-SXM5, FFN on H20"
    assert rival.startswith(("all in step", "side by side", "1 x H800-SXM5 alone", "1 x H20 alone"))


def test_a_plan_file_is_simulated_action_by_action(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    dump(example_plan(Topology(2, 2, 1, 1, 2)), path)
    (row,) = _json(capsys, ["simulate", "--plan", str(path)])["results"]
    assert row["schedule"] == "af_pipe" and row["step_s"] > 0


def test_beside_its_run_a_plan_has_the_name_of_its_schedule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run is one that takes as long as simulated, three times."""
    plan = example_plan(Topology(1, 1, 2, 2, 2), 3, schedule="af_pipe_in_order")
    dump(plan, tmp_path / "plan.json")
    seconds = {(kind, stage): 1.0 for kind in COMPUTE_KINDS for stage in range(plan.topology.n_stages)}
    simulated = simulate(plan, Durations(seconds, {transfer.name: 0.5 for transfer in plan.transfers}))
    once = [event for group in simulated.groups for event in simulated.trace_events(group)]
    slices = [
        {
            "ph": "X",
            "pid": 0,
            "name": e.action,
            "ts": e.start * 1e6,
            "dur": (e.end - e.start) * 1e6,
            "args": {"step": step},
        }
        for step in range(3)
        for e in once
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": slices}))
    files = ["--plan", str(tmp_path / "plan.json"), "--timeline", str(tmp_path / "timeline.json")]
    _json(capsys, ["simulate", *files, "--trace", str(tmp_path / "trace.json")])
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {f"af_pipe_in_order {group} (simulated)" for group in plan.topology.groups}


def test_a_plan_that_breaks_a_rule_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    dump(example_plan(Topology(2, 2, 1, 1, 2)), path)
    document = json.loads(path.read_text())
    document["training"]["actions"]["ffn.0"].pop()
    path.write_text(json.dumps(document))
    with pytest.raises(SystemExit) as end:
        run(["simulate", "--plan", str(path)])
    assert end.value.code == 2 and "the plan breaks" in capsys.readouterr().err


def test_a_figure_is_written_with_its_verdicts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = _json(capsys, ["reproduce", "fig3", "--out", str(tmp_path)])
    (figure,) = document["figures"]
    judged = [row for row in figure["rows"] if row["paper"] is not None]
    assert all(row["verdict"] in ("reproduced", "direction only", "not reproduced") for row in judged)
    assert all(row["reason"] for row in judged if row["verdict"] != "reproduced")
    assert {p.name for p in tmp_path.iterdir()} >= {"fig3.csv", "fig3.txt"}


def test_planning_and_simulating_import_no_torch() -> None:
    code = (
        "import sys, disagmoe_compile as dm, disagmoe_compile.cli.main; dm.simulate, dm.plan, dm.load_plan; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
