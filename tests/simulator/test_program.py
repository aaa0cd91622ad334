"""What an action waits for, in each reading of a list; deadlocks; determinism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.sharing import Leg
from disagmoe_compile.simulator.abstract import AFShape, PipelineShape, af_program, pipeline_program
from disagmoe_compile.simulator.pipelines import hops, pipeline_rank
from disagmoe_compile.simulator.program import Program, Queueing
from disagmoe_compile.simulator.timeline import simulate_program
from disagmoe_compile.testing.plans import example_plan

TIMES = {"A": 3, "F": 2, "C": 1}


def _program(lists: list[str], queueing: Queueing = Queueing.LIST, transfer: float = 0.0) -> Program:
    """Two ranks with one stage each; `lists` are compute actions."""
    transfers = hops([range(2)])
    actions = {pipeline_rank(r): tuple(map(Action.parse, text.split())) for r, text in enumerate(lists)}
    schedule = Schedule("test", lowered=False, actions=actions)
    seconds = {(kind, stage): 1.0 for kind in "FBIW" for stage in range(2)}
    links = {(rank, way): 1.0 for rank in range(2) for way in ("out", "in")}
    legs = {t.name: (Leg(transfer, ((t.src, "out"), (t.dst, "in"))),) if transfer else () for t in transfers}
    lowered = lower_lists(schedule, transfers, release_sends=False)
    return Program(lowered, transfers, seconds, legs, links, queueing=queueing)  # type: ignore[arg-type]


def test_groups_that_wait_for_each_other_are_named_with_the_grid() -> None:
    with pytest.raises(PlanError, match=r"deadlocks: .*rank\.0 at 0F1.* waits for ") as error:
        simulate_program(_program(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]))
    assert "0F1" in str(error.value.violations[0]) and ">> " in str(error.value.violations[0])


def test_a_message_that_is_never_sent_is_an_error() -> None:
    program = _program(["0F0 0B0", "1F0 1B0"])
    kept = tuple(a for a in program.schedule.of(pipeline_rank(0)) if a.kind != "SEND")
    broken = replace(program.schedule, actions={**program.schedule.actions, pipeline_rank(0): kept})
    with pytest.raises(PlanError, match=r"activation\.0 0 is never sent"):
        simulate_program(replace(program, schedule=broken))


def test_a_compute_only_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match="lower it before"):
        replace(_program(["0F0", "1F0"]), schedule=Schedule("x", lowered=False, actions={}))


def test_sends_to_one_group_leave_one_after_the_other() -> None:
    """Two messages of 2 seconds each: the second is there at 1 + 2 + 2, not at 2 + 2."""
    timeline = simulate_program(_program(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], transfer=2.0))
    starts = {str(a): s for a, s, _ in timeline.events(pipeline_rank(1))}
    assert (starts["1F0"], starts["1F1"]) == (3, 5)


@pytest.mark.parametrize("queueing", [Queueing.LIST, Queueing.STREAM])
def test_sends_to_two_groups_leave_beside_each_other_and_share_the_way_out(queueing: Queueing) -> None:
    """Stage 0 sends 2 to stages 1 and 2: both are there at 1 + 4, as fair shares of a link are, not at 1 + 2 and 1 + 2 + 2."""
    transfers = [*hops([(0, 1)]), replace(hops([(0, 2)])[0], name="beside")]
    lists = {pipeline_rank(r): (Action.parse(f"{r}F0"),) for r in range(3)}
    lowered = lower_lists(Schedule("test", lowered=False, actions=lists), transfers, release_sends=False)
    links = {(rank, way): 1.0 for rank in range(3) for way in ("out", "in")}
    legs = {t.name: (Leg(2.0, ((t.src, "out"), (t.dst, "in"))),) for t in transfers}
    seconds = {(kind, stage): 1.0 for kind in "F" for stage in range(3)}
    timeline = simulate_program(Program(lowered, transfers, seconds, legs, links, queueing=queueing))  # type: ignore[arg-type]
    starts = [next(start for a, start, _ in timeline.events(rank) if a.kind == "F") for rank in lists]
    assert starts == [0, 5, 5]


def test_streams_share_the_compute_of_a_group() -> None:
    """Forward and backward at once take as long as one after the other: two streams make no more FLOPs."""
    host = simulate_program(_program(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    stream = simulate_program(_program(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], Queueing.STREAM))
    busy = [float(stream.share(rank).busy) for rank in stream.groups]
    assert busy == pytest.approx([4, 4])
    assert float(stream.makespan) <= float(host.makespan) + 1e-9


def test_the_cpu_runtimes_reading_is_never_faster() -> None:
    plan = example_plan(n_microbatches=4)
    assert plan.training is not None
    program = af_program(TIMES, AFShape(2, 4, 8))
    as_list = simulate_program(program)
    as_host = simulate_program(replace(program, queueing=Queueing.HOST))
    assert as_host.makespan >= as_list.makespan


def test_equal_programs_give_equal_times() -> None:
    runs = [simulate_program(af_program(TIMES, AFShape(2, 4, 8))) for _ in range(2)]
    assert runs[0].times == runs[1].times


def test_busy_exposed_and_bubble_add_up_to_the_makespan() -> None:
    timeline = simulate_program(af_program(TIMES, AFShape(2, 4, 8)))
    for group in timeline.groups:
        share = timeline.share(group)
        assert share.busy + share.exposed + share.bubble == timeline.makespan
        assert min(share.busy, share.exposed, share.bubble) >= 0


def test_waiting_for_a_message_is_exposed_and_for_a_peer_is_bubble() -> None:
    """Rank 1 waits 1 for F on rank 0 (bubble), then 3 for the message (exposed)."""
    timeline = simulate_program(_program(["0F0", "1F0"], transfer=3.0))
    share = timeline.share(pipeline_rank(1))
    assert (share.busy, share.exposed, share.bubble) == (1, 3, 1)


def test_memory_counts_activations_from_forward_to_weight_gradient() -> None:
    timeline = simulate_program(pipeline_program("1f1b", {"F": 1, "B": 2}, PipelineShape(4, 8)))
    peaks = timeline.peak_bytes(dict.fromkeys(range(4), 10))
    assert [peaks[rank] for rank in timeline.groups] == [40, 30, 20, 10]
