"""Artifacts of torch's structured trace, read as tlparse reads them, and the log of one name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._guards import CompileId, TraceId
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log

import disagmoe_compile as dm
from disagmoe_compile.inspect.structured import StructuredTrace
from disagmoe_compile.passes.pipeline import default_passes
from disagmoe_compile.plan.serialize import from_dict
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan

Artifacts = dict[str, tuple[dict[str, object], str]]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Callable[[], Artifacts]]:
    """A structured trace is written while the test runs; the call reads it: name -> (what its line says, payload)."""
    handler = LazyTraceHandler(str(tmp_path))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    trace_log.addHandler(handler)

    def read() -> Artifacts:
        found: Artifacts = {}
        entry: dict[str, object] = {}
        for line in "".join(path.read_text() for path in tmp_path.glob("*.log")).splitlines():
            name = entry.get("artifact", {}).get("name", "")  # type: ignore[union-attr]
            if not line.startswith("\t"):
                entry = json.loads(line.partition("] ")[2])
            elif name:
                before = found.get(name, (entry, ""))[1]
                found[name] = (entry, before + line[1:] + "\n")
        return {name: one for name, one in found.items() if name.startswith("disagmoe_")}

    yield read
    trace_log.removeHandler(handler)
    handler.close()


def test_every_pass_and_the_explanation_are_artifacts_of_their_compilation(
    traced: Callable[[], Artifacts],
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    explanation = dm.explain(model, torch.rand(3, 4))
    found = traced()
    passes = [f"disagmoe_{i:02d}_{one.name}" for i, one in enumerate(default_passes())]
    assert [*found] == [*passes, "disagmoe_explanation"]
    for entry, _ in found.values():
        assert "frame_id" in entry and "stack" not in entry
    assert found[passes[0]][1].startswith('"""Pass 00 inline_checkpoint: matched 0')
    assert json.loads(found["disagmoe_explanation"][1]) == json.loads(json.dumps(explanation.to_dict()))


def test_a_plan_made_after_the_compilation_is_filed_under_it(traced: Callable[[], Artifacts]) -> None:
    plan = example_plan(Topology(1, 1, 1, 1, 2))
    StructuredTrace(TraceId(CompileId(frame_id=3, frame_compile_id=1), 2)).plan(plan)
    found = traced()
    entry, text = found["disagmoe_plan"]
    assert (entry["frame_id"], entry["frame_compile_id"], entry["attempt"]) == (3, 1, 2)
    assert from_dict(json.loads(text)) == plan
    assert "Every action, in order:" in found["disagmoe_schedule"][1]


def test_nothing_is_rendered_where_no_trace_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr("disagmoe_compile.inspect.structured.render", render)
    dm.explain(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.rand(3, 4))


def test_a_script_that_logs_at_info_gets_no_lines_of_passes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dm.explain(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.rand(3, 4))
    assert not [record for record in caplog.records if record.name.startswith("disagmoe_compile")]


def test_the_log_called_disagmoe_compile_says_what_each_pass_did(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, batch = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.rand(3, 4)
    dm.explain(model, batch)
    assert "pass 00" not in capfd.readouterr().err
    torch._logging.set_logs(modules={"disagmoe_compile": logging.DEBUG})  # TORCH_LOGS=+disagmoe_compile
    try:
        dm.explain(model, batch)
        log = capfd.readouterr().err
    finally:
        torch._logging.set_logs()
    for index, one in enumerate(default_passes()):
        assert f"pass {index:02d} {one.name}: matched " in log
