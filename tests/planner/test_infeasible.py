"""Why nothing fits, and what would help: every change that is named is tried here too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sizing_cases import cluster_of, costs_of, problem_of

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.infeasible import InfeasiblePlan, is_possible
from disagmoe_compile.planner.size import size
from disagmoe_compile.planner.sizing_problem import SizingProblem


def infeasible(problem: SizingProblem) -> InfeasiblePlan:
    assert not is_possible(problem)
    with pytest.raises(InfeasiblePlan) as caught:
        size(problem)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return caught.value


def big_experts(**options: Any) -> SizingProblem:
    """8 experts of 8 MB of state altogether a boundary; 5 MB a GPU, of which 4.5 may be used."""
    costs = replace(
        costs_of(parameters=1000, activation_bytes=0.0),
        experts=(replace(costs_of().experts[0], parameters=500_000, activation_bytes=0.0),) * 2,
    )
    return problem_of(costs, cluster_of(4, 2, memory_bytes=5e6), pipeline_groups=1, **options)


def test_memory_of_ffn_ranks_is_named_with_both_numbers_and_the_group_size_that_helps() -> None:
    error = infeasible(big_experts(ffn_group_size=2))
    assert error.conflicts == ("memory[ffn]",)
    assert "needs 0.008 GB on FFN ranks" in str(error) and "has 0.0045 GB" in str(error)
    assert "raise ffn_group_size to >= 4" in error.changes
    assert is_possible(big_experts(ffn_group_size=4))


def test_recompute_is_suggested_where_it_makes_room() -> None:
    costs = costs_of(parameters=0, activation_bytes=1e6)
    problem = problem_of(costs, cluster_of(memory_bytes=2.1e6), recompute="none", micro_batch_size=1)
    error = infeasible(problem)
    assert "recompute" in error.changes
    assert is_possible(replace(problem, options=replace(problem.options, recompute=None)))


def test_sharding_is_suggested_where_it_makes_room() -> None:
    costs = costs_of(parameters=100_000, activation_bytes=0.0)
    problem = problem_of(costs, cluster_of(4, 2, memory_bytes=3e6))
    error = infeasible(problem)
    assert error.conflicts == ("memory[attention]",)
    assert any("shard" in change for change in error.changes)


def test_more_nodes_are_the_fewest_that_fit() -> None:
    problem = big_experts()
    small = replace(problem, cluster=replace(problem.cluster, gpus_per_node=1, nics_per_node=1))
    error = infeasible(small)
    (nodes,) = [int(change.split()[1]) for change in error.changes if change.startswith("use ")]
    on = [replace(small, cluster=small.cluster.with_nodes(n)) for n in (nodes, nodes - 1)]
    assert [is_possible(one) for one in on] == [True, False]


@pytest.mark.parametrize(
    ("options", "conflict"),
    [
        ({"pipeline_groups": 3}, "pipeline_groups"),
        ({"pipeline_groups": 4}, "pipeline_groups"),  # more than the boundaries
        ({"attention_group_size": 3, "ffn_group_size": 4}, "group_sizes"),
        ({"global_batch_size": 7, "attention_group_size": 2}, "batch"),
        ({"micro_batch_size": 100, "sequences_per_gpu": 1}, "micro_batch_size"),
    ],
)
def test_sizes_that_cannot_be_are_named(options: dict[str, Any], conflict: str) -> None:
    assert conflict in infeasible(problem_of(**options)).conflicts


def test_a_change_that_does_not_help_is_not_named() -> None:
    costs = costs_of(parameters=10**12)
    error = infeasible(problem_of(costs, ffn_group_size=2))
    assert error.changes == ()


def test_a_workload_states_its_batch_once() -> None:
    with pytest.raises(InputError, match="either global_batch_size or sequences_per_gpu"):
        problem_of(sequences_per_gpu=None)
