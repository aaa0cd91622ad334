"""No schedule beats the bound, whatever its times; and time has no scale of its own."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.simulator.abstract import AFShape, PipelineShape, af_program, pipeline_program
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.timeline import simulate_program

seconds = st.integers(1, 9).map(Fraction)
af_times = st.fixed_dictionaries({"A": seconds, "F": seconds, "C": st.integers(0, 9).map(Fraction)})
shapes = st.builds(
    lambda p, k, n, forward: AFShape(p, p * k, n, forward),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(times=af_times, shape=shapes)
def test_makespan_is_at_least_the_bound(times: dict[str, Fraction], shape: AFShape) -> None:
    program = af_program({key: float(value) for key, value in times.items()}, shape)
    assert float(simulate_program(program).makespan) >= float(lower_bound(program).seconds) * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(times=af_times, shape=shapes)
def test_doubling_every_time_doubles_the_makespan(times: dict[str, Fraction], shape: AFShape) -> None:
    once = af_program({key: float(value) for key, value in times.items()}, shape)
    twice = af_program({key: 2 * float(value) for key, value in times.items()}, shape)
    assert float(simulate_program(twice).makespan) == pytest.approx(
        2 * float(simulate_program(once).makespan)
    )


def test_the_bound_of_1f1b_is_reached() -> None:
    program = pipeline_program("1f1b", {"F": 1, "B": 2}, PipelineShape(4, 8))
    bound = lower_bound(program)
    assert bound.seconds == simulate_program(program).makespan
    assert bound.limit == "compute of rank.3"


def test_one_micro_batch_is_bound_by_the_critical_path() -> None:
    program = af_program({"A": 1, "F": 1, "C": Fraction(1)}, AFShape(2, 4, 1, forward_only=True))
    bound = lower_bound(program)
    assert (bound.limit, bound.seconds) == ("critical path", 4 + 4 + 7)
