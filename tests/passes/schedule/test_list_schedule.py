"""AF-Pipe by list scheduling: valid for any size, within its cap, and near what no schedule can beat."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.passes.schedule import list_schedule as list_scheduling
from disagmoe_compile.passes.schedule.list_schedule import (
    RULES,
    First,
    Rule,
    _Run,
    list_schedule,
    rehearse,
)
from disagmoe_compile.passes.schedule.lower import lower, lower_lists
from disagmoe_compile.passes.schedule.rehearsal import Message, Rehearsal
from disagmoe_compile.passes.schedule.rehearsed_links import Channel, Happen, RehearsedLinks
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.ir import Direction
from disagmoe_compile.plan.sharing import Leg
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.plan.validate import validate
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.model_spec import layer_pattern
from disagmoe_compile.planner.step_costs import Dedup, model_costs
from disagmoe_compile.simulator.abstract import AFShape, af_program
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.timeline import simulate_program
from disagmoe_compile.testing.plans import example_plan


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3),
    boundaries=st.integers(1, 5),
    n=st.integers(1, 7),
    in_flight=st.integers(1, 6),
    is_tied=st.booleans(),
)
def test_it_is_valid_for_any_size_ragged_ones_included(
    groups: int, boundaries: int, n: int, in_flight: int, is_tied: bool
) -> None:
    topology = Topology(2, 2, groups, groups, boundaries, tied_head=is_tied)
    plan = example_plan(topology, n)
    schedule = list_schedule(topology, n, in_flight=in_flight)
    owned = [s.index for s in plan.stages if s.owned_fqns and s.index % 2 == 0]
    lowered = lower(schedule, topology, plan.transfers, owned_stages=owned)
    limit = max(peak_residency(schedule).values())
    checked = replace(plan, training=lowered, resident_limit=max(limit, plan.resident_limit))
    assert validate(checked) == []


@pytest.mark.parametrize("in_flight", [1, 3, 8])
def test_the_cap_on_micro_batches_in_flight_is_kept(in_flight: int) -> None:
    topology = Topology(1, 1, 2, 2, 6)
    held = peak_residency(list_schedule(topology, 16, in_flight=in_flight))
    for group, peak in held.items():
        assert peak <= in_flight * len(topology.stages_of_group(group))


@pytest.mark.parametrize(("a", "f", "c"), [(1, 1, 0.3), (2, 1, 0.5), (1, 2, 0.5), (3, 2, 1)])
@pytest.mark.parametrize(("p", "n"), [(1, 8), (2, 16)])
def test_makespan_is_within_five_percent_of_the_bound(p: int, n: int, a: float, f: float, c: float) -> None:
    times = {"A": a, "F": f, "C": c, "BA": 2 * a, "WA": a, "BF": 2 * f, "WF": f}
    shape = AFShape(p, 8, n)
    base = af_program(times, shape)
    seconds = {key: float(value) for key, value in base.seconds.items()}
    rehearsal = Rehearsal.of_exchanges(shape.topology, seconds, c)
    schedule = list_schedule(shape.topology, n, in_flight=4 * p, rehearsal=rehearsal)
    program = replace(base, schedule=lower_lists(schedule, base.transfers))
    assert float(simulate_program(program).makespan) <= 1.05 * float(lower_bound(program).seconds)


@pytest.mark.parametrize(("n", "in_flight"), [(0, 2), (2, 0)])
def test_sizes_below_one_are_refused(n: int, in_flight: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        list_schedule(Topology(1, 1, 1, 1, 2), n, in_flight=in_flight)


def _arrivals(sends: list[tuple[Channel, float, float]]) -> list[float]:
    """When each message (channel, amount, copies in group 3) arrives, all sent at 0: rates of 1, 0.25 of latency."""
    events: list[tuple[float, int, Happen, Any]] = []
    count = itertools.count()
    arrived = [0.0] * len(sends)

    def at(time: float, happen: Happen, what: Any, /) -> None:
        heapq.heappush(events, (time, next(count), happen, what))

    capacities = {(way, group): 1.0 for way in ("out", "in") for group in range(4)} | {"inside": 1.0}
    links = RehearsedLinks(capacities, 0.25, at, arrived.__setitem__)
    for number, (channel, amount, copies) in enumerate(sends):
        move = Leg(amount, (("out", channel.src), ("in", channel.dst)))
        links.send(channel, (move, Leg(copies, ("inside",))), number, 0.0)
    while events:
        now, _, happen, what = heapq.heappop(events)
        happen(what, now)
    return arrived


def test_messages_to_one_group_leave_one_after_the_other() -> None:
    assert _arrivals([(Channel(0, 2), 4.0, 0.0), (Channel(0, 2), 4.0, 0.0)]) == [4.25, 8.5]


def test_messages_to_two_groups_share_the_way_out_and_of_two_groups_the_way_in() -> None:
    """Out of 0 each gets a half, and so into 2: there the one of 1 could have more, but the fair share is a half."""
    assert _arrivals([(Channel(0, 2), 4.0, 0.0), (Channel(0, 3), 4.0, 0.0)]) == [8.25, 8.25]
    assert _arrivals([(Channel(0, 2), 4.0, 0.0), (Channel(1, 2), 4.0, 0.0)]) == [8.25, 8.25]


def test_a_message_is_there_when_its_copies_are_made() -> None:
    """Copies of both share what is inside group 3; one is sent by it, the other received."""
    assert _arrivals([(Channel(0, 3), 2.0, 4.0), (Channel(3, 1), 2.0, 1.0)]) == [5.25, 2.25]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("p", [1, 2])
def test_a_rehearsal_takes_as_long_as_the_simulated_step(p: int, ranks: int) -> None:
    """Sums of gradients over attention ranks included. No group waits for the caps here, which a simulated one never does."""
    spec = replace(find_model("DeepSeek-MoE-16B"), layers=layer_pattern(6))
    model, cluster = model_costs(spec, seq_length=4096), find_cluster("H800-SXM5", 5)
    af = AFModel(model, cluster, AFChoice(p, ranks, 16, 1, 12, Dedup.NODE, in_flight=12, order="list"))
    for rule in (rule for rule in RULES if not rule.evenly):
        order = _Run(af.topology, 12, 12, af.rehearsal(), rule).rehearsed()
        assert order is not None
        simulated = simulate_program(af.program(order.schedule())).makespan
        assert order.makespan == pytest.approx(float(simulated), rel=1e-9)


def _tight() -> tuple[Topology, Rehearsal]:
    """Two groups of each kind, residuals between them, links that need 0.9 of what compute needs."""
    topology = Topology(1, 1, 2, 2, 8)
    seconds = {(kind, s): 1.0 + (kind == "B") for kind in "FIWB" for s in range(topology.n_stages)}
    times = Rehearsal.of_exchanges(topology, seconds, 1.0)  # type: ignore[arg-type]
    messages = {key: list(sent) for key, sent in times.messages.items()}
    for src, dst in itertools.pairwise(range(0, topology.n_stages, 2)):
        for direction, a, b in ((Direction.FORWARD, src, dst), (Direction.BACKWARD, dst, src)):
            way = ((topology.group_of_stage(a), "out"), (topology.group_of_stage(b), "in"))
            messages[direction, a].append(Message(b, (Leg(0.35, way),)))
    return topology, replace(times, messages=messages)


@pytest.mark.parametrize("in_flight", [4, 7])
def test_evenly_half_of_those_in_flight_and_one_are_in_their_forward(in_flight: int) -> None:
    topology, times = _tight()
    run = _Run(topology, 32, in_flight, times, Rule(First.FORWARDS, evenly=True))
    most, ends = 0, run._ends

    def watched(number: int, now: float) -> None:
        nonlocal most
        ends(number, now)
        most = max(most, in_flight // 2 + 1 - run.forwards)

    run._ends = watched  # type: ignore[method-assign]
    schedule = run.rehearsed()
    assert schedule is not None and most == in_flight // 2 + 1
    assert max(peak_residency(schedule.schedule()).values()) <= in_flight * topology.n_stages // 2


def test_the_rule_whose_rehearsal_is_shortest_makes_the_lists() -> None:
    """Forwards first is better here."""
    topology, times = _tight()
    runs = [_Run(topology, 32, 8, times, rule).rehearsed() for rule in RULES]
    best = min((run for run in runs if run), key=lambda run: run.makespan)
    assert runs[0] is not None and best.makespan < runs[0].makespan
    assert list_schedule(topology, 32, in_flight=8, rehearsal=times).actions == best.schedule().actions


def test_a_limit_leaves_out_the_orders_that_take_longer_and_changes_no_other() -> None:
    topology, times = _tight()
    every = rehearse(topology, 32, in_flight=8, rehearsal=times)
    steps = [order.makespan for order in every]
    assert len(steps) > 1 and steps == sorted(steps)
    assert rehearse(topology, 32, in_flight=8, rehearsal=times, limit=steps[0]) == every[:1]
    assert rehearse(topology, 32, in_flight=8, rehearsal=times, limit=0.999 * steps[0]) == ()


def test_no_order_is_tried_where_the_first_rule_is_too_far_from_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rule's step is 2% longer than the best one's here."""
    topology, times = _tight()
    best = rehearse(topology, 32, in_flight=8, rehearsal=times)[0].makespan
    assert len(rehearse(topology, 32, in_flight=8, rehearsal=times, limit=best)) == 1
    monkeypatch.setattr(list_scheduling, "APART", 1.01)
    assert rehearse(topology, 32, in_flight=8, rehearsal=times, limit=best) == ()


