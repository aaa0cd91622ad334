"""The trace of a simulated step: messages that are under way together are all seen."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from disagmoe_compile.simulator.abstract import AFShape, af_program
from disagmoe_compile.simulator.pictures import write_trace
from disagmoe_compile.simulator.timeline import Timeline, simulate_program


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Each attention group sends to its experts and, beside that, to the next attention group."""
    return simulate_program(af_program({"A": 3, "F": 2, "C": 2}, AFShape(2, 4, 8)))


@pytest.fixture
def trace(timeline: Timeline, tmp_path: Path) -> list[dict[str, Any]]:
    write_trace({"af_pipe": timeline}, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_no_slice_reaches_into_the_next_of_its_row(trace: list[dict[str, Any]], timeline: Timeline) -> None:
    rows: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in (event for event in trace if event["ph"] == "X"):
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(slices)):
            assert end <= start + 1e-6
    assert sum(map(len, rows.values())) == sum(len(timeline.trace_events(group)) for group in timeline.groups)


def test_what_overlaps_has_a_row_named_after_the_one_above(trace: list[dict[str, Any]]) -> None:
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"forward", "comm_send", "comm_send +1"} <= names
    of_slices = {(e["pid"], e["tid"]) for e in trace if e["ph"] == "X"}
    assert of_slices == {(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name"}
