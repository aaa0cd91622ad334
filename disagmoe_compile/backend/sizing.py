"""Sizes of a run inside torch.compile: what the user fixed, and for the rest the planner's choice.

The planner is that of `disagmoe plan`, with the costs counted on the traced graph (`model_costs.py`) instead of closed forms, and
this machine as the cluster: a group's ranks bring their own NICs, the speeds are assumed (`local_cpu`), the memory is the
machine's. It chooses groups and micro-batches in flight; micro-batches are as many as fill the pipeline, at each call anew.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import sympy

from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.backend.planning import batch_size
from disagmoe_compile.backend.sizing_file import with_sizing
from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.program import InputKind, ModelPrograms
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.planner.hardware import Cluster, local_cpu
from disagmoe_compile.planner.size import size
from disagmoe_compile.planner.sizing_problem import (
    SizingOptions,
    SizingProblem,
    TrainingState,
    TrainingWorkload,
)

_GROUPS = ("attention_group_size", "ffn_group_size", "pipeline_groups")


def choose_sizes(
    programs: ModelPrograms, sizes: Mapping[sympy.Symbol, int], options: Options, world_size: int
) -> tuple[Topology, Options]:
    """The topology, and `options` with the sizes that go with it. Deterministic, but for the memory of the machine.

    What the user leaves open follows from the world size, or is planned. Raises InputError naming all sizes where they do not
    multiply up, or where no plan fits.
    """
    options = with_sizing(options, programs)
    _check(programs, options, world_size)
    options = _implied(options, world_size)
    if None in (options.attention_group_size, options.ffn_group_size, options.pipeline_groups):
        options = _planned(programs, sizes, options, world_size)
    attention, ffn, groups = options.attention_group_size, options.ffn_group_size, options.pipeline_groups
    assert attention is not None and ffn is not None and groups is not None
    return Topology(attention, ffn, groups, groups, programs.n_boundaries, programs.tied_head), options


def _check(programs: ModelPrograms, options: Options, world_size: int) -> None:
    attention, ffn, groups = options.attention_group_size, options.ffn_group_size, options.pipeline_groups
    depths = [groups] if groups else range(1, world_size // 2 + 1)
    pairs = [world_size // p for p in depths if world_size % p == 0]
    least = (attention or 1) + (ffn or 1)
    if not any(pair == least if attention and ffn else pair >= least for pair in pairs):
        asked = ", ".join(f"{name}={getattr(options, name)}" for name in _GROUPS if getattr(options, name))
        raise InputError(
            f"group sizes do not match the world size: {asked or 'none given'}, world size {world_size}; needed is "
            f"pipeline_groups * (attention_group_size + ffn_group_size) = world size, each at least 1"
        )
    fewest = min(e.num_experts for e in programs.experts)
    if ffn and ffn > fewest:
        raise InputError(
            f"ffn_group_size={ffn} is more than the model's {fewest} experts: an FFN rank would own none"
        )


def _implied(options: Options, world_size: int) -> Options:
    """Two of the three sizes leave no choice for the third."""
    attention, ffn, groups = options.attention_group_size, options.ffn_group_size, options.pipeline_groups
    if groups is None and attention and ffn:
        return replace(options, pipeline_groups=world_size // (attention + ffn))
    if groups and attention:
        return replace(options, ffn_group_size=world_size // groups - attention)
    if groups and ffn:
        return replace(options, attention_group_size=world_size // groups - ffn)
    return options


def _planned(
    programs: ModelPrograms, sizes: Mapping[sympy.Symbol, int], options: Options, world_size: int
) -> Options:
    costs = traced_costs(programs, sizes)
    groups = 1 if _shares_parameters(programs) else None
    problem = SizingProblem(
        costs,
        _this_machine(world_size),
        TrainingWorkload(
            costs.seq_length,
            global_batch_size=batch_size(programs, sizes),
            n_microbatches=options.n_microbatches,
            fills_pipeline=True,
        ),
        SizingOptions(
            dedup=options.dedup,  # type: ignore[arg-type]
            pipeline_groups=options.pipeline_groups or groups,
            attention_group_size=options.attention_group_size,
            ffn_group_size=options.ffn_group_size,
            recompute=options.recompute,
            shared_experts_on="attention",
            state=TrainingState(costs.element_bytes, costs.element_bytes, 2 * costs.element_bytes),
        ),
    )
    found = size(problem, alternatives=0)
    return replace(
        options,
        attention_group_size=found.attention_group_size,
        ffn_group_size=found.ffn_group_size,
        pipeline_groups=found.pipeline_groups,
        microbatches_in_flight=options.microbatches_in_flight or found.microbatches_in_flight,
    )


def _shares_parameters(programs: ModelPrograms) -> bool:
    """Whether stages that may be on different groups train the same parameter; a tied head is always beside the embedding."""
    attention = programs.attention[:-1] if programs.tied_head else programs.attention
    trained = [
        {i.position for i in p.inputs if i.kind is InputKind.PARAMETER and i.requires_grad} for p in attention
    ]
    trained += [{i.position for i in p.param_inputs if i.requires_grad} for p in programs.experts]
    return any(count > 1 for count in Counter(position for one in trained for position in one).values())


def _this_machine(world_size: int) -> Cluster:
    """Its memory shared out over the ranks that run here; other machines of the run are taken to be like it."""
    cluster = local_cpu(world_size)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, min(ranks_here, world_size))
    return replace(cluster, gpu=replace(cluster.gpu, memory_bytes=memory))