def test_what_an_order_holds_is_what_its_lists_hold() -> None:
    topology, times = _tight()
    order = rehearse(topology, 32, in_flight=8, rehearsal=times)[0]
    held = order.held(dict.fromkeys(range(topology.n_stages), 1.0))
    assert held == peak_residency(order.schedule())


def test_a_message_as_long_as_a_stage_wants_more_micro_batches_in_flight() -> None:
    """Of what no schedule can beat: within 5% with 4p in flight, within 1% with 8p."""
    base = af_program({"A": 2, "F": 2, "C": 2, "BA": 4, "WA": 2, "BF": 4, "WF": 2}, AFShape(2, 8, 32))
    seconds = {key: float(value) for key, value in base.seconds.items()}
    times = Rehearsal.of_exchanges(AFShape(2, 8, 32).topology, seconds, 2.0)
    steps = []
    for in_flight in (8, 16):
        schedule = list_schedule(AFShape(2, 8, 32).topology, 32, in_flight=in_flight, rehearsal=times)
        program = replace(base, schedule=lower_lists(schedule, base.transfers, release_sends=False))
        steps.append(float(simulate_program(program).makespan) / float(lower_bound(program).seconds))
    assert steps[0] <= 1.05 and steps[1] <= 1.01


@pytest.mark.parametrize(
    ("first", "kinds"), [(First.GRADIENTS, "IIFF"), (First.FORWARDS, "FFII"), (First.TURNS, "IFIF")]
)
def test_a_rule_says_which_of_forwards_and_gradients_goes_first(first: First, kinds: str) -> None:
    run = _Run(Topology(1, 1, 1, 1, 2), 4, 1, Rehearsal.uniform(Topology(1, 1, 1, 1, 2)), Rule(first))
    stage = 2
    for part, microbatch in ((0, 0), (0, 1), (1, 2), (1, 3)):
        run._is_ready((part * run.n + microbatch) * run.stages + stage)
    for _ in kinds:
        run._start(run.group_of[stage], 0.0)
    assert "".join(run._pass(number)[0] for number in run.ran[run.group_of[stage]]) == kinds
