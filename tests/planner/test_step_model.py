"""Predicted times and memory: closed forms, limits, and an event simulation of the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_timing import makespan
from sizing_cases import cluster_of, costs_of, problem_of

from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.planner.exhaustive import candidates
from disagmoe_compile.planner.sizing_problem import Candidate, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_model import StepModel, stall_factor

EAGER = Policy(recompute_attention=False, recompute_ffn=False, shard_optimizer=False, in_flight=1)


def candidate(
    m: int = 4, n: int = 4, *, p: int = 1, b: int = 1, count: int = 4, **policy: object
) -> Candidate:
    return Candidate(Layout(p, m, n, b, count, False), replace(EAGER, **policy), float(m), float(n))  # type: ignore[arg-type]


def model_of(problem: SizingProblem | None = None) -> StepModel:
    return StepModel(problem or problem_of())


def test_compute_of_attention_is_flops_over_the_peak() -> None:
    found = model_of().predict(candidate(count=5))
    flops = 3 * (2 * 4e9 + 4e9 / 3)  # forward and twice that backward; two stages and the head
    assert found.attention.compute_s == pytest.approx(5 * flops / 1e12)


def test_one_expert_too_many_on_a_rank_slows_the_group() -> None:
    model = model_of(problem_of(costs_of(num_experts=8)))
    even, uneven = (model.predict(candidate(4, n)).ffn.compute_s for n in (4, 5))
    assert uneven == pytest.approx(even)  # two experts on the fullest rank either way


def test_recompute_adds_a_forward_and_frees_activations() -> None:
    model = model_of()
    kept, again = model.predict(candidate()), model.predict(candidate(recompute_attention=True))
    assert again.attention.compute_s == pytest.approx(kept.attention.compute_s * 4 / 3)
    assert again.attention.activation_bytes < kept.attention.activation_bytes
    assert again.ffn == kept.ffn


def test_sharding_divides_optimizer_state_over_the_replicas() -> None:
    model = model_of(problem_of(costs_of(parameters=1000)))
    whole, sharded = model.predict(candidate()), model.predict(candidate(shard_optimizer=True))
    assert whole.attention.state_bytes - sharded.attention.state_bytes == 3000 * 12 * 3 / 4


def test_the_residual_crosses_nics_only_between_groups() -> None:
    costs = costs_of(boundaries=4)
    model = model_of(problem_of(costs, cluster_of(4, 4)))
    one, two = model.predict(candidate(p=1, count=64)), model.predict(candidate(p=2, count=64))
    without = replace(costs, residual_bytes_per_token=0)
    bare = model_of(problem_of(without, cluster_of(4, 4))).predict(candidate(p=2, count=64))
    residual_s = 2 * 2 * costs.residual_bytes_per_token * costs.seq_length * 4 * 64 / (4 * 1e9)
    assert two.attention.exchange_s - bare.attention.exchange_s == pytest.approx(residual_s)
    assert one.ffn.exchange_s == pytest.approx(2 * two.ffn.exchange_s)


def test_deduplication_sends_less() -> None:
    seconds = []
    for dedup in ("none", "rank", "node"):
        problem = problem_of(costs_of(top_k=4), cluster_of(4, 4), dedup=dedup)
        seconds.append(model_of(problem).predict(candidate(4, 4)).ffn.exchange_s)
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3


def test_balance_is_two_where_no_side_waits_for_its_nics() -> None:
    assert model_of(problem_of(costs_of(token_bytes=2))).predict(candidate()).balance == 2
    assert model_of(problem_of(costs_of(token_bytes=10**7))).predict(candidate()).balance < 2


def test_time_grows_with_every_cost() -> None:
    base = model_of(problem_of(costs_of())).predict(candidate()).step_s
    for more in ({"attention": 2e10}, {"experts": 40e9}, {"token_bytes": 10**7}):
        assert model_of(problem_of(costs_of(**more))).predict(candidate()).step_s > base  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", [0.05, 0.6])
@pytest.mark.parametrize(("p", "in_flight"), [(1, 2), (1, 4), (2, 4), (2, 8), (4, 16), (4, 8)])
def test_filling_and_stalls_are_within_a_quarter_of_a_simulation(
    p: int, in_flight: int, exchange: float
) -> None:
    boundaries, n = 24, 4 * in_flight
    model = model_of(problem_of(costs_of(boundaries=boundaries)))
    layout = Layout(p, 1, 1, 1, n, False)
    pace = n * boundaries / p * max(3.0, 2 * exchange)
    predicted = pace * model.fill(layout) * stall_factor(p, in_flight)
    simulated = makespan(Topology(1, 1, p, p, boundaries), n, in_flight, a=1.0, f=1.0, exchange=exchange)
    assert predicted == pytest.approx(simulated, rel=1 / 4)


def test_every_choice_uses_all_gpus_and_the_batch() -> None:
    problem = problem_of(
        costs_of(boundaries=3), cluster_of(4, 3), sequences_per_gpu=None, global_batch_size=24
    )
    every = list(candidates(problem))
    assert every
    for one in every:
        layout = one.layout
        assert layout.pipeline_groups * (layout.attention_group_size + layout.ffn_group_size) == 12
        assert layout.global_batch_size == 24
        assert one.attention_nics + one.ffn_nics == 12 / layout.pipeline_groups
