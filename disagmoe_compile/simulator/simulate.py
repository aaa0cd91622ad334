"""`disagmoe_compile.simulate`: what a step of a plan takes, from Python."""

from __future__ import annotations

import os

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.plan.validate import check
from disagmoe_compile.planner.hardware import Cluster, local_cpu, parse_cluster
from disagmoe_compile.planner.model_spec import ModelSpec, spec_from_dict
from disagmoe_compile.planner.size import candidate_of
from disagmoe_compile.planner.step_costs import CostSet, Dedup, ModelCosts, model_costs
from disagmoe_compile.simulator.plan_program import Durations, plan_program
from disagmoe_compile.simulator.planned import planned_model
from disagmoe_compile.simulator.program import Queueing
from disagmoe_compile.simulator.timeline import Timeline, simulate_program

CostModel = Durations | Cluster | ModelCosts


def simulate(plan: Plan | Sizing | str | os.PathLike[str], cost_model: CostModel | None = None) -> Timeline:
    """Simulates one step; times are seconds. `plan`: one, or the path of its file.

    plan of                                 `cost_model`
    `disagmoe_compile.plan` (sizes)         `ModelCosts` of its model; None: of the model that the plan was made for, as recorded
    a run (every action)                    `Durations`, measured or estimated; a `Cluster`, whose speed the plan's FLOPs and
                                            bytes take; None: one core a rank on this machine, with assumed numbers
    Raises PlanError for a plan that breaks a rule, InputError for a file that is none and a cost model that does not fit it.
    """
    known = plan if isinstance(plan, Plan | Sizing) else load_plan(plan)
    if isinstance(known, Sizing):
        if not (cost_model is None or isinstance(cost_model, ModelCosts)):
            raise InputError(
                f"a plan of sizes takes ModelCosts as its cost model, got {type(cost_model).__name__}"
            )
        costs = cost_model or _recorded_costs(known)
        model = planned_model(costs, recorded_cluster(known), candidate_of(known), Dedup(known.dedup))
        return simulate_program(model.program())
    if isinstance(cost_model, ModelCosts):
        raise InputError(
            "a plan of actions has its own FLOPs: it takes a Cluster or Durations as its cost model, got ModelCosts"
        )
    check(known)
    queueing = Queueing.LIST if isinstance(cost_model, Cluster) else Queueing.HOST
    if isinstance(cost_model, Durations):
        durations = cost_model
    else:
        durations = Durations.of_cluster(known, cost_model or local_cpu(known.topology.world_size))
    program = plan_program(known, durations, training=known.training is not None, queueing=queueing)
    return simulate_program(program)


def recorded_model(sizing: Sizing) -> ModelSpec:
    """What the plan was made for. Raises InputError where the plan names it and does not describe it."""
    model = sizing.inputs["model"]
    if set(model) == {"name"}:
        raise InputError(
            f"the plan does not describe its model ({model['name']}), which was traced: give its ModelCosts"
        )
    return spec_from_dict(model)


def recorded_cluster(sizing: Sizing) -> Cluster:
    return parse_cluster(sizing.inputs["cluster"], name="cluster of a plan")


def _recorded_costs(sizing: Sizing) -> ModelCosts:
    return model_costs(
        recorded_model(sizing),
        seq_length=sizing.seq_length,
        cost_set=CostSet(sizing.inputs["cost_set"]),
        element_bytes=sizing.inputs["element_bytes"],
    )
