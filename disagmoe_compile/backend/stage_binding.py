"""Programs, bound to the sizes of micro-batches and compiled: what this rank's worker runs.

Equal layers compile once. With a stage compiler that leaves a cache on disk, one rank compiles each class first and the others
find it there: classes are dealt out over their owners, so different ranks compile different classes at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch
import torch.distributed as dist

from disagmoe_compile.passes.aot import (
    RecomputedStage,
    attention_key,
    compile_attention,
    compile_experts,
    experts_key,
)
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)
from disagmoe_compile.passes.program import ExpertParam as ParamOfAllExperts
from disagmoe_compile.plan.exchange import RowExchange
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.runtime.stages import (
    AttentionStage,
    Boundary,
    BufferDelta,
    CarriedValue,
    CompiledStage,
    DispatchOutputs,
    ExpertParam,
    ExpertStage,
    SizedStages,
    Source,
    SourceKind,
)

Sizes = Mapping[sympy.Symbol, int]
AnyProgram = AttentionProgram | ExpertsProgram


def bind_boundaries(programs: ModelPrograms, plan: Plan, micro: Sizes) -> tuple[Boundary, ...]:
    boundaries = []
    for attention, experts in zip(programs.attention, programs.experts):
        assert attention.dispatch is not None
        carried = [attention.outputs[position] for position in attention.carried]
        boundaries.append(
            Boundary(
                n_tokens=bind(attention.outputs[attention.dispatch.tokens].shape, micro)[0],
                num_experts=experts.num_experts,
                n_pairs=bind(attention.outputs[attention.dispatch.token_ids].shape, micro)[0],
                in_features=experts.in_features,
                out_features=experts.out_features,
                token_dtype=experts.token_dtype,
                weight_dtype=experts.weight_dtype,
                out_dtype=experts.out_dtype,
                carried=tuple(CarriedValue(bind(o.shape, micro), o.dtype, o.requires_grad) for o in carried),
                exchange=RowExchange.of_options(plan.options),
            )
        )
    return tuple(boundaries)


class StageBinder:
    """Compiles a rank's stages. `fqns`: placeholder position -> parameter name."""

    def __init__(
        self,
        programs: ModelPrograms,
        fqns: Mapping[int, str],
        *,
        compiler: str,
        training: bool,
        device: torch.device,
    ) -> None:
        self._programs, self._fqns = programs, fqns
        self._compiler, self._training, self._device = compiler, training, device

    def attention(self, plan: Plan, rank: int, micros: Mapping[int, Sizes]) -> dict[int, SizedStages]:
        """By size of a micro-batch; `micros`: the call's sizes for each."""
        programs = self._attention_programs(plan, rank)
        return {
            size: SizedStages(
                stages={
                    p.stage: self._attention_stage(
                        p, self._keeping(plan, Role.ATTENTION, self._compile_attention(p, micro)), micro
                    )
                    for p in programs
                },
                boundaries=bind_boundaries(self._programs, plan, micro),
            )
            for size, micro in micros.items()
        }

    def experts(self, plan: Plan, rank: int) -> dict[int, ExpertStage]:
        stages = {}
        for program in self._expert_programs(plan, rank):
            experts = plan.topology.experts_of(program.num_experts, plan.topology.index_in_group(rank))
            stages[program.stage] = ExpertStage(
                index=program.stage,
                compiled=self._keeping(plan, Role.FFN, self._compile_experts(program, len(experts))),
                params=tuple(self._expert_param(p, experts) for p in program.params),
                experts=experts,
            )
        return stages

    def _keeping(self, plan: Plan, role: Role, stage: CompiledStage) -> CompiledStage:
        """The stage, keeping for its backward what the plan says."""
        return RecomputedStage(stage) if self._training and plan.recomputes(role) else stage

    def _expert_param(self, param: ParamOfAllExperts, experts: range) -> ExpertParam:
        local = [param.inputs[e] for e in experts] if param.is_separate else list(param.inputs)
        return ExpertParam(
            fqns=tuple(self._fqns[one.position] for one in local),
            shape=(len(experts), *bind(param.shape[1:], {})),
            is_separate=param.is_separate,
            trained=frozenset(self._fqns[one.position] for one in local if one.requires_grad),
        )

    def compile_classes_once(
        self, plan: Plan, rank: int, micros: Mapping[int, Sizes], world: dist.ProcessGroup
    ) -> None:
        """Fills the shared cache: each class is compiled by one of its owners before any other rank asks for it."""
        mine = self._jobs(plan, rank, micros)
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(world))]
        dist.all_gather_object(gathered, sorted(mine), group=world)
        for key, leader in deal_out(gathered).items():
            if leader == rank:
                mine[key]()
        dist.barrier(world)

    def _jobs(
        self, plan: Plan, rank: int, micros: Mapping[int, Sizes]
    ) -> dict[str, Callable[[], CompiledStage]]:
        """What this rank needs compiled, by class."""
        jobs: dict[str, Callable[[], CompiledStage]] = {}
        for attention, micro in itertools.product(self._attention_programs(plan, rank), micros.values()):
            key = str(
                attention_key(
                    attention,
                    micro,
                    compiler=self._compiler,
                    training=self._training,
                    device=self._device.type,
                )
            )
            jobs.setdefault(key, lambda p=attention, m=micro: self._compile_attention(p, m))  # type: ignore[misc]
        for experts in self._expert_programs(plan, rank):
            n_local = len(plan.topology.experts_of(experts.num_experts, plan.topology.index_in_group(rank)))
            key = str(
                experts_key(
                    experts,
                    n_local,
                    compiler=self._compiler,
                    training=self._training,
                    device=self._device.type,
                )
            )
            jobs.setdefault(key, lambda p=experts, n=n_local: self._compile_experts(p, n))  # type: ignore[misc]
        return jobs

    def _attention_programs(self, plan: Plan, rank: int) -> list[AttentionProgram]:
        group = plan.topology.group_of_rank(rank)
        return [p for p in self._programs.attention if plan.topology.group_of_stage(p.stage) == group]

    def _expert_programs(self, plan: Plan, rank: int) -> list[ExpertsProgram]:
        group = plan.topology.group_of_rank(rank)
        return [p for p in self._programs.experts if plan.topology.group_of_stage(p.stage) == group]

    def _compile_attention(self, program: AttentionProgram, micro: Sizes) -> CompiledStage:
        return compile_attention(
            program, micro, compiler=self._compiler, training=self._training, device=self._device.type
        )

    def _compile_experts(self, program: ExpertsProgram, n_local: int) -> CompiledStage:
        return compile_experts(
            program, n_local, compiler=self._compiler, training=self._training, device=self._device.type
        )

    def _attention_stage(
        self, program: AttentionProgram, compiled: CompiledStage, micro: Sizes
    ) -> AttentionStage:
        dispatch = program.dispatch
        return AttentionStage(
            index=program.stage,
            compiled=compiled,
            sources=tuple(self._source(one, micro) for one in program.tensor_inputs),
            outputs=tuple((bind(o.shape, micro), o.dtype) for o in program.outputs),
            dispatch=None
            if dispatch is None
            else DispatchOutputs(dispatch.tokens, dispatch.token_ids, dispatch.expert_ids, dispatch.weights),
            carried=program.carried,
            model_outputs=program.model_outputs,
            loss_numerators=program.loss_numerators,
            uses_rng=program.uses_rng,
            buffer_deltas={
                position: BufferDelta(delta.position, delta.once)
                for position, delta in program.buffer_deltas.items()
            },
        )

    def _source(self, one: StageInput, micro: Sizes) -> Source:
        kind = {
            InputKind.PARAMETER: SourceKind.PARAMETER,
            InputKind.BUFFER: SourceKind.REPLICATED,
            InputKind.INPUT: SourceKind.SAMPLES if one.per_sample else SourceKind.REPLICATED,
            InputKind.COMBINED: SourceKind.COMBINED,
            InputKind.CARRIED: SourceKind.CARRIED,
        }[one.kind]
        name = self._fqns[one.position] if kind is SourceKind.PARAMETER else one.name
        return Source(kind, name, one.position, bind(one.shape, micro))


def deal_out(keys_of_rank: Sequence[Sequence[str]]) -> dict[str, int]:
    """Class -> the rank that compiles it: among its owners the one with the least work so far. The same on every rank."""
    owners: dict[str, list[int]] = {}
    for rank, keys in enumerate(keys_of_rank):
        for key in keys:
            owners.setdefault(key, []).append(rank)
    work = [0] * len(keys_of_rank)
    leaders = {}
    for key in sorted(owners, key=lambda k: (len(owners[k]), k)):
        leader = min(owners[key], key=lambda rank: (work[rank], rank))
        leaders[key] = leader
        work[leader] += 1
    return leaders
