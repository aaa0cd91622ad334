"""`disagmoe plan` for a model on a cluster: the promised document, and one line for whatever is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CommandLine = Callable[..., tuple[int, str, str]]

MODEL = (
    "plan",
    "--model",
    "deepseek-moe-16b",
    "--cluster",
    "h800",
    "--pipeline-groups",
    "1",
    "--micro-batch-size",
    "1",
)
FEW = (*MODEL, "--nodes", "2", "--seq-length", "4096", "--sequences-per-gpu", "4")


def test_json_has_the_promised_fields_and_they_agree(disagmoe: CommandLine, tmp_path: Path) -> None:
    out_file = tmp_path / "plan.json"
    status, out, err = disagmoe(*FEW, "--json", "--out", str(out_file))
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert {
        "world_size", "attention_gpus", "ffn_gpus", "pipeline_groups", "attention_group_size", "ffn_group_size",
        "attention_nics", "ffn_nics", "n_microbatches", "recompute", "shared_experts_on", "t_attention_s", "t_ffn_s", "t_star_s",
        "balance_score", "tokens_per_s", "memory_bytes", "solver", "binding",
    } <= set(found)  # fmt: skip
    assert set(found["memory_bytes"]) == {"attention", "ffn"}
    assert set(found["solver"]) == {"name", "status", "bound", "gap", "seconds"}
    assert found["world_size"] == found["attention_gpus"] + found["ffn_gpus"] == 16
    assert found["attention_nics"] + found["ffn_nics"] == 16
    assert max(found["memory_bytes"].values()) <= 80e9
    assert json.loads(out_file.read_text())["fingerprint"] == found["fingerprint"]
    assert found["inputs"]["model"]["name"] == "DeepSeek-MoE-16B"


def test_a_plan_that_cannot_be_written_is_shown_all_the_same(disagmoe: CommandLine, tmp_path: Path) -> None:
    status, out, err = disagmoe(*FEW, "--out", str(tmp_path / "nowhere" / "plan.json"))
    assert status == 2 and "cannot write the plan file" in err
    assert "tokens/s predicted" in out and "wrote" not in out


def test_people_see_sizes_limits_and_rivals(disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe(*FEW)
    assert status == 0
    for word in ("attention", "ffn", "tokens/s", "limited by", "optimal", "next best", "[ffn]"):
        assert word in out


def test_explain_shows_stages_ridges_and_one_more_and_draws_a_roofline(
    disagmoe: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roof.svg"
    status, out, _ = disagmoe(*FEW, "--alternatives", "0", "--explain", "--plot", str(picture))
    assert status == 0 and "<svg" in picture.read_text()
    for word in ("ridge", "one more", "A0", "F26", "A27", "busy in a step"):
        assert word in out


def test_refinement_on_simulated_steps_reports_every_trial_and_returns_the_fastest(
    disagmoe: CommandLine,
) -> None:
    arguments = (*FEW, "--alternatives", "0", "--refine", "simulated", "--trials", "2", "--json")
    status, out, err = disagmoe(*arguments)
    assert (status, err) == (0, "")
    found = json.loads(out)
    told = found["refinement"]
    rates = [t["step_s"] / (t["attention_group_size"] * t["n_microbatches"]) for t in told["trajectory"]]
    assert told["profile"] == "simulated" and len(rates) == 3
    assert told["best_step_s"] / found["global_batch_size"] == min(rates) <= rates[0]


def test_a_sweep_is_a_table_and_a_picture(disagmoe: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    arguments = (*MODEL, "--nodes", "2", "--sequences-per-gpu", "4", "--sweep", "seq-length=2048,4096")
    status, out, _ = disagmoe(*arguments, "--plot", str(picture), "--json")
    document = json.loads(out)
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert [row["seq_length"] for row in document["results"]] == document["values"] == [2048, 4096]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "give --model and --cluster and --seq-length"),
        (("plan", "--model", "olmoe", "--cluster", "h800"), "give --seq-length (or"),
        (
            (
                "plan",
                "--model",
                "gpt-5",
                "--cluster",
                "h800",
                "--seq-length",
                "8",
                "--sequences-per-gpu",
                "1",
            ),
            "gpt-5",
        ),
        ((*FEW, "--global-batch-size", "8"), "either global_batch_size or sequences_per_gpu"),
        ((*FEW, "--dedup", "some"), "--dedup must be one of none, rank, node"),
        ((*FEW, "--nic-share", "2"), "nic_share"),
        ((*FEW, "--plot", "x.bmp"), ".png or .svg"),
        ((*FEW, "--sweep", "colour=1"), "expected one of seq-length"),
        ((*FEW, "--sweep", "nodes=1,x"), "'x' is not a whole number"),
        ((*FEW, "--ffn-group-size", "1"), "memory[ffn]"),
        ((*FEW, "--refine", "measured"), "give --model hf:FAMILY"),
        ((*FEW, "--refine", "guessed"), "--refine must be one of measured, simulated"),
        ((*FEW, "--time-limit", "0"), "time_limit_s"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, disagmoe: CommandLine
) -> None:
    status, out, err = disagmoe(*arguments, "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("disagmoe: error: ") and message in err


def test_a_time_limit_gives_the_best_plan_so_far_its_gap_and_the_reason(disagmoe: CommandLine) -> None:
    status, out, err = disagmoe(*FEW, "--alternatives", "0", "--time-limit", "1e-9", "--json")
    solver = json.loads(out)["solver"]
    assert (status, err, solver["status"]) == (0, "", "maxTimeLimit")
    assert 0 <= solver["gap"] < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"nics_per_node": -1}, "nics_per_node"), ({"gpu_flops": None}, "flops")],
)
def test_a_cluster_file_with_a_wrong_number_names_it(
    change: dict[str, object], message: str, disagmoe: CommandLine, tmp_path: Path
) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"base": "H800-SXM5", **change}))
    status, _, err = disagmoe(*FEW[:4], str(path), *FEW[5:])
    assert status == 2 and message in err and "ours.json" in err


def test_no_solver_says_what_to_install(disagmoe: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyomo.contrib.solver.solvers.highs import Highs

    monkeypatch.setattr(Highs, "available", lambda self: False)
    status, _, err = disagmoe(*FEW)
    assert status == 2 and "pip install highspy" in err
