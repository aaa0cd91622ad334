"""Activations held at once, against counting on the schedules that we generate."""

from __future__ import annotations

import pytest

from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.planner.residency import group_of_boundary, peak_resident


def counted(topology: Topology, group: Group, weights: list[float], in_flight: int) -> float:
    schedule = af_pipe(topology, 3 * in_flight, interleave=in_flight)
    held = peak = 0.0
    for action in schedule.of(group):
        if action.kind is ActionKind.FORWARD:
            held += weights[action.stage]
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            held -= weights[action.stage]
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("in_flight", [1, 2, 3, 8])
@pytest.mark.parametrize(("boundaries", "groups"), [(1, 1), (6, 1), (7, 2), (8, 3), (9, 4)])
def test_bytes_held_equal_those_counted_on_the_schedule(boundaries: int, groups: int, in_flight: int) -> None:
    topology = Topology(1, 1, groups, groups, boundaries)
    sizes = [float(1 + (5 * s) % 7) for s in range(topology.n_stages)]
    for group in topology.groups:
        own = topology.stages_of_group(group)
        weights = [size if s in own else 0.0 for s, size in enumerate(sizes)]
        assert peak_resident(weights, in_flight) == counted(topology, group, weights, in_flight)


def test_rounds_hold_one_more_than_the_number_of_the_paper() -> None:
    layers, groups = 28, 2
    topology = Topology(1, 1, groups, groups, layers)
    own = topology.stages_of_group(Group(Role.ATTENTION, 0))
    weights = [float(s in own) for s in range(topology.n_stages)]
    assert peak_resident(weights, 4 * groups) == (4 * layers + 4 * groups - 1) + 1


@pytest.mark.parametrize("tied_head", [False, True])
def test_boundaries_are_on_the_groups_of_the_topology(tied_head: bool) -> None:
    topology = Topology(1, 1, 3, 3, 7, tied_head)
    for b in range(8):
        expected = topology.group_of_stage(2 * b).index
        assert group_of_boundary(b, 7, 3, tied_head=tied_head) == expected
