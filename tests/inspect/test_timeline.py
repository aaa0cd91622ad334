"""The Chrome trace of a run: rows, names, times, arrows; messages in flight together do not hide each other."""

from __future__ import annotations

import json

import pytest

from disagmoe_compile.inspect.timeline import to_chrome
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.ir import Plan, Schedule, Stage, TensorSpec, Workload
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.runtime.timeline import Event


@pytest.fixture
def plan() -> Plan:
    topology = Topology(1, 1, 1, 1, n_boundaries=1)
    hidden = (TensorSpec("hidden", (4, 8), "float32"),)
    stages = tuple(
        Stage(i, topology.role_of_stage(i), (0,), hidden, hidden, (), num_experts=2 if i % 2 else None)
        for i in range(3)
    )
    schedule = Schedule("forward_only", True, dict.fromkeys(topology.groups, ()))
    return Plan(stages, (), topology, Workload(4, 1, 4, 8), None, schedule, resident_limit=1)


EVENTS = {
    0: [
        Event("0F0", "forward", 10.0, 10.5),
        Event("0SEND[dispatch.0]0", "comm_send", 10.5, 10.8, nbytes=128),
        Event("0SEND[dispatch.0]1", "comm_send", 10.6, 10.7, nbytes=64),
    ],
    1: [
        Event("1RECV[dispatch.0]0", "comm_recv", 10.1, 10.9, nbytes=128),
        Event("1F0", "forward", 10.9, 11.0, step=0),
    ],
}


def _of(trace: dict, phase: str) -> list[dict]:
    return [row for row in trace["traceEvents"] if row["ph"] == phase]


def test_every_event_is_one_slice_with_the_plans_action_text(plan: Plan) -> None:
    slices = _of(to_chrome(EVENTS, plan), "X")
    assert sorted(s["name"] for s in slices) == sorted(e.action for events in EVENTS.values() for e in events)
    assert all(str(Action.parse(s["name"])) == s["name"] for s in slices)


def test_times_are_microseconds_from_the_first_event_of_any_rank(plan: Plan) -> None:
    first, *_ = (s for s in _of(to_chrome(EVENTS, plan), "X") if s["name"] == "1F0")
    assert first["ts"] == pytest.approx(0.9e6)
    assert first["dur"] == pytest.approx(0.1e6)


def test_rows_are_named_by_role_stages_and_stream(plan: Plan) -> None:
    names = [m["args"]["name"] for m in _of(to_chrome(EVENTS, plan), "M") if "name" in m["args"]]
    assert "rank 0 attention.0 [A0,A1]" in names
    assert "rank 1 ffn.0 [F0]" in names
    assert {"forward", "comm_send", "comm_recv"} <= set(names)


def test_messages_in_flight_together_get_rows_of_their_own(plan: Plan) -> None:
    sends = [s for s in _of(to_chrome(EVENTS, plan), "X") if "SEND" in s["name"]]
    assert len({s["tid"] for s in sends}) == 2


def test_messages_one_after_the_other_share_a_row(plan: Plan) -> None:
    events = [Event("0F0", "forward", 0.0, 1.0), Event("0F1", "forward", 1.0, 2.0)]
    assert len({s["tid"] for s in _of(to_chrome({0: events}, plan), "X")}) == 1


def test_an_arrow_leads_from_a_send_to_the_receive_of_the_same_message_only(plan: Plan) -> None:
    trace = to_chrome(EVENTS, plan)
    starts, ends = _of(trace, "s"), _of(trace, "f")
    assert [(s["pid"], s["name"]) for s in starts] == [(0, "dispatch.0")]
    assert [(f["pid"], f["id"]) for f in ends] == [(1, starts[0]["id"])]
    assert ends[0]["ts"] >= starts[0]["ts"]


def test_bytes_step_and_microbatch_are_shown(plan: Plan) -> None:
    args = {s["name"]: s["args"] for s in _of(to_chrome(EVENTS, plan), "X")}
    assert args["0SEND[dispatch.0]1"] == {"step": 0, "stage": 0, "microbatch": 1, "bytes": 64}


def test_a_trace_without_events_is_valid_json(plan: Plan) -> None:
    assert json.loads(json.dumps(to_chrome({0: []}, plan)))["traceEvents"]
