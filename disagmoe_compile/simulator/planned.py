"""A choice of the planner as a simulated step: the same costs and sizes, and the schedule that the runtime would run for them."""

from __future__ import annotations

from collections.abc import Callable

from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.sizing_problem import Candidate, SizingProblem
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.timeline import simulate_program


def planned_model(costs: ModelCosts, cluster: Cluster, candidate: Candidate, dedup: Dedup) -> AFModel:
    """AF-Pipe with the sizes, NICs and policy of `candidate`, in rounds as `passes/schedule/af_pipe.py` orders them.

    Raises InputError where the sizes do not fit the model or the cluster.
    """
    layout, policy = candidate.layout, candidate.policy
    choice = AFChoice(
        layout.pipeline_groups,
        layout.attention_group_size,
        layout.ffn_group_size,
        layout.micro_batch_size,
        layout.n_microbatches,
        dedup,
        layout.shared_on_ffn,
        policy.recompute_attention,
        policy.recompute_ffn,
        policy.in_flight,
        attention_nics=candidate.attention_nics,
        ffn_nics=candidate.ffn_nics,
    )
    return AFModel(costs, cluster, choice)


def simulated_steps(problem: SizingProblem) -> Callable[[Candidate], float]:
    """A profile for Algorithm 1 (`planner/refine.py`): seconds of a simulated step of a choice."""

    def seconds(candidate: Candidate) -> float:
        model = planned_model(problem.costs, problem.cluster, candidate, problem.options.dedup)
        return float(simulate_program(model.program()).makespan)

    return seconds
