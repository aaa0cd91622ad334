"""Stages of a plan, from a partitioned model: who holds which parameters, then sizes, FLOPs and bytes of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)
from disagmoe_compile.passes.stage_flops import attention_flops, expert_flops, tokens_of
from disagmoe_compile.plan.ir import Stage, TensorSpec
from disagmoe_compile.plan.topology import Role, Topology

Sizes = Mapping[sympy.Symbol, int]


def holding_stages(programs: ModelPrograms, fqns: Mapping[int, str], topology: Topology) -> tuple[Stage, ...]:
    """Every stage with the parameters that it uses and owns, without what depends on the size of a micro-batch: cheap.

    `fqns`: placeholder position -> fully qualified name. Raises UnsupportedModelError where a gradient would cross groups.
    """
    owner: dict[str, int] = {}
    for program in programs.attention:
        for fqn in _parameters([i for i in program.inputs if i.requires_grad], fqns):
            owner.setdefault(fqn, program.stage)
    for experts in programs.experts:
        for fqn in _parameters([p for p in experts.param_inputs if p.requires_grad], fqns):
            owner.setdefault(fqn, experts.stage)
    stages = [_attention_stage(program, fqns, owner) for program in programs.attention]
    stages += [_expert_stage(program, fqns, owner) for program in programs.experts]
    for stage in stages:
        _refuse_parameters_of_other_groups(stage, owner, topology)
    return tuple(sorted(stages, key=lambda s: s.index))


def filled_stages(
    programs: ModelPrograms,
    fqns: Mapping[int, str],
    micro: Sizes,
    topology: Topology,
    recomputed: Collection[Role] = (),
) -> tuple[Stage, ...]:
    """The same with inputs, outputs, FLOPs and bytes of a micro-batch. Stages of `recomputed` roles keep their inputs alone."""
    attention = {p.stage: p for p in programs.attention}
    experts = {p.stage: p for p in programs.experts}
    held = _held_bytes(programs, micro, recomputed)
    filled = []
    for stage in holding_stages(programs, fqns, topology):
        if stage.role is Role.ATTENTION:
            sized = _with_attention_sizes(stage, attention[stage.index], micro)
            filled.append(_holding(sized, held[stage.index]))
        else:
            n_tokens, n_sources = tokens_of(attention[stage.index - 1], micro), topology.attention_group_size
            sized = _with_expert_sizes(stage, experts[stage.index], n_tokens, n_sources)
            filled.append(_holding(sized, held[stage.index], n_sources))
    return tuple(filled)


def _holding(stage: Stage, held: tuple[int, int], n_sources: int = 1) -> Stage:
    kept, made_again = held
    return replace(stage, activation_bytes=kept * n_sources, second_forward_bytes=made_again * n_sources)


def _held_bytes(
    programs: ModelPrograms, micro: Sizes, recomputed: Collection[Role]
) -> dict[int, tuple[int, int]]:
    """Stage -> bytes kept for the backward of one attention rank's micro-batch, and bytes that a second forward makes beside
    them, counted on the stages' own operations.
    """
    costs = traced_costs(programs, micro)
    samples = 1 if programs.batch_symbol is None else micro[programs.batch_symbol]
    of_stage = {
        **{2 * b: one for b, one in enumerate((*costs.attention, costs.head))},
        **{2 * b + 1: one for b, one in enumerate(costs.experts)},
    }
    held = {}
    for index, one in of_stage.items():
        is_recomputed = (Role.FFN if index % 2 else Role.ATTENTION) in recomputed
        kept = one.activation_bytes_recompute if is_recomputed else one.activation_bytes
        made_again = one.second_forward_bytes if is_recomputed else 0.0
        held[index] = round(samples * kept), round(samples * made_again)
    return held


def owned_numels(
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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_parameters_of_other_groups(stage: Stage, owner: Mapping[str, int], topology: Topology) -> None:
    """A trained parameter whose gradient would have to cross worker groups."""
    for fqn in stage.param_fqns:
        if fqn in owner and topology.group_of_stage(owner[fqn]) != topology.group_of_stage(stage.index):
            raise UnsupportedModelError(
                f"parameter {fqn} is shared by stages of {topology.group_of_stage(owner[fqn])} and "
                f"{topology.group_of_stage(stage.index)}, and its gradient would have to cross groups: use pipeline_groups=1, "
                "or freeze it"
            )


def _attention_stage(program: AttentionProgram, fqns: Mapping[int, str], owner: Mapping[str, int]) -> Stage:
    used = _parameters(program.inputs, fqns)
    return Stage(
        index=program.stage,
        role=Role.ATTENTION,
        layers=program.layers,
        inputs=(),
        outputs=(),
        param_fqns=used,
        owned_fqns=tuple(fqn for fqn in used if owner.get(fqn) == program.stage),
    )


def _expert_stage(program: ExpertsProgram, fqns: Mapping[int, str], owner: Mapping[str, int]) -> Stage:
    used = _parameters(program.param_inputs, fqns)
    return Stage(
        index=program.stage,
        role=Role.FFN,
        layers=program.layers,
        inputs=(),
        outputs=(),
        param_fqns=used,
        owned_fqns=tuple(fqn for fqn in used if owner.get(fqn) == program.stage),
        num_experts=program.num_experts,
        expert_of={
            fqns[one.position]: expert
            for param in program.params
            if param.is_separate
            for expert, one in enumerate(param.inputs)
        },
    )


def _with_attention_sizes(stage: Stage, program: AttentionProgram, micro: Sizes) -> Stage:
    return replace(
        stage,
        inputs=_input_specs(program.tensor_inputs, micro),
        outputs=tuple(TensorSpec(o.name, bind(o.shape, micro), dtype_name(o.dtype)) for o in program.outputs),
        forward_flops=attention_flops(program, micro),
    )


def _with_expert_sizes(stage: Stage, program: ExpertsProgram, n_tokens: int, n_sources: int) -> Stage:
    n_pairs = n_tokens * program.top_k
    rows = TensorSpec("rows", (n_pairs, program.in_features), dtype_name(program.token_dtype))
    weights = TensorSpec("weights", (n_pairs,), dtype_name(program.weight_dtype))
    out = TensorSpec("out", (n_pairs, program.out_features), dtype_name(program.out_dtype))
    return replace(
        stage,
        inputs=(rows, weights),
        outputs=(out,),
        forward_flops=expert_flops(program, n_tokens) * n_sources,
    )


def _parameters(inputs: Sequence[StageInput], fqns: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(fqns[i.position] for i in inputs if i.kind is InputKind.PARAMETER)


def _input_specs(inputs: Sequence[StageInput], micro: Sizes) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(i.name, bind(i.shape, micro), dtype_name(i.dtype))
        for i in inputs
        if i.kind is not InputKind.PARAMETER and i.dtype is not None
    )
