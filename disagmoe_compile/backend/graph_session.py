"""Joins the parts of one captured graph into a Session: plans and compiles for the sizes of a call, once per set of sizes."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from disagmoe_compile.backend.bound_model import BoundModel, from_rank_zero
from disagmoe_compile.backend.planning import all_microbatch_sizes, choose_workload, load_plan_for, make_plan
from disagmoe_compile.backend.stage_binding import Sizes, StageBinder, bind_boundaries
from disagmoe_compile.capture import CapturedGraph, symbol_values
from disagmoe_compile.config import Options
from disagmoe_compile.inspect.dump import GraphDumper
from disagmoe_compile.inspect.structured import structured_trace
from disagmoe_compile.passes.gradient_reach import reached_inputs
from disagmoe_compile.passes.metadata import value
from disagmoe_compile.passes.pipeline import PartitionResult
from disagmoe_compile.passes.probe import check_order_of_samples
from disagmoe_compile.passes.program import InputKind, LossProgram, ModelPrograms, bind
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.passes.step_graph import step_graph
from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.phases import phases
from disagmoe_compile.plan.serialize import from_dict, to_dict
from disagmoe_compile.plan.topology import Group, Role
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.buffer_sums import BufferUpdate
from disagmoe_compile.runtime.executor import Executor
from disagmoe_compile.runtime.expert_worker import ExpertWorker
from disagmoe_compile.runtime.failure import default_store
from disagmoe_compile.runtime.outputs import Output
from disagmoe_compile.runtime.pulse import Heart
from disagmoe_compile.runtime.session import Loss, Prepared, Session

logger = logging.getLogger(__name__)


_NOT_GATHERED = (
    'is spread over ranks and was not gathered while training; pass options={"gather_outputs": True} to torch.compile to have '
    "it on every rank"
)
_MIXED = (
    "is made of several samples and has no dimension of them, so it cannot be put together from ranks that each see a part of "
    "the batch: return what it is made of, for each sample, and put it together outside the model"
)

_HEART = Heart()  # one per process: a rank has one pulse, whatever models it runs


def make_session(
    captured: CapturedGraph, partition: PartitionResult, model: BoundModel, options: Options
) -> Session:
    """Nothing is compiled yet: that happens at the first call, before any receive is posted.

    Raises UnsupportedModelError for outputs whose rows are not in the order of the samples.
    """
    programs = partition.programs
    trains = torch.is_grad_enabled() and any(output.requires_grad for output in programs.outputs)
    two_phases = trains and programs.needs_two_phases(options.gather_outputs)
    outputs = outputs_of(programs, gathers=two_phases or not trains or options.gather_outputs)
    if any(output.is_gathered for output in outputs):
        check_order_of_samples(programs, captured, [one.index for one in outputs if one.is_gathered])
    prepare = _Preparer(captured, partition, model, options, outputs, trains=trains, two_phases=two_phases)
    return Session(
        binding=model.binding,
        prepare=prepare,
        loss=None if programs.loss is None else make_loss(programs.loss),
        outputs=outputs,
        buffer_updates=[
            BufferUpdate(update.buffer.position, update.in_place, update.output)
            for update in programs.buffer_updates
        ],
        parameters=captured.parameter_names(),
        inputs=[
            i for i, one in enumerate(captured.inputs) if one.kind in (InputKind.INPUT, InputKind.SYMBOL)
        ],
        input_gradients=[
            i
            for i, one in enumerate(captured.inputs)
            if trains and one.kind is InputKind.INPUT and one.requires_grad
        ],
        uses_rng=any(program.uses_rng for program in programs.attention),
        trains=trains,
        two_phases=two_phases,
        half_precision=computes_in_half_precision(captured),
        mixes_samples=partition.batch_coupled,
        reached=functools.cache(functools.partial(reached_inputs, programs)),
        world=model.groups.world,
    )


def outputs_of(programs: ModelPrograms, *, gathers: bool) -> list[Output]:
    """What the script gets of each output of the model: the loss in any case, the others where it `gathers`."""
    loss = programs.loss.output_index if programs.loss else None
    outputs = []
    for one in programs.outputs:
        missing = None
        if one.stage is not None and one.index != loss:
            missing = _MIXED if one.is_mixed else None if gathers else _NOT_GATHERED
        outputs.append(
            Output(one.index, one.dtype, one.stage, one.constant, one.requires_grad, one.batch_dim, missing)
        )
    return outputs


def computes_in_half_precision(captured: CapturedGraph) -> bool:
    """Whether a value of the graph is float16, be it by its parameters or under autocast."""
    values = map(value, captured.graph_module.graph.nodes)
    return any(isinstance(one, torch.Tensor) and one.dtype is torch.float16 for one in values)


def make_loss(program: LossProgram) -> Loss:
    def denominators(arguments: Sequence[object]) -> tuple[float, ...]:
        with torch.no_grad():
            values = program.denominators(*(arguments[i.position] for i in program.inputs))
        return tuple(float(value) for value in values)

    return Loss(program.output_index, program.dtype, program.coefficients, denominators)


class _Preparer:
    """From the arguments of a call to a plan that is ready to run, remembered by sizes."""

    def __init__(
        self,
        captured: CapturedGraph,
        partition: PartitionResult,
        model: BoundModel,
        options: Options,
        outputs: Sequence[Output],
        *,
        trains: bool,
        two_phases: bool,
    ) -> None:
        self._fqns, self._inputs, self._fingerprint = (
            captured.parameter_names(),
            captured.inputs,
            partition.fingerprint,
        )
        self._model, self._options = model, options
        self._trains, self._two_phases = trains, two_phases
        programs, gathered = partition.programs, [one.index for one in outputs if one.is_gathered]
        attention = tuple(without_outputs(program, gathered) for program in programs.attention)
        self._programs = replace(programs, attention=attention)
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
        micros = all_microbatch_sizes(self._programs, sizes, plan)
        binder = StageBinder(
            self._programs,
            self._fqns,
            compiler=self._options.stage_compiler,
            training=self._trains,
            device=torch.device("cpu"),
        )
        if self._options.stage_compiler == "inductor":
            binder.compile_classes_once(plan, rank, micros, world)
        new_executor = self._executors(plan, rank, binder, micros)
        executor = new_executor()
        actions, backward_actions = self._actions(plan, executor.worker.group)
        return Prepared(
            plan=plan,
            executor=executor,
            new_executor=new_executor,
            actions=actions,
            backward_actions=backward_actions,
            output_shapes={
                o.index: bind(o.shape, sizes) for o in self._programs.outputs if o.stage is not None
            },
        )

    def _executors(
        self, plan: Plan, rank: int, binder: StageBinder, micros: Mapping[int, Sizes]
    ) -> Callable[[], Executor]:
        """Makes executors that share the compiled stages and nothing else."""
        transport, device, store = self._model.transport, torch.device("cpu"), default_store()
        if store is not None:
            _HEART.start(store, rank)
        if plan.topology.group_of_rank(rank).role is Role.ATTENTION:
            sized = binder.attention(plan, rank, micros)
            return lambda: Executor(
                plan, AttentionWorker(plan, rank, sized, transport, device), store, _HEART
            )
        experts = binder.experts(plan, rank)
        boundaries = bind_boundaries(self._programs, plan, micros[plan.workload.microbatch_size])
        return lambda: Executor(
            plan, ExpertWorker(plan, rank, experts, boundaries, transport, device), store, _HEART
        )

    def _actions(self, plan: Plan, group: Group) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        if self._two_phases:
            first, second = phases(plan)
            return first[group], second[group]
        schedule = plan.training if self._trains else plan.forward_only
        assert schedule is not None
        return schedule.of(group), ()

    def _show(self, plan: Plan) -> None:
        """The plan and its training step, where dumps or a structured trace are wanted."""
        schedule = plan.training or plan.forward_only
        logger.debug(
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
        model, options = self._model, self._options
        if model.in_flight is not None and options.microbatches_in_flight is None and options.plan is None:
            n = choose_workload(self._programs, sizes, model.topology, options).n_microbatches
            options = replace(options, microbatches_in_flight=min(model.in_flight, -(-n // 2)))
        plan = make_plan(self._programs, self._fqns, sizes, model.topology, options, self._fingerprint)
        return load_plan_for(self._options.plan, plan) if self._options.plan else plan
