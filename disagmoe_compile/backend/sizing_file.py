"""A plan file of `disagmoe plan` as options: its sizes, where the user gives none, checked against the model that was traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
        return _with_choices(options, sizing.options)
    fault = _other_model(sizing, programs) or _not_run(sizing) or _contradiction(sizing, options)
    if fault:
        raise PlanError(f"plan {options.plan} cannot be used: {fault}")
    options = _with_choices(options, {"dedup": sizing.dedup, "recompute": _recompute(sizing)})
    return replace(options, **{name: getattr(sizing, name) for name in _SIZES})


def _with_choices(options: Options, choices: Mapping[str, Any]) -> Options:
    """Raises PlanError where an option that was given says something else."""
    default = Options()
    for name in ("dedup", "payload_dtype", "recompute", "schedule"):
        given = getattr(options, name)
        planned = choices.get(name, given)  # a sizing says nothing of payload or schedule
        if given not in (planned, getattr(default, name)):
            raise PlanError(
                f"plan {options.plan} cannot be used: it has {name}={planned}, and the option says {given}; leave the option out"
            )
        options = replace(options, **{name: planned})
    return options


def _recompute(sizing: Sizing) -> str:
    """As the option says it."""
    sides = [side for side, what in sizing.recompute.items() if what == "stage"]
    return "stage" if len(sides) == 2 else sides[0] if sides else "none"


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
        (
            sizing.shared_experts_on == "ffn" and "shared experts on FFN ranks",
            "--shared-experts-on attention",
        ),
        (sizing.shard_optimizer and "sharded optimizer state", "no --shard-optimizer"),
        (sizing.dedup == "node" and "dedup=node", "--dedup rank"),
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
