"""The split of GPUs and NICs, against enumeration of all splits in exact arithmetic."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.planner import highs
from disagmoe_compile.planner.allocation import Allocation, AllocationProblem, solve

H800 = {"gpu_flops": 989e12, "nic_bytes_per_s": 50e9}


@dataclasses.dataclass(frozen=True)
class Candidate:
    attention_gpus: int
    attention_nics: int
    seconds: Fraction
    balance: Fraction


def enumerate_allocations(problem: AllocationProblem) -> list[Candidate]:
    """Every split that the problem allows, straight from the definitions: no bound, no box, no floats."""
    exact = {
        name: Fraction(getattr(problem, name))
        for name in ("attention_flops", "ffn_flops", "exchange_bytes", "gpu_flops", "nic_bytes_per_s")
    }
    found = []
    for attention_gpus in range(1, problem.gpus):
        for attention_nics in range(1, problem.nics):
            ffn_gpus = problem.gpus - attention_gpus
            if attention_gpus not in (problem.allowed_attention_gpus or [attention_gpus]):
                continue
            if ffn_gpus not in (problem.allowed_ffn_gpus or [ffn_gpus]):
                continue
            if problem.nics_follow_gpus and attention_nics != attention_gpus:
                continue
            seconds, balance = Fraction(0), Fraction(0)
            for flops, gpus, nics in (
                (exact["attention_flops"], attention_gpus, attention_nics),
                (exact["ffn_flops"], ffn_gpus, problem.nics - attention_nics),
            ):
                peak, bandwidth = gpus * exact["gpu_flops"], nics * exact["nic_bytes_per_s"]
                seconds = max(seconds, flops / peak, exact["exchange_bytes"] / bandwidth)
                is_silent = exact["exchange_bytes"] == 0
                ratio = 1 if is_silent else flops / exact["exchange_bytes"] / (peak / bandwidth)
                balance += min(Fraction(1), Fraction(ratio))
            found.append(Candidate(attention_gpus, attention_nics, seconds, balance))
    return found


def best_of(problem: AllocationProblem) -> Candidate | None:
    candidates = enumerate_allocations(problem)
    if not candidates:
        return None
    t_star = min(c.seconds for c in candidates)
    ties = [c for c in candidates if c.seconds <= t_star * (1 + Fraction(1, 10**9))]
    return min(
        ties,
        key=lambda c: (
            -c.balance,
            abs(problem.nics - 2 * c.attention_nics),
            c.attention_gpus,
            c.attention_nics,
        ),
    )


small_numbers = st.integers(1, 9)  # ties are frequent
any_numbers = st.floats(1e-3, 1e15, allow_nan=False)
amounts = st.one_of(small_numbers, any_numbers)
allowed_sizes = st.none() | st.sets(st.integers(1, 10), min_size=1, max_size=5).map(
    lambda s: tuple(sorted(s))
)


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    gpus = draw(st.integers(2, 10))
    follow = draw(st.booleans())
    return AllocationProblem(
        attention_flops=draw(amounts),
        ffn_flops=draw(amounts),
        exchange_bytes=draw(st.one_of(st.just(0), amounts)),
        gpus=gpus,
        nics=gpus if follow else draw(st.integers(2, 10)),
        gpu_flops=draw(amounts),
        nic_bytes_per_s=draw(amounts),
        allowed_attention_gpus=draw(allowed_sizes),
        allowed_ffn_gpus=draw(allowed_sizes),
        nics_follow_gpus=follow,
    )


def check_against_enumeration(
    problem: AllocationProblem, solver: Callable[[AllocationProblem], Allocation] = solve
) -> None:
    best = best_of(problem)
    if best is None:
        with pytest.raises(InputError, match="no split of"):
            solve(problem)
        return
    found = solver(problem)
    assert (found.attention_gpus, found.attention_nics) == (best.attention_gpus, best.attention_nics)
    assert found.attention_gpus + found.ffn_gpus == problem.gpus
    assert found.attention_nics + found.ffn_nics == problem.nics
    assert found.t_star_s == max(found.t_attention_s, found.t_ffn_s) == float(best.seconds)
    assert found.balance_score == float(best.balance)
    assert found.solver.status == "optimal"
    assert found.solver.bound <= found.t_star_s
    assert found.solver.gap < 1e-5


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_equals_enumeration_ties_included(problem: AllocationProblem) -> None:
    check_against_enumeration(problem)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_equals_enumeration_on_thousands(problem: AllocationProblem) -> None:
    check_against_enumeration(problem)


def test_the_comparison_with_enumeration_can_fail() -> None:
    def one_gpu_off(problem: AllocationProblem) -> Allocation:
        found = solve(problem)
        return dataclasses.replace(
            found, attention_gpus=found.attention_gpus - 1, ffn_gpus=found.ffn_gpus + 1
        )

    problem = AllocationProblem(3, 1, 1, 8, 8, 1, 1)
    check_against_enumeration(problem)
    with pytest.raises(AssertionError):
        check_against_enumeration(problem, one_gpu_off)


def test_gpus_follow_the_work() -> None:
    found = solve(AllocationProblem(3e12, 1e12, 1.0, 8, 8, **H800))
    assert (found.attention_gpus, found.ffn_gpus) == (6, 2)


def test_a_tie_in_time_is_broken_by_the_balance_of_intensity_and_ridge() -> None:
    # Exchange bound: every GPU split takes the same time, and fewest attention GPUs fit its low intensity.
    problem = AllocationProblem(1e9, 8e12, 4e9, 16, 4, **H800)
    found = solve(problem)
    ties = [c for c in enumerate_allocations(problem) if float(c.seconds) == found.t_star_s]
    assert len(ties) > 5
    assert found.balance_score == float(max(c.balance for c in ties)) > float(min(c.balance for c in ties))


def test_nics_are_shared_evenly_when_nothing_else_decides() -> None:
    found = solve(AllocationProblem(1e12, 1e12, 0, 8, 6, **H800))
    assert (found.attention_nics, found.ffn_nics) == (3, 3)


@pytest.mark.parametrize(("attention_flops", "ffn_flops", "attention_nics"), [(2, 6, 8), (6, 2, 4)])
def test_nics_go_where_a_component_just_stops_waiting_for_them(
    attention_flops: int, ffn_flops: int, attention_nics: int
) -> None:
    # One needs 7.5 of 12 NICs to be compute bound, the other 2.5: 8 or 9 for the first balance both, 8 is nearer to even.
    problem = AllocationProblem(attention_flops, ffn_flops, 15, 2, 12, 1, 1)
    check_against_enumeration(problem)
    found = solve(problem)
    assert (found.attention_nics, found.balance_score) == (attention_nics, 2.0)


def test_what_the_solver_misses_by_its_tolerance_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AllocationProblem(3.1e12, 5.3e12, 3e8, 128, 128, **H800)
    right = solve(problem)
    real = highs.solve_model

    def near_miss(model, *, time_limit_s):
        solution = real(model, time_limit_s=time_limit_s)
        values = {**solution.values, "attention_gpus": 2.0, "attention_nics": 1.0}
        return dataclasses.replace(solution, values=values)

    monkeypatch.setattr("disagmoe_compile.planner.allocation.solve_model", near_miss)
    corrected = solve(problem)
    assert corrected.t_star_s == right.t_star_s
    assert (corrected.attention_gpus, corrected.attention_nics) == (
        right.attention_gpus,
        right.attention_nics,
    )


def test_ten_thousand_gpus_are_split_to_optimality() -> None:
    found = solve(AllocationProblem(3.1e12, 5.3e12, 3e8, 10_000, 10_000, **H800))
    assert found.solver.status == "optimal"
    assert found.t_star_s == pytest.approx(2 * 3e8 / (10_000 * 50e9))  # the continuous bound on exchange


def test_an_unfinished_solve_without_a_solution_is_an_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition
    from pyomo.contrib.solver.solvers.highs import Highs

    real = Highs.solve

    def out_of_time(self, model, **options):
        results = real(self, model, **options)
        results.termination_condition = TerminationCondition.maxTimeLimit
        results.solution_status = SolutionStatus.noSolution
        return results

    monkeypatch.setattr(Highs, "solve", out_of_time)
    with pytest.raises(DisagMoEError, match="no plan found within 7 s") as caught:
        solve(AllocationProblem(1, 1, 1, 4, 4, 1, 1), time_limit_s=7)
    assert caught.value.exit_status == 1


def test_a_missing_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyomo.contrib.solver.solvers.highs import Highs

    monkeypatch.setattr(Highs, "available", lambda self: False)
    with pytest.raises(InputError, match="pip install highspy"):
        solve(AllocationProblem(1, 1, 1, 4, 4, 1, 1))


def test_a_missing_pyomo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyomo.environ", None)
    with pytest.raises(InputError, match="pip install 'pyomo"):
        solve(AllocationProblem(1, 1, 1, 4, 4, 1, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_flops", 0),
        ("attention_flops", -1.0),
        ("ffn_flops", float("nan")),
        ("ffn_flops", "3"),
        ("gpu_flops", float("inf")),
        ("gpu_flops", 10**400),
        ("nic_bytes_per_s", True),
        ("exchange_bytes", -1),
        ("exchange_bytes", False),
        ("gpus", 1),
        ("gpus", 2.0),
        ("gpus", 10**9),
        ("nics", 1),
        ("nics", True),
        ("allowed_attention_gpus", ()),
        ("allowed_ffn_gpus", (0,)),
        ("allowed_ffn_gpus", 3),
    ],
)
def test_a_bad_number_is_refused_by_name(field: str, value: object) -> None:
    good = {"attention_flops": 1, "ffn_flops": 1, "exchange_bytes": 1, "gpus": 4, "nics": 4, "gpu_flops": 1}
    with pytest.raises(InputError, match=field):
        AllocationProblem(**{**good, "nic_bytes_per_s": 1, field: value})


def test_nics_can_only_follow_gpus_one_to_one() -> None:
    with pytest.raises(InputError, match="4 GPUs and 2 NICs"):
        AllocationProblem(1, 1, 1, 4, 2, 1, 1, nics_follow_gpus=True)


def test_impossible_sizes_are_explained() -> None:
    problem = AllocationProblem(
        1, 1, 1, 8, 8, 1, 1, allowed_attention_gpus=(2, 4), allowed_ffn_gpus=(1, 2, 3)
    )
    with pytest.raises(InputError, match="no split of 8 GPUs: attention may take 2, 4, the experts 1, 2, 3"):
        solve(problem)


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(InputError, match="time_limit_s"):
        solve(AllocationProblem(1, 1, 1, 4, 4, 1, 1), time_limit_s=0)
