"""The document of a plan: its numbers agree, what limits it is named, the next-best plans are the next best."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sizing_cases import cluster_of, costs_of, problem_of

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.planner.exhaustive import ranked
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.highs import OutOfTime
from disagmoe_compile.planner.size import candidate_of, size
from disagmoe_compile.planner.sizing_problem import SizingOptions, SizingProblem, TrainingWorkload
from disagmoe_compile.planner.step_costs import model_costs


def test_the_best_choice_of_a_search_is_the_plan_and_its_rivals_follow_in_order() -> None:
    problem = problem_of(costs_of(boundaries=4), cluster_of(4, 3))
    found = size(problem, alternatives=3)
    every = ranked(problem)
    assert found.tokens_per_s == pytest.approx(every[0][0].tokens_per_s)
    best_of_sizes: dict[tuple[int, int, int], float] = {}
    for prediction, one in every:
        best_of_sizes.setdefault(one.layout.sizes, prediction.tokens_per_s)
    chosen = candidate_of(found)
    expected = [rate for sizes, rate in best_of_sizes.items() if sizes != chosen.layout.sizes][:3]
    assert [other["tokens_per_s"] for other in found.alternatives] == pytest.approx(expected)


def test_times_of_a_stage_and_the_bound_agree_with_each_other() -> None:
    found = size(problem_of())
    assert found.t_star_s == max(found.t_attention_s, found.t_ffn_s)
    assert found.solver["status"] == "optimal"
    assert found.tokens_per_s <= found.solver["bound"] <= found.tokens_per_s * (1 + 1e-5)
    assert found.tokens_per_s == pytest.approx(found.global_batch_size * found.seq_length / found.step_s)


def test_the_resource_that_sets_the_pace_binds() -> None:
    assert "exchange[attention]" in size(problem_of(costs_of(token_bytes=10**7))).binding
    assert any(name.startswith("compute") for name in size(problem_of(costs_of(token_bytes=2))).binding)


def test_memory_binds_where_it_forbids_a_faster_plan() -> None:
    costs = costs_of(parameters=0, activation_bytes=1e6, token_bytes=2)
    ample, short = (problem_of(costs, cluster_of(memory_bytes=b)) for b in (1e9, 4e6))
    assert not any(name.startswith("memory") for name in size(ample).binding)
    assert any(name.startswith("memory") for name in size(short).binding)


def test_equal_problems_have_equal_documents_but_for_the_solver() -> None:
    first, second = size(problem_of()).to_dict(), size(problem_of()).to_dict()
    first.pop("solver"), second.pop("solver")
    assert json.dumps(first) == json.dumps(second)


def test_a_solver_that_runs_out_of_time_with_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagmoe_compile.planner import sizing_milp

    real = sizing_milp.solve_model

    def early(model, *, time_limit_s):
        solution = real(model, time_limit_s=time_limit_s)
        return replace(solution, status="maxTimeLimit", bound=2 * solution.objective)

    monkeypatch.setattr(sizing_milp, "solve_model", early)
    found = size(problem_of())
    assert (found.solver["status"], found.solver["gap"]) == ("maxTimeLimit", pytest.approx(1.0))


def test_a_time_limit_before_any_solution_leaves_the_best_predicted_plan_and_its_bound() -> None:
    problem = problem_of(costs_of(boundaries=4), cluster_of(4, 3))
    found, best = size(problem, time_limit_s=1e-9), ranked(problem)[0][0]
    assert found.solver["status"] == "maxTimeLimit"
    assert found.tokens_per_s <= best.tokens_per_s <= found.solver["bound"] * (1 + 1e-12)
    assert found.solver["gap"] == pytest.approx(found.solver["bound"] / found.tokens_per_s - 1)


def test_a_time_limit_before_any_plan_is_a_failure_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from disagmoe_compile.planner import layout_search

    monkeypatch.setattr(layout_search, "PLANS_TO_PREDICT", 0)
    with pytest.raises(OutOfTime, match=r"no plan found within 1e-09 s .*raise --time-limit") as caught:
        size(problem_of(), time_limit_s=1e-9)
    assert caught.value.exit_status == 1


def test_a_solver_that_keeps_claiming_what_does_not_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagmoe_compile.planner import sizing_milp

    real = sizing_milp.solve_model

    def false_optimum(model, *, time_limit_s):
        solution = real(model, time_limit_s=time_limit_s)
        return replace(solution, objective=2 * solution.objective)

    monkeypatch.setattr(sizing_milp, "solve_model", false_optimum)
    monkeypatch.setattr(sizing_milp, "MOST_CUTS", 2)
    with pytest.raises(DisagMoEError, match="do not hold when computed again"):
        size(problem_of())


def test_longer_sequences_move_gpus_to_attention_where_compute_binds() -> None:
    from disagmoe_compile.models.catalogue import find_model

    spec, shares = find_model("Qwen3-30B-A3B"), []
    cluster = replace(find_cluster("H800", 4), nic_bytes_per_s=1e13)
    for seq_length in (4096, 16384, 65536):
        costs = model_costs(spec, seq_length=seq_length)
        options = SizingOptions(pipeline_groups=1, usable_memory=1.0)
        roomy = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=1e13))
        problem = SizingProblem(costs, roomy, TrainingWorkload(seq_length, sequences_per_gpu=4), options)
        found = size(problem, alternatives=0)
        assert any(name.startswith("compute") for name in found.binding)
        shares.append(found.attention_gpus / found.world_size)
    assert shares == sorted(shares) and shares[0] < shares[-1]
