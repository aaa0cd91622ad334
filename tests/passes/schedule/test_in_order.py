"""AF-Pipe in order: valid for any size, its activations counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.passes.schedule.in_order import in_order, passes_by_slot
from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.slots import Slots
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.plan.validate import validate
from disagmoe_compile.simulator.abstract import AFShape, resident_activations
from disagmoe_compile.simulator.pipelines import interleaved_1f1b
from disagmoe_compile.testing.plans import example_plan


@settings(max_examples=50, deadline=None)
@given(
    boundaries=st.integers(1, 9),
    groups=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    n=st.integers(1, 20),
    interleave=st.integers(1, 17),
)
def test_the_serial_order_has_everything_after_what_it_needs(
    boundaries: int, groups: tuple[int, int], n: int, interleave: int
) -> None:
    """Depths of attention and FFN may differ, rounds and chunks be ragged."""
    topology = Topology(1, 1, *groups, boundaries)
    done = set()
    for forward, stage, i in passes_by_slot(topology, n, interleave):
        needed = [(True, stage - 1, i)] if forward else [(True, stage, i), (False, stage + 1, i)]
        assert all(x in done for x in needed if 0 <= x[1] < topology.n_stages)
        done.add((forward, stage, i))
    assert len(done) == 2 * topology.n_stages * n


@pytest.mark.parametrize(("groups", "boundaries", "n"), [(1, 2, 4), (2, 3, 5), (2, 5, 9)])
@pytest.mark.parametrize("tied_head", [False, True])
def test_lowered_it_is_a_valid_plan(groups: int, boundaries: int, n: int, tied_head: bool) -> None:
    topology = Topology(2, 2, groups, groups, boundaries, tied_head=tied_head)
    plan = example_plan(topology, n)
    schedule = in_order(topology, n)
    owned = [s.index for s in plan.stages if s.owned_fqns and s.index % 2 == 0]
    lowered = lower(schedule, topology, plan.transfers, owned_stages=owned)
    limit = max(*peak_residency(schedule).values(), plan.resident_limit)
    assert validate(replace(plan, training=lowered, resident_limit=limit)) == []


@pytest.mark.parametrize(("p", "layers"), [(1, 4), (2, 8), (2, 28), (4, 28)])
def test_it_holds_4l_and_4p_less_1_activations(p: int, layers: int) -> None:
    """As 1F1B interleaved over 4p places, messages counted as stages."""
    shape = AFShape(p, layers, 8 * p)
    held = resident_activations(in_order(shape.topology, 8 * p), shape.topology)
    literature = peak_residency(interleaved_1f1b(4 * p, layers // p, 8 * p))
    assert max(held.values()) == max(literature.values()) == 4 * layers + 4 * p - 1


@pytest.mark.parametrize(("p", "layers"), [(1, 4), (2, 8), (3, 8)])
def test_the_head_holds_one_micro_batch(p: int, layers: int) -> None:
    for actions in in_order(Topology(1, 1, p, p, layers), 40).actions.values():
        kinds = [a.kind for a in actions if a.stage == 2 * layers]
        assert kinds == kinds[:3] * (len(kinds) // 3)
        assert not kinds or kinds[0] is ActionKind.FORWARD


def test_after_the_warm_up_forwards_and_backwards_take_turns() -> None:
    schedule = in_order(Topology(1, 1, 1, 1, 1), 4, interleave=2, split_weight_gradient=False)
    texts = [" ".join(map(str, actions)) for actions in schedule.actions.values()]
    assert texts[0] == "0F0 0F1 2F0 2B0 0F2 2F1 2B1 0B0 0F3 2F2 2B2 0B1 2F3 2B3 0B2 0B3"
    assert texts[1] == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


@pytest.mark.parametrize("arguments", [{"n_microbatches": 0}, {"n_microbatches": 2, "interleave": 0}])
def test_sizes_below_one_are_errors(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        in_order(Topology(1, 1, 1, 1, 1), **arguments)


def test_slots_of_no_size_are_errors() -> None:
    with pytest.raises(ValueError, match="interleave must be at least 1, got 0"):
        Slots(2, 1, 0)
