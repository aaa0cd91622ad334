"""Which rank holds which rows, read off the stages of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.plan.ir import Stage
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.runtime.placement import ParameterPlacement, placements

SHAPES = {"embed": (32, 8), "q0": (8, 8), "w0": (5, 8, 8), "q1": (8, 8), "w1": (5, 8, 8), "head": (32, 8)}


def stages_on(topology: Topology, *fqns: tuple[str, ...], owned: bool = True) -> tuple[list[Stage], Topology]:
    stages = []
    for index, names in enumerate(fqns):
        role = Role.FFN if index % 2 else Role.ATTENTION
        experts = 5 if index % 2 else None
        stages.append(Stage(index, role, (), (), (), names, names if owned else (), experts))
    return stages, topology


def test_attention_is_whole_on_its_group_and_experts_are_split_over_theirs() -> None:
    topology = Topology(2, 3, 1, 1, n_boundaries=2)
    found = placements(*stages_on(topology, ("embed", "q0"), ("w0",), ("q1",), ("w1",), ("head",)), SHAPES)
    assert found["q1"].ranges == {0: None, 1: None}
    assert found["w0"].ranges == {2: (0, 2), 3: (2, 4), 4: (4, 5)}
    assert found["w0"].shape_on(4) == (1, 8, 8) and found["w0"].shape_on(0) == (0, 8, 8)
    assert [found["q1"].counts_on(r) for r in range(5)] == [True, False, False, False, False]
    assert [found["w0"].counts_on(r) for r in range(5)] == [False, False, True, True, True]


def test_boundaries_alternate_over_pipeline_groups() -> None:
    topology = Topology(1, 1, 2, 2, n_boundaries=2)
    found = placements(*stages_on(topology, ("embed", "q0"), ("w0",), ("q1",), ("w1",), ("head",)), SHAPES)
    assert {n: list(p.ranges) for n, p in found.items()} == {
        "embed": [0], "q0": [0], "w0": [2], "q1": [1], "w1": [3], "head": [0],
    }  # fmt: skip


def test_a_trained_parameter_used_by_two_groups_is_refused_and_a_frozen_one_is_on_both() -> None:
    topology = Topology(1, 1, 2, 2, n_boundaries=2)
    shared = (("embed",), ("w0",), ("embed",), ("w1",), ("head",))
    with pytest.raises(
        UnsupportedModelError, match=r"parameter embed of attention\.0 is used again by stage A1"
    ):
        placements(*stages_on(topology, *shared), SHAPES)
    assert placements(*stages_on(topology, *shared, owned=False), SHAPES)["embed"].ranges == {
        0: None,
        1: None,
    }


def test_experts_that_are_not_stacked_need_a_single_ffn_rank() -> None:
    fqns = (("embed",), ("q0",), ("q1",), ("w1",), ("head",))
    with pytest.raises(UnsupportedModelError, match="only parameters stacked over the 5 experts"):
        placements(*stages_on(Topology(1, 2, 1, 1, n_boundaries=2), *fqns), SHAPES)
    assert placements(*stages_on(Topology(1, 1, 1, 1, n_boundaries=2), *fqns), SHAPES)["q0"].ranges == {
        1: None
    }


def test_a_separate_parameter_lives_whole_on_the_rank_of_its_expert() -> None:
    topology = Topology(1, 2, 1, 1, n_boundaries=1)
    fqns = tuple(f"up{e}" for e in range(5))
    stages, _ = stages_on(topology, ("embed",), fqns, ("head",))
    stages[1] = replace(stages[1], expert_of={fqn: e for e, fqn in enumerate(fqns)})
    found = placements(stages, topology, {**SHAPES, **dict.fromkeys(fqns, (7, 8))})
    assert [dict(found[fqn].ranges) for fqn in fqns] == [
        {1: None},
        {1: None},
        {1: None},
        {2: None},
        {2: None},
    ]
    assert found["up3"].shape_on(2) == (7, 8) and found["up3"].shape_on(1) == (0, 8)
    assert [found["up3"].counts_on(rank) for rank in range(3)] == [False, False, True]


def test_experts_with_several_rows_each_are_split_between_experts() -> None:
    topology = Topology(1, 2, 1, 1, n_boundaries=1)
    found = placements(*stages_on(topology, ("embed",), ("flat",), ("head",)), {**SHAPES, "flat": (15, 8)})
    assert found["flat"].ranges == {1: (0, 9), 2: (9, 15)}


def test_a_placement_that_loses_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="do not cover its 5 rows once each"):
        ParameterPlacement("w", (5, 2), Group(Role.FFN, 0), {0: (0, 2), 1: (3, 5)})
