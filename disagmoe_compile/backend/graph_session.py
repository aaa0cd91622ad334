"""Joins the parts of one captured graph into a Session: plans and compiles for the sizes of a call, once per set of sizes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from disagmoe_compile.backend.bound_model import BoundModel, from_rank_zero
from disagmoe_compile.backend.planning import load_plan_for, make_plan, microbatch_sizes
from disagmoe_compile.backend.stage_binding import Sizes, StageBinder, bind_boundaries
from disagmoe_compile.capture import CapturedGraph, symbol_values
from disagmoe_compile.config import Options
from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.inspect.dump import GraphDumper
from disagmoe_compile.inspect.structured import structured_trace
from disagmoe_compile.passes.pipeline import PartitionResult
from disagmoe_compile.passes.program import InputKind, LossProgram, ModelPrograms, bind
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.passes.step_graph import step_graph
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.serialize import from_dict, to_dict
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.buffer_sums import BufferUpdate
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.expert_worker import ExpertWorker
from disagmoe_compile.runtime.failure import default_store
from disagmoe_compile.runtime.session import Loss, Output, Prepared, Session
from disagmoe_compile.runtime.worker import Worker

logger = logging.getLogger(__name__)


def make_session(
    captured: CapturedGraph, partition: PartitionResult, model: BoundModel, options: Options
) -> Session:
    """Nothing is compiled yet: that happens at the first call, before any receive is posted.

    Raises UnsupportedModelError for outputs that cannot be had from ranks that each see a part of the batch.
    """
    programs = partition.programs
    trains = torch.is_grad_enabled() and any(output.requires_grad for output in programs.outputs)
    if trains and programs.loss is None:
        raise UnsupportedModelError(
            "the model returns no scalar loss, and a loss computed outside the model is not supported over several ranks "
            "by this version: pass labels to the model, or call it under torch.no_grad()"
        )
    needs_gradient = [
        one.name for one in captured.inputs if one.kind is InputKind.INPUT and one.requires_grad
    ]
    if trains and needs_gradient:
        raise UnsupportedModelError(
            f"input {needs_gradient[0]} requires a gradient, which several ranks do not send back in this version: compile the "
            "module that makes it together with the model, or detach() it"
        )
    if not trains or options.gather_outputs:
        _check_gatherable(programs)
    prepare = _Preparer(captured, partition, model, options, trains)
    return Session(
        binding=model.binding,
        prepare=prepare,
        loss=None if programs.loss is None else make_loss(programs.loss),
        outputs=[Output(o.index, o.dtype, o.stage, o.constant) for o in programs.outputs],
        buffer_updates=[
            BufferUpdate(update.buffer.position, update.in_place, update.output)
            for update in programs.buffer_updates
        ],
        parameters=captured.parameter_names(),
        inputs=[
            i for i, one in enumerate(captured.inputs) if one.kind in (InputKind.INPUT, InputKind.SYMBOL)
        ],
        uses_rng=any(program.uses_rng for program in programs.attention),
        trains=trains,
        gather_outputs=options.gather_outputs,
        world=model.groups.world,
    )


def make_loss(program: LossProgram) -> Loss:
    def denominators(arguments: Sequence[object]) -> tuple[float, ...]:
        with torch.no_grad():
            values = program.denominators(*(arguments[i.position] for i in program.inputs))
        return tuple(float(value) for value in values)

    return Loss(program.output_index, program.dtype, program.coefficients, denominators)


def _check_gatherable(programs: ModelPrograms) -> None:
    loss = programs.loss.output_index if programs.loss else None
    for output in programs.outputs:
        if output.stage is not None and output.index != loss and not output.per_sample:
            raise UnsupportedModelError(
                f"output {output.index} of the model (shape {output.shape}) is neither a loss nor has the batch as its first "
                "dimension, so it cannot be put together from ranks that each see some samples: do not return it"
            )


class _Preparer:
    """From the arguments of a call to a plan that is ready to run, remembered by sizes."""

    def __init__(
        self,
        captured: CapturedGraph,
        partition: PartitionResult,
        model: BoundModel,
        options: Options,
        trains: bool,
    ) -> None:
        self._fqns, self._inputs, self._fingerprint = (
            captured.parameter_names(),
            captured.inputs,
            partition.fingerprint,
        )
        self._model, self._options, self._trains = model, options, trains
        programs = partition.programs
        if trains and not options.gather_outputs:
            programs = replace(programs, attention=tuple(without_outputs(p) for p in programs.attention))
        self._programs, self._outputs = programs, partition.programs.outputs
        self._n_passes = len(partition.reports)
        self._trace = structured_trace(captured)
        self._prepared: dict[tuple[tuple[str, int], ...], Prepared] = {}

    def __call__(self, arguments: Sequence[object]) -> Prepared:
        sizes = symbol_values(self._inputs, arguments)
        key = tuple(sorted((str(symbol), size) for symbol, size in sizes.items()))
        if key not in self._prepared:
            self._prepared[key] = self._prepare(sizes)
        return self._prepared[key]

    def _prepare(self, sizes: Sizes) -> Prepared:
        world, rank = self._model.groups.world, dist.get_rank()
        plan = from_dict(json.loads(from_rank_zero(lambda: json.dumps(to_dict(self._plan(sizes))), world)))
        if rank == 0:
            self._show(plan)
        micro = microbatch_sizes(self._programs, sizes, plan.workload.microbatch_size)
        device = torch.device("cpu")
        binder = StageBinder(
            self._programs,
            self._fqns,
            compiler=self._options.stage_compiler,
            training=self._trains,
            device=device,
        )
        if self._options.stage_compiler == "inductor":
            binder.compile_classes_once(plan, rank, micro, world)
        boundaries = bind_boundaries(self._programs, plan, micro)
        transport = self._model.transport
        worker: Worker
        if plan.topology.group_of_rank(rank).role is Role.ATTENTION:
            worker = AttentionWorker(
                plan, rank, binder.attention(plan, rank, micro), boundaries, transport, device
            )
        else:
            worker = ExpertWorker(plan, rank, binder.experts(plan, rank), boundaries, transport, device)
        schedule = plan.training if self._trains else plan.forward_only
        assert schedule is not None
        return Prepared(
            plan=plan,
            executor=Executor(plan, worker, default_store()),
            actions=schedule.of(worker.group),
            output_shapes={o.index: bind(o.shape, sizes) for o in self._outputs if o.stage is not None},
        )

    def _show(self, plan: Plan) -> None:
        """The plan and its training step, where dumps or a structured trace are wanted."""
        schedule = plan.training or plan.forward_only
        logger.info(
            "plan %s: %s, %s, %s",
            plan.fingerprint,
            schedule.name if schedule else "none",
            plan.topology,
            plan.workload,
        )
        if self._trace is not None:
            self._trace.plan(plan)
        if plan.training is None or (self._trace is None and not self._options.trace_dir):
            return
        name, step = f"{self._n_passes:02d}_training_step", step_graph(plan)
        header = [f"Training step of all groups, by plan {plan.fingerprint} ({plan.training.name})"]
        if self._trace is not None:
            self._trace.graph(name, step, header)
        if self._options.trace_dir:
            GraphDumper(self._options.trace_dir).write(f"{name}.py", step, header)

    def _plan(self, sizes: Sizes) -> Plan:
        plan = make_plan(
            self._programs, self._fqns, sizes, self._model.topology, self._options, self._fingerprint
        )
        return load_plan_for(self._options.plan, plan) if self._options.plan else plan
