"""A plan file of `disagmoe plan` as options: its sizes, where the user gives none, checked against the model that was traced."""

from __future__ import annotations

from dataclasses import replace

from disagmoe_compile.config import Options
from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.program import ModelPrograms
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.sizing import Sizing

_SIZES = (
    "attention_group_size",
    "ffn_group_size",
    "pipeline_groups",
    "n_microbatches",
    "microbatches_in_flight",
)


def with_sizing(options: Options, programs: ModelPrograms) -> Options:
    """`options` with the sizes of its plan file, where that is a sizing; otherwise as they are.

    Raises PlanError where the sizing is for another model, asks for what this version does not run, or contradicts an option.
    """
    if options.plan is None:
        return options
    sizing = load_plan(options.plan)
    if not isinstance(sizing, Sizing):
        return options
    fault = _other_model(sizing, programs) or _not_run(sizing) or _contradiction(sizing, options)
    if fault:
        raise PlanError(f"plan {options.plan} cannot be used: {fault}")
    return replace(options, **{name: getattr(sizing, name) for name in _SIZES})


def _other_model(sizing: Sizing, programs: ModelPrograms) -> str | None:
    experts = {e.num_experts for e in programs.experts}
    if sizing.n_boundaries == programs.n_boundaries and experts == {sizing.num_experts}:
        return None
    return (
        f"it is for a model with {sizing.n_boundaries} layers with {sizing.num_experts} experts each, this model has "
        f"{programs.n_boundaries} with {', '.join(map(str, sorted(experts)))}; make a plan for this model"
    )


def _not_run(sizing: Sizing) -> str | None:
    """What the planner can weigh and the runtime does not do yet: refused, never ignored."""
    for wanted, flag in (
        ("stage" in sizing.recompute.values() and "recompute", "--recompute none"),
        (
            sizing.shared_experts_on == "ffn" and "shared experts on FFN ranks",
            "--shared-experts-on attention",
        ),
        (sizing.shard_optimizer and "sharded optimizer state", "no --shard-optimizer"),
        (sizing.dedup != "rank" and f"dedup={sizing.dedup}", "--dedup rank"),
    ):
        if wanted:
            return f"it wants {wanted}, which this version does not run; plan again with {flag}"
    return None


def _contradiction(sizing: Sizing, options: Options) -> str | None:
    for name in _SIZES:
        given = getattr(options, name)
        if given is not None and given != getattr(sizing, name):
            return f"it has {name}={getattr(sizing, name)}, and the option says {given}; leave the option out"
    return None
