"""From a partitioned model to a Plan: choose the topology and the micro-batches, then build, schedule, lower and validate."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.backend.sizing_file import with_sizing
from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError, PlanError, UnsupportedModelError
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.forward_only import forward_only
from disagmoe_compile.passes.schedule.gpipe import gpipe
from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.passes.stage_flops import (
    activation_bytes,
    attention_flops,
    expert_flops,
    tokens_of,
)
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.exchange import RowExchange
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.ir import Plan, Stage, TensorSpec, Workload
from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers
from disagmoe_compile.plan.validate import check
from disagmoe_compile.planner.cost_model import StageCosts, split_world
from disagmoe_compile.planner.hardware import local_cpu

Sizes = Mapping[sympy.Symbol, int]


def choose_topology(programs: ModelPrograms, sizes: Sizes, options: Options, world_size: int) -> Topology:
    """The user's group sizes, completed from the world size; with none given, the planner's split on counted costs.

    Raises InputError naming all sizes where they do not multiply up.
    """
    options = with_sizing(options, programs)
    attention, ffn, groups = options.attention_group_size, options.ffn_group_size, options.pipeline_groups
    if groups is None:
        pair = attention + ffn if attention and ffn else None
        groups = world_size // pair if pair and world_size % pair == 0 else 1
    per_pair, rest = divmod(world_size, groups)
    if rest == 0 and (attention is None) != (ffn is None):
        attention, ffn = attention or per_pair - (ffn or 0), ffn or per_pair - (attention or 0)
    if rest == 0 and attention is None and ffn is None:
        attention, ffn = _planned_split(programs, sizes, per_pair, groups)
    if (
        rest
        or attention is None
        or ffn is None
        or min(attention, ffn) < 1
        or groups * (attention + ffn) != world_size
    ):
        asked = ", ".join(
            f"{name}={getattr(options, name)}"
            for name in ("attention_group_size", "ffn_group_size", "pipeline_groups")
            if getattr(options, name) is not None
        )
        raise InputError(
            f"group sizes do not match the world size: {asked or 'none given'}, world size {world_size}; needed is "
            f"pipeline_groups * (attention_group_size + ffn_group_size) = world size, each at least 1"
        )
    fewest = min(e.num_experts for e in programs.experts)
    if ffn > fewest:
        raise InputError(
            f"ffn_group_size={ffn} is more than the model's {fewest} experts: an FFN rank would own none"
        )
    return Topology(attention, ffn, groups, groups, programs.n_boundaries, programs.tied_head)


def _planned_split(programs: ModelPrograms, sizes: Sizes, per_pair: int, groups: int) -> tuple[int, int]:
    if per_pair < 2:
        raise InputError(
            f"{per_pair * groups} rank(s) in {groups} pipeline group(s): each needs an attention and an FFN rank"
        )
    batch = _batch(programs, sizes)
    attention, ffn, _ = split_world(
        StageCosts.mean(traced_costs(programs, sizes)),
        world_size=per_pair * groups,
        pipeline_groups=groups,
        hardware=local_cpu(per_pair * groups),
        allowed_attention_sizes=tuple(m for m in range(1, per_pair) if batch % m == 0),
        max_ffn_size=min(e.num_experts for e in programs.experts),
    )
    return attention, ffn


def choose_workload(programs: ModelPrograms, sizes: Sizes, topology: Topology, options: Options) -> Workload:
    """The user's micro-batches; or as many as divide the batch, up to the 8p that fill the pipeline twice."""
    batch, attention = _batch(programs, sizes), topology.attention_group_size
    n_microbatches = options.n_microbatches
    if n_microbatches is None and batch % attention == 0:
        share, most = batch // attention, 8 * topology.attention_groups
        n_microbatches = max(n for n in range(1, min(share, most) + 1) if share % n == 0)
    if n_microbatches is None or batch % (attention * n_microbatches):
        raise InputError(
            f"a global batch of {batch} samples is not divisible by attention_group_size * n_microbatches = "
            f"{attention} * {n_microbatches or 1}; change the batch size or one of the two"
        )
    size = batch // (attention * n_microbatches)
    micro = microbatch_sizes(programs, sizes, size)
    return Workload(batch, n_microbatches, size, max(1, tokens_of(programs.attention[0], micro) // size))


def microbatch_sizes(programs: ModelPrograms, sizes: Sizes, microbatch_size: int) -> dict[sympy.Symbol, int]:
    """The call's sizes with the batch replaced by a micro-batch."""
    if programs.batch_symbol is None:
        return dict(sizes)
    return {**sizes, programs.batch_symbol: microbatch_size}


def _batch(programs: ModelPrograms, sizes: Sizes) -> int:
    return 1 if programs.batch_symbol is None else sizes[programs.batch_symbol]


def make_plan(
    programs: ModelPrograms,
    parameter_fqns: Mapping[int, str],
    sizes: Sizes,
    topology: Topology,
    options: Options,
    graph_fingerprint: str,
) -> Plan:
    """A validated plan for calls of these sizes. `parameter_fqns`: placeholder position -> fully qualified name."""
    options = with_sizing(options, programs)
    workload = choose_workload(programs, sizes, topology, options)
    micro = microbatch_sizes(programs, sizes, workload.microbatch_size)
    boundaries = [boundary_sizes(a, e, micro) for a, e in zip(programs.attention, programs.experts)]
    stages = _stages(programs, parameter_fqns, micro, topology)
    trains = programs.loss is not None
    transfers = build_transfers(
        topology,
        boundaries,
        _owned_numels(programs, parameter_fqns, stages),
        training=trains,
        exchange=RowExchange(options.dedup, options.payload_dtype),
    )
    owned = [s.index for s in stages if s.owned_fqns] if topology.attention_group_size > 1 else []
    n = workload.n_microbatches
    if options.schedule == "gpipe":
        compute_only = gpipe(topology, n)
    else:
        compute_only = af_pipe(topology, n, interleave=options.microbatches_in_flight)
    training = lower(compute_only, topology, transfers, owned_stages=owned) if trains else None
    forward = lower(forward_only(topology, n), topology, transfers, owned_stages=())
    plan = Plan(
        stages=stages,
        transfers=transfers,
        topology=topology,
        workload=workload,
        training=training,
        forward_only=forward,
        resident_limit=max(max(peak_residency(s).values()) for s in (training, forward) if s is not None),
        graph_fingerprint=graph_fingerprint,
        options={
            "schedule": options.schedule,
            "stage_compiler": options.stage_compiler,
            "dedup": options.dedup,
            "payload_dtype": options.payload_dtype,
            "recompute": options.recompute,
        },
        versions={"torch": torch.__version__.split("+")[0], "python": platform.python_version()},
    )
    check(plan)
    return plan


def load_plan_for(path: str, generated: Plan) -> Plan:
    """The plan of a file, if it is for this graph, batch and world. Its schedules replace the generated ones.

    Raises PlanError saying what differs.
    """
    plan = load_plan(path)
    if isinstance(plan, Sizing):
        return generated  # made with its sizes
    for what in ("graph_fingerprint", "workload", "topology", "stages", "transfers"):
        if getattr(plan, what) != getattr(generated, what):
            raise PlanError(
                f"plan {path} is for another {what.replace('_', ' ')}: {_short(getattr(plan, what))} in the file, "
                f"{_short(getattr(generated, what))} in this run; make a new plan for this model, batch and world size"
            )
    check(plan)
    return replace(
        generated, training=plan.training, forward_only=plan.forward_only, resident_limit=plan.resident_limit
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{len(text)} characters, {text[:100]}..."


def boundary_sizes(attention: AttentionProgram, experts: ExpertsProgram, micro: Sizes) -> BoundarySizes:
    carried = [attention.outputs[position] for position in attention.carried]
    return BoundarySizes(
        tokens=tokens_of(attention, micro),
        top_k=experts.top_k,
        in_features=experts.in_features,
        out_features=experts.out_features,
        token_dtype=dtype_name(experts.token_dtype),
        weight_dtype=dtype_name(experts.weight_dtype),
        out_dtype=dtype_name(experts.out_dtype),
        num_experts=experts.num_experts,
        carried=tuple(
            TensorSpec(f"carried_{i}", bind(o.shape, micro), dtype_name(o.dtype))
            for i, o in enumerate(carried)
        ),
        carried_requires_grad=tuple(o.requires_grad for o in carried),
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stages(
    programs: ModelPrograms, fqns: Mapping[int, str], micro: Sizes, topology: Topology
) -> tuple[Stage, ...]:
    owner: dict[str, int] = {}
    for program in programs.attention:
        for fqn in _parameters([i for i in program.inputs if i.requires_grad], fqns):
            owner.setdefault(fqn, program.stage)
    for experts in programs.experts:
        for fqn in _parameters([p for p in experts.param_inputs if p.requires_grad], fqns):
            owner.setdefault(fqn, experts.stage)
    stages = [_attention_stage(program, fqns, micro, owner) for program in programs.attention]
    for experts, before in zip(programs.experts, programs.attention):
        n_tokens = tokens_of(before, micro)
        stages.append(_expert_stage(experts, fqns, n_tokens, topology.attention_group_size, owner))
    for stage in stages:
        _refuse_parameters_of_other_groups(stage, owner, topology)
    return tuple(sorted(stages, key=lambda s: s.index))


def _refuse_parameters_of_other_groups(stage: Stage, owner: Mapping[str, int], topology: Topology) -> None:
    """A trained parameter whose gradient would have to cross worker groups."""
    for fqn in stage.param_fqns:
        if fqn in owner and topology.group_of_stage(owner[fqn]) != topology.group_of_stage(stage.index):
            raise UnsupportedModelError(
                f"parameter {fqn} is shared by stages of {topology.group_of_stage(owner[fqn])} and "
                f"{topology.group_of_stage(stage.index)}, and its gradient would have to cross groups: use pipeline_groups=1, "
                "or freeze it"
            )


def _attention_stage(
    program: AttentionProgram, fqns: Mapping[int, str], micro: Sizes, owner: Mapping[str, int]
) -> Stage:
    used = _parameters(program.inputs, fqns)
    return Stage(
        index=program.stage,
        role=Role.ATTENTION,
        layers=program.layers,
        inputs=_input_specs(program.tensor_inputs, micro),
        outputs=tuple(TensorSpec(o.name, bind(o.shape, micro), dtype_name(o.dtype)) for o in program.outputs),
        param_fqns=used,
        owned_fqns=tuple(fqn for fqn in used if owner.get(fqn) == program.stage),
        forward_flops=attention_flops(program, micro),
        activation_bytes=activation_bytes(program, micro),
    )


def _expert_stage(
    program: ExpertsProgram, fqns: Mapping[int, str], n_tokens: int, n_sources: int, owner: Mapping[str, int]
) -> Stage:
    used = _parameters(program.param_inputs, fqns)
    n_pairs = n_tokens * program.top_k
    rows = TensorSpec("rows", (n_pairs, program.in_features), dtype_name(program.token_dtype))
    weights = TensorSpec("weights", (n_pairs,), dtype_name(program.weight_dtype))
    out = TensorSpec("out", (n_pairs, program.out_features), dtype_name(program.out_dtype))
    return Stage(
        index=program.stage,
        role=Role.FFN,
        layers=program.layers,
        inputs=(rows, weights),
        outputs=(out,),
        param_fqns=used,
        owned_fqns=tuple(fqn for fqn in used if owner.get(fqn) == program.stage),
        num_experts=program.num_experts,
        forward_flops=expert_flops(program, n_tokens) * n_sources,
        activation_bytes=rows.nbytes() + out.nbytes(),
        expert_of={
            fqns[one.position]: expert
            for param in program.params
            if param.is_separate
            for expert, one in enumerate(param.inputs)
        },
    )


def _parameters(inputs: Sequence[StageInput], fqns: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(fqns[i.position] for i in inputs if i.kind is InputKind.PARAMETER)


def _input_specs(inputs: Sequence[StageInput], micro: Sizes) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(i.name, bind(i.shape, micro), dtype_name(i.dtype))
        for i in inputs
        if i.kind is not InputKind.PARAMETER and i.dtype is not None
    )


def _owned_numels(
    programs: ModelPrograms, fqns: Mapping[int, str], stages: Sequence[Stage]
) -> dict[int, dict[str, int]]:
    """Attention stage -> dtype -> elements whose gradients it owns."""
    numels: dict[int, dict[str, int]] = {}
    for program in programs.attention:
        owned = set(stages[program.stage].owned_fqns)
        for one in program.inputs:
            if one.kind is InputKind.PARAMETER and fqns[one.position] in owned and one.dtype is not None:
                per_dtype = numels.setdefault(program.stage, {})
                name = dtype_name(one.dtype)
                per_dtype[name] = per_dtype.get(name, 0) + math.prod(bind(one.shape, {}))
    return numels
