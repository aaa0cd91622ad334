from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

CommandLine = Callable[..., tuple[int, str, str]]


def test_the_models_are_listed_with_parameters_and_sources(disagmoe: CommandLine) -> None:
    status, out, _ = disagmoe("models", "--json")
    models = {model["name"]: model for model in json.loads(out)["models"]}
    assert status == 0 and len(models) == 20
    mixtral = models["Mixtral-8x7B"]
    assert mixtral["total_parameters"] == 46702792704 and mixtral["published_total"] == 46.7e9
    assert mixtral["layer_kinds"] == {"full attention, experts": 32}
    assert all(model["sources"] for model in models.values())


def test_people_get_a_table_of_models(disagmoe: CommandLine, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = disagmoe("models")
    assert "DeepSeek-V3" in out and "671" in out and "gqa + sliding" in out
    explained = [line.split(":")[0] for line in out.splitlines() if "from the published figure" in line]
    assert explained == ["DeepSeek-V2-Lite", "Qwen3-Next-80B-A3B"]


def test_one_model_by_a_beginning_or_by_a_file(disagmoe: CommandLine, tmp_path: Path) -> None:
    _, out, _ = disagmoe("models", "mixtral-8x22", "--json")
    assert [model["name"] for model in json.loads(out)["models"]] == ["Mixtral-8x22B"]
    (tmp_path / "bad.json").write_text('{"num_experts": 8}')
    status, out, err = disagmoe("models", str(tmp_path / "bad.json"))
    assert status == 2 and not out
    assert err.count("\n") == 1 and "bad.json': missing field" in err
