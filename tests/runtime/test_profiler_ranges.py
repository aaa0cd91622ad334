"""A profile of a run reads like the plan.

The exported trace, that is: `profile.events()` runs names through a C++ demangler, which takes `2F0` for the identifier `F0`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from disagmoe_compile import testing


def test_every_action_is_a_range_of_the_trace_under_its_own_name(tmp_path: Path) -> None:
    call = testing.capture_call(testing.build_model("batched_mm", n_layers=1), testing.language_batch())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run = testing.run_captured(call, ffn_group_size=2, n_microbatches=2)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert run.plan.training is not None
    assert {str(action) for listed in run.plan.training.actions.values() for action in listed} <= names
