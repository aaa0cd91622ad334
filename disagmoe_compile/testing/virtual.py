"""Every rank of a plan in this process, over the loopback mailbox: the per-rank action lists without processes.

run = run_virtual(model, batch, attention_group_size=2, ffn_group_size=2, n_microbatches=4)
assert_parity(run.loss, run.gradients, eager_reference(model, **batch))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from disagmoe_compile.backend.graph_session import make_loss, outputs_of
from disagmoe_compile.backend.planning import all_microbatch_sizes, make_plan
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.backend.stage_binding import Sizes, StageBinder, bind_boundaries
from disagmoe_compile.capture import CapturedGraph, capture
from disagmoe_compile.config import Options
from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.graph_breaks import one_graph
from disagmoe_compile.passes.pipeline import PartitionResult, partition_model
from disagmoe_compile.passes.program import ModelPrograms, bind
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.phases import phases
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.buffer_sums import BufferUpdate, apply_updates
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.expert_worker import ExpertWorker
from disagmoe_compile.runtime.outputs import Output, own_part, part_shape, put_together
from disagmoe_compile.runtime.placement import placements
from disagmoe_compile.runtime.transport.loopback import LoopbackTransport, Mailbox, run_all
from disagmoe_compile.runtime.worker import OutputGradient, Seeds, StepInputs, Worker


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A model's captured and partitioned graph, with the flat arguments of the call that was captured."""

    captured: CapturedGraph
    partition: PartitionResult
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """`gradients` are global: shards put together, replicas taken once. `executors` in rank order, for their events.
    `buffers`: new values of those that the call updates, by name. `input_gradients`: of arguments that require one, by name."""

    plan: Plan
    loss: float
    gradients: Mapping[str, torch.Tensor]
    executors: tuple[Executor, ...]
    buffers: Mapping[str, torch.Tensor]
    input_gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)


def capture_call(
    model: torch.nn.Module, batch: Mapping[str, object], *, loss_reduction: str = "auto"
) -> CapturedCall:
    """Traces one call through torch.compile and partitions it; the call itself runs the partitioned graph."""
    found: list[CapturedCall] = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        captured = capture(gm, example_inputs)
        partition = partition_model(captured, loss_reduction=loss_reduction)

        def run(*arguments: object) -> object:
            updated = {update.buffer.position for update in partition.programs.buffer_updates}
            kept = tuple(a.clone() if i in updated else a for i, a in enumerate(arguments))  # type: ignore[attr-defined]
            found.append(CapturedCall(captured, partition, kept))
            return partition.graph_module(*arguments)

        return run

    torch._dynamo.reset()
    mark_batch(batch)
    with one_graph():
        torch.compile(model, backend=backend, fullgraph=True)(**batch)
    return found[-1]


def run_virtual(
    model: torch.nn.Module,
    batch: Mapping[str, object],
    *,
    world_size: int | None = None,
    edit_plan: Callable[[Plan], Plan] = lambda plan: plan,
    edit_workers: Callable[[list[Worker]], None] = lambda workers: None,
    **options: Any,
) -> VirtualRun:
    """One training step of all ranks. `options` as for torch.compile; `stage_compiler` is "eager" unless given.

    `edit_plan` and `edit_workers` are for negative controls. Raises what planning, validation and the executors raise.
    """
    call = capture_call(model, batch)
    return run_captured(
        call, world_size=world_size, edit_plan=edit_plan, edit_workers=edit_workers, **options
    )


def run_captured(
    call: CapturedCall,
    *,
    world_size: int | None = None,
    edit_plan: Callable[[Plan], Plan] = lambda plan: plan,
    edit_workers: Callable[[list[Worker]], None] = lambda workers: None,
    outside: Callable[[Sequence[Any]], torch.Tensor] | None = None,
    **options: object,
) -> VirtualRun:
    """`run_virtual` without tracing again: many plans for one captured call.

    `outside`: the script's loss, from the flat outputs of the graph. Where the model has a loss it needs `gather_outputs=True`.
    """
    chosen = Options.from_mapping({"stage_compiler": "eager", **options})
    captured, programs = call.captured, call.partition.programs
    two_phases = programs.needs_two_phases(chosen.gather_outputs)
    assert two_phases == (outside is not None), "a loss outside the model, and it alone, makes two phases"
    outputs = outputs_of(programs, gathers=two_phases)
    gathered = [one for one in outputs if one.is_gathered]
    indices = [one.index for one in gathered]
    programs = replace(programs, attention=tuple(without_outputs(p, indices) for p in programs.attention))
    sizes = captured.sizes(call.arguments)
    groups = chosen.pipeline_groups or 1
    asked = groups * ((chosen.attention_group_size or 1) + (chosen.ffn_group_size or 1))
    topology, chosen = choose_sizes(programs, sizes, chosen, world_size or asked)
    fqns = captured.parameter_names()
    plan = edit_plan(make_plan(programs, fqns, sizes, topology, chosen, call.partition.fingerprint))
    assert plan.training is not None
    workers, mailbox = _virtual_workers(plan, programs, fqns, sizes, chosen)
    edit_workers(workers)
    executors = tuple(Executor(plan, worker) for worker in workers)
    whole = {fqn: call.arguments[position].detach() for position, fqn in fqns.items()}  # type: ignore[attr-defined]
    where = placements(plan.stages, topology, {fqn: p.shape for fqn, p in whole.items()})
    scales = () if programs.loss is None else make_loss(programs.loss).scales(call.arguments)
    for executor in executors:
        rank = executor.worker.rank
        owned = {
            fqn: whole[fqn][slice(*(rows or (None,)))].clone()
            for fqn, place in where.items()
            if rank in place.ranges
            for rows in (place.ranges[rank],)
        }
        executor.begin(StepInputs(call.arguments, owned, 0, trains=True))
        executor.worker.seeds = Seeds(numerators=scales)
    first, second = phases(plan) if two_phases else (plan.training.actions, None)
    run_all(executors, mailbox, [first[executor.worker.group] for executor in executors])
    numerators = [w.numerators for w in workers if isinstance(w, AttentionWorker) and w.numerators]
    loss = sum(float(n) * scale for one in numerators for n, scale in zip(one, scales, strict=True))
    if outside is not None and second is not None:
        leaves = _leaves(gathered, plan, workers, programs, sizes, loss)
        flat = [leaves.get(one.index, one.constant) for one in outputs]
        total = outside(flat)
        total.backward()
        loss = total.item()
        seeds = _seeds(programs, gathered, leaves, scales)
        for worker in workers:
            worker.seeds = seeds
        run_all(executors, mailbox, [second[executor.worker.group] for executor in executors])
    buffers = _new_buffers(programs, call.arguments, workers)
    gradients: dict[str, torch.Tensor] = {}
    for fqn, place in where.items():
        for rank, rows in place.ranges.items():
            gradient = workers[rank].gradients.get(fqn)
            if gradient is not None:
                gradients.setdefault(fqn, torch.full_like(whole[fqn], float("nan")))[
                    slice(*(rows or (None,)))
                ] = gradient
    return VirtualRun(plan, loss, gradients, executors, buffers, _input_gradients(captured, workers))


