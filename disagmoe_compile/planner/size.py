"""From a sizing problem to a `Sizing`: solved, computed again, with what limits it and the plans that come next."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.planner.hardware import Cluster, find_cluster
from disagmoe_compile.planner.infeasible import explain_infeasible
from disagmoe_compile.planner.layout_search import best_of_layout, upper_bounds
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.sizing_milp import Best, solve_milp
from disagmoe_compile.planner.sizing_problem import (
    Candidate,
    GroupSizes,
    Layout,
    Policy,
    SizingOptions,
    SizingProblem,
    TrainingWorkload,
)
from disagmoe_compile.planner.step_costs import CostSet, model_costs
from disagmoe_compile.planner.step_model import Prediction, StepModel

BINDING_TOLERANCE = 0.01
"""A resource binds if it works for at least 99% of the pace."""
MOST_LAYOUTS_FOR_ALTERNATIVES = 2000


def plan(
    model_spec: ModelSpec,
    cluster: Cluster | str,
    workload: TrainingWorkload,
    *,
    costs: str = CostSet.CORRECTED,
    time_limit_s: float = 60,
    alternatives: int = 3,
    **options: Any,
) -> Sizing:
    """Sizes a cluster for a model: the plan with most tokens a second that fits its memory. `options`: see `SizingOptions`.

    `cluster`: one, or the name of a node type for one node. Raises InputError where nothing fits, saying what conflicts and
    what to relax, and DisagMoEError where the time was too short for any plan.
    """
    known = find_cluster(cluster) if isinstance(cluster, str) else cluster
    stage_costs = model_costs(model_spec, seq_length=workload.seq_length, cost_set=CostSet(costs))
    problem = SizingProblem(stage_costs, known, workload, SizingOptions(**options))
    return size(
        problem, time_limit_s=time_limit_s, alternatives=alternatives, model_document=model_spec.to_dict()
    )


def size(
    problem: SizingProblem,
    *,
    time_limit_s: float = 60,
    alternatives: int = 3,
    model_document: dict[str, Any] | None = None,
) -> Sizing:
    """The best plan of `problem`, as `plan`."""
    started = time.monotonic()
    model = StepModel(problem)
    best = solve_milp(problem, model, time_limit_s=time_limit_s)
    if best is None:
        raise explain_infeasible(problem)
    seconds = time.monotonic() - started
    found = best.candidate, best.prediction
    others = next_best(problem, model, alternatives, beside=best.candidate)
    solver = {
        "name": best.solver,
        "status": best.status,
        "bound": best.bound_tokens_per_s,
        "gap": _gap(best),
        "seconds": seconds,
    }
    return sizing_of(problem, model, *found, solver=solver, others=others, model_document=model_document)


def _gap(best: Best) -> float:
    return max(0.0, best.bound_tokens_per_s / best.prediction.tokens_per_s - 1)


def sizing_of(
    problem: SizingProblem,
    model: StepModel,
    candidate: Candidate,
    prediction: Prediction,
    *,
    solver: dict[str, Any],
    others: Sequence[tuple[Candidate, Prediction]] = (),
    model_document: dict[str, Any] | None = None,
) -> Sizing:
    """A choice as the document that people, files and the backend read."""
    layout, policy = candidate.layout, candidate.policy
    groups = layout.pipeline_groups
    return Sizing(
        world_size=groups * (layout.attention_group_size + layout.ffn_group_size),
        attention_gpus=groups * layout.attention_group_size,
        ffn_gpus=groups * layout.ffn_group_size,
        **choice_document(candidate),
        attention_nics=_whole(groups * candidate.attention_nics),
        ffn_nics=_whole(groups * candidate.ffn_nics),
        global_batch_size=layout.global_batch_size,
        seq_length=problem.costs.seq_length,
        n_boundaries=problem.costs.n_boundaries,
        num_experts=problem.costs.num_experts,
        shard_optimizer=policy.shard_optimizer,
        dedup=problem.options.dedup.value,
        t_attention_s=prediction.attention.busy_s / prediction.stages,
        t_ffn_s=prediction.ffn.busy_s / prediction.stages,
        t_star_s=prediction.pace_s / prediction.stages,
        step_s=prediction.step_s,
        balance_score=prediction.balance,
        tokens_per_s=prediction.tokens_per_s,
        memory_bytes={
            "attention": prediction.attention.memory_bytes,
            "ffn": prediction.ffn.memory_bytes,
        },
        solver=solver,
        binding=binding_constraints(problem, model, candidate, prediction),
        alternatives=tuple({**choice_document(c), "tokens_per_s": p.tokens_per_s} for c, p in others),
        inputs=_inputs(problem, model_document),
        versions=_versions(),
    )


def candidate_of(sizing: Sizing) -> Candidate:
    """The choice that a sizing came from."""
    layout = Layout(
        sizing.pipeline_groups,
        sizing.attention_group_size,
        sizing.ffn_group_size,
        sizing.micro_batch_size,
        sizing.n_microbatches,
        sizing.shared_experts_on == "ffn",
    )
    policy = Policy(
        sizing.recompute["attention"] == "stage",
        sizing.recompute["ffn"] == "stage",
        sizing.shard_optimizer,
        sizing.microbatches_in_flight,
    )
    groups = sizing.pipeline_groups
    return Candidate(layout, policy, sizing.attention_nics / groups, sizing.ffn_nics / groups)


def binding_constraints(
    problem: SizingProblem, model: StepModel, candidate: Candidate, prediction: Prediction
) -> tuple[str, ...]:
    """Resources that set the pace; and memory or the number of micro-batches where they forbid a faster policy of this layout."""
    names = [
        name
        for name, seconds in prediction.resources().items()
        if seconds >= prediction.pace_s * (1 - BINDING_TOLERANCE)
    ]
    for policy in problem.policies(candidate.layout.pipeline_groups):
        other = replace(candidate, policy=policy)
        faster = model.predict(other)
        if faster.step_s < prediction.step_s * (1 - 1e-9):
            if not problem.go_together(other.layout, policy):
                continue
            for role, load in (("attention", faster.attention), ("ffn", faster.ffn)):
                if load.memory_bytes > problem.memory_bytes:
                    names.append(f"memory[{role}]")
    return tuple(dict.fromkeys(names))


def next_best(
    problem: SizingProblem, model: StepModel, count: int, *, beside: Candidate
) -> list[tuple[Candidate, Prediction]]:
    """The best plans of other group sizes, best first: layouts by falling bound, until none can be among the `count` best."""
    found: dict[GroupSizes, tuple[Candidate, Prediction]] = {}
    bounds = upper_bounds(problem, model, problem.layouts()) if count else {}
    ordered = sorted(bounds, key=lambda s: -bounds[s])
    for layout in ordered[:MOST_LAYOUTS_FOR_ALTERNATIVES]:
        best = sorted(found.values(), key=lambda f: -f[1].tokens_per_s)[:count]
        if len(best) == count and bounds[layout] <= best[-1][1].tokens_per_s:
            break
        if layout.sizes == beside.layout.sizes:
            continue
        plan = best_of_layout(problem, model, layout)
        if plan is not None:
            rival = found.get(layout.sizes)
            if rival is None or plan[1].tokens_per_s > rival[1].tokens_per_s:
                found[layout.sizes] = plan
    return sorted(found.values(), key=lambda f: -f[1].tokens_per_s)[:count]


def choice_document(candidate: Candidate) -> dict[str, Any]:
    """The sizes of a choice under the names that plan files use."""
    layout, policy = candidate.layout, candidate.policy
    return {
        "pipeline_groups": layout.pipeline_groups,
        "attention_group_size": layout.attention_group_size,
        "ffn_group_size": layout.ffn_group_size,
        "micro_batch_size": layout.micro_batch_size,
        "n_microbatches": layout.n_microbatches,
        "microbatches_in_flight": policy.in_flight,
        "recompute": {
            "attention": "stage" if policy.recompute_attention else "none",
            "ffn": "stage" if policy.recompute_ffn else "none",
        },
        "shared_experts_on": "ffn" if layout.shared_on_ffn else "attention",
    }


def _inputs(problem: SizingProblem, model_document: dict[str, Any] | None) -> dict[str, Any]:
    costs = problem.costs
    return {
        "model": model_document or {"name": costs.name},
        "cost_set": costs.cost_set.value,
        "element_bytes": costs.element_bytes,
        "cluster": problem.cluster.to_dict(),
        "workload": asdict(problem.workload),
        "options": {**asdict(problem.options), "dedup": problem.options.dedup.value},
    }


def _versions() -> dict[str, str]:
    return {
        "disagmoe-compile": metadata.version("disagmoe-compile"),
        "pyomo": metadata.version("pyomo"),
        "highspy": metadata.version("highspy"),
        "python": platform.python_version(),
    }


def _whole(nics: float) -> float:
    """As an int where it is one, for people and JSON."""
    return int(nics) if float(nics).is_integer() else nics
