"""The simulator's numbers are exactly those of the literature's closed forms, in rational arithmetic.

Legend: p ranks or groups, v chunks a rank, n micro-batches, L layers; F, B, W forward, full backward, its weight part; FB a pair.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.list_schedule import list_schedule
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.simulator.abstract import (
    AFShape,
    PipelineShape,
    af_program,
    af_transfers,
    pipeline_program,
    resident_activations,
)
from disagmoe_compile.simulator.pipelines import interleaved_1f1b
from disagmoe_compile.simulator.program import Program
from disagmoe_compile.simulator.timeline import simulate_program

TIMES = {"F": Fraction(10), "B": Fraction(21), "W": Fraction(8)}


def _bubble(program: Program) -> Fraction:
    timeline = simulate_program(program)
    return Fraction(timeline.makespan - timeline.share(timeline.busiest()).busy)


@pytest.mark.parametrize(("p", "n"), [(1, 3), (2, 2), (4, 8), (4, 5), (8, 16)])
def test_1f1b_idles_for_a_forward_and_a_backward_of_each_other_rank(p: int, n: int) -> None:
    assert _bubble(pipeline_program("1f1b", TIMES, PipelineShape(p, n))) == (p - 1) * (10 + 21)


@pytest.mark.parametrize(("p", "n", "v"), [(2, 4, 1), (4, 8, 1), (4, 6, 2)])
def test_gpipe_idles_as_1f1b(p: int, n: int, v: int) -> None:
    assert _bubble(pipeline_program("gpipe", TIMES, PipelineShape(p, n, v))) == Fraction((p - 1) * 31, v)


@pytest.mark.parametrize(("p", "n", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, n: int, v: int) -> None:
    program = pipeline_program("interleaved_1f1b", TIMES, PipelineShape(p, n, v))
    assert _bubble(program) == Fraction((p - 1) * 31, v)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 10])
def test_interleaving_runs_on_a_ragged_last_round(n: int) -> None:
    program = pipeline_program("interleaved_1f1b", TIMES, PipelineShape(4, n, 2))
    assert simulate_program(program).makespan >= n * 31


@pytest.mark.parametrize("w", [5, 8, 10])
@pytest.mark.parametrize(("p", "n"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_fills_the_gaps_with_weight_gradients(p: int, n: int, w: int) -> None:
    program = pipeline_program("zb1p", TIMES | {"W": Fraction(w)}, PipelineShape(p, n))
    assert _bubble(program) == (p - 1) * (10 + 21 - 2 * w)


@pytest.mark.parametrize(("p", "n"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 24)])
def test_dualpipe_where_input_gradient_takes_as_long_as_forward(p: int, n: int) -> None:
    """The formula's premise: B = F + W. All ranks idle alike where a pair takes as long as its parts."""
    times = {"F": Fraction(10), "B": Fraction(18), "W": Fraction(8), "FB": Fraction(28)}
    assert _bubble(pipeline_program("dualpipe", times, PipelineShape(p, n))) == (p // 2 - 1) * (28 + 18 - 24)


@pytest.mark.parametrize(("p", "n"), [(4, 8), (8, 16)])
def test_dualpipe_middle_ranks_idle_by_the_formula_where_pairs_overlap(p: int, n: int) -> None:
    times = {"F": Fraction(10), "B": Fraction(20), "W": Fraction(10), "FB": Fraction(25)}
    timeline = simulate_program(pipeline_program("dualpipe", times, PipelineShape(p, n)))
    idle = [timeline.makespan - timeline.share(group).busy for group in timeline.groups]
    assert idle[p // 2 - 1] == idle[p // 2] == max(idle) == (p // 2 - 1) * (25 + 20 - 30)


@pytest.mark.parametrize(
    ("p", "layers", "n", "a", "f", "c"),
    [
        (1, 4, 8, 3, 2, 1),
        (1, 1, 2, 1, 1, 0),
        (2, 4, 8, 3, 2, 1),
        (2, 8, 16, 2, 3, 2),
        (4, 8, 32, 2, 3, 1),
        (3, 6, 24, 2, 2, 1),
    ],
)
def test_af_pipe_forward_idles_for_fill_and_drain_of_the_critical_group(
    p: int, layers: int, n: int, a: int, f: int, c: int
) -> None:
    times = {"A": Fraction(a), "F": Fraction(f), "C": Fraction(c)}
    program = af_program(times, AFShape(p, layers, n, forward_only=True))
    assert _bubble(program) == p * (a + f) + (2 * p - 1) * c - max(a, f)


@pytest.mark.parametrize(("p", "layers"), [(1, 4), (2, 8), (2, 28), (4, 28)])
def test_af_pipe_in_rounds_holds_one_activation_more_than_the_in_order_pipeline(p: int, layers: int) -> None:
    """In order: 1F1B interleaved over 4p places, messages counted as stages."""
    shape = AFShape(p, layers, 8 * p)
    held = resident_activations(af_pipe(shape.topology, 8 * p), shape.topology)
    in_order = peak_residency(interleaved_1f1b(4 * p, layers // p, 8 * p))
    assert max(in_order.values()) == 4 * layers + 4 * p - 1
    assert max(held.values()) == 4 * layers + 4 * p


def test_one_activation_less_would_deadlock_rounds() -> None:
    """Group 0 puts its last forward of stage 0 off until it has released an activation: the proof in `order.py`."""
    shape = AFShape(2, 4, 16)
    schedule = af_pipe(shape.topology, 16)
    group = shape.topology.groups[0]
    listed = list(schedule.of(group))
    put_off = Action(ActionKind.FORWARD, 0, 15)  # of the second set of 8
    listed.remove(put_off)
    listed.insert(listed.index(Action(ActionKind.BACKWARD_WEIGHT, 4, 0)) + 1, put_off)
    with pytest.raises(PlanError, match="groups wait for each other"):
        lower_lists(
            replace(schedule, actions={**schedule.actions, group: tuple(listed)}),
            af_transfers(shape.topology, training=True),
        )


@pytest.mark.parametrize(("p", "layers"), [(1, 4), (2, 8)])
def test_af_pipe_by_list_holds_no_more_than_its_cap(p: int, layers: int) -> None:
    shape = AFShape(p, layers, 8 * p)
    held = resident_activations(list_schedule(shape.topology, 8 * p, in_flight=4 * p), shape.topology)
    assert max(held.values()) <= 4 * layers