def _virtual_workers(
    plan: Plan, programs: ModelPrograms, fqns: Mapping[int, str], sizes: Sizes, options: Options
) -> tuple[list[Worker], Mailbox]:
    device = torch.device("cpu")
    binder = StageBinder(programs, fqns, compiler=options.stage_compiler, training=True, device=device)
    micros = all_microbatch_sizes(programs, sizes, plan)
    boundaries = bind_boundaries(programs, plan, micros[plan.workload.microbatch_size])
    mailbox = Mailbox()
    workers: list[Worker] = []
    for rank in range(plan.topology.world_size):
        transport = LoopbackTransport(mailbox, rank)
        if plan.topology.group_of_rank(rank).role is Role.ATTENTION:
            sized = binder.attention(plan, rank, micros)
            workers.append(AttentionWorker(plan, rank, sized, transport, device))
        else:
            experts = binder.experts(plan, rank)
            workers.append(ExpertWorker(plan, rank, experts, boundaries, transport, device))
    return workers, mailbox


def _leaves(
    gathered: Sequence[Output],
    plan: Plan,
    workers: Sequence[Worker],
    programs: ModelPrograms,
    sizes: Sizes,
    loss: float,
) -> dict[int, torch.Tensor]:
    """Whole outputs by index, as leaves of the script's own graph."""
    leaves: dict[int, torch.Tensor] = {}
    for one in gathered:
        assert one.stage is not None
        if programs.loss is not None and one.index == programs.loss.output_index:
            whole = torch.tensor(loss, dtype=one.dtype)
        else:
            shape = bind(programs.outputs[one.index].shape, sizes)
            owners = [workers[rank] for rank in plan.topology.ranks_of_stage(one.stage)]
            parts = [
                own_part(one, worker)
                for worker in owners
                if isinstance(worker, AttentionWorker)
                and part_shape(one, shape, plan, worker.member) is not None
            ]
            whole = put_together(one, parts)
            assert tuple(whole.shape) == shape
        leaves[one.index] = whole.requires_grad_(one.requires_grad)
    return leaves


def _seeds(
    programs: ModelPrograms,
    gathered: Sequence[Output],
    leaves: Mapping[int, torch.Tensor],
    scales: Sequence[float],
) -> Seeds:
    numerators: tuple[float, ...] = ()
    outputs: dict[int, OutputGradient] = {}
    for one in gathered:
        gradient = leaves[one.index].grad
        if gradient is None:
            continue
        if programs.loss is not None and one.index == programs.loss.output_index:
            numerators = tuple(scale * float(gradient) for scale in scales)
        else:
            outputs[one.index] = OutputGradient(gradient, one.batch_dim)
    return Seeds(numerators, outputs)


def _input_gradients(captured: CapturedGraph, workers: Sequence[Worker]) -> dict[str, torch.Tensor]:
    """Sums over ranks, by the input's name."""
    sums: dict[str, torch.Tensor] = {}
    for worker in workers:
        if isinstance(worker, AttentionWorker):
            for position, gradient in worker.input_gradients.items():
                name = captured.inputs[position].name
                sums[name] = sums[name] + gradient if name in sums else gradient
    return sums


def _new_buffers(
    programs: ModelPrograms, arguments: Sequence[object], workers: Sequence[Worker]
) -> dict[str, torch.Tensor]:
    """By name; the buffers themselves stay as they are."""
    sums: dict[int, torch.Tensor] = {}
    for worker in workers:
        if isinstance(worker, AttentionWorker):
            for position, total in worker.buffer_sums.sums.items():
                sums[position] = sums[position] + total if position in sums else total
    names = [update.buffer.name for update in programs.buffer_updates]
    updates = [
        BufferUpdate(update.buffer.position, in_place=False, output=index)
        for index, update in enumerate(programs.buffer_updates)
    ]
    new = apply_updates(updates, arguments, sums, lambda total: None)
    return {name: new[index] for index, name in enumerate(names)}
