"""From a partitioned model and its sizes (`sizing.py`) to a Plan: build, schedule, lower and validate."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace

import sympy
import torch

from disagmoe_compile.backend.plan_stages import Sizes, dtype_name, filled_stages, owned_numels
from disagmoe_compile.backend.sizing_file import with_sizing
from disagmoe_compile.config import Options
from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    ModelPrograms,
    bind,
)
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.forward_only import forward_only
from disagmoe_compile.passes.schedule.gpipe import gpipe
from disagmoe_compile.passes.schedule.in_order import in_order
from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.passes.schedule.two_phase import two_phase
from disagmoe_compile.passes.stage_flops import (
    tokens_of,
)
from disagmoe_compile.plan.completeness import peak_residency
from disagmoe_compile.plan.exchange import RowExchange
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.ir import Plan, Schedule, TensorSpec, Workload
from disagmoe_compile.plan.recompute import recomputes
from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers
from disagmoe_compile.plan.validate import check
from disagmoe_compile.planner.sizing_problem import microbatches_that_fill


def choose_workload(programs: ModelPrograms, sizes: Sizes, topology: Topology, options: Options) -> Workload:
    """The user's micro-batches; or, up to the 8p that fill the pipeline twice, as many as divide the batch, or make it uneven by
    one sample where too few do.
    """
    batch, attention = batch_size(programs, sizes), topology.attention_group_size
    n_microbatches = options.n_microbatches or _n_microbatches(-(-batch // attention), topology)
    size = -(-batch // (attention * n_microbatches))
    micro = microbatch_sizes(programs, sizes, size)
    return Workload(batch, n_microbatches, size, max(1, tokens_of(programs.attention[0], micro) // size))


def _n_microbatches(share: int, topology: Topology) -> int:
    even = microbatches_that_fill(share, topology.attention_groups)
    most = min(share, 8 * topology.attention_groups)
    return even if 2 * even > most else -(-share // -(-share // most))


def microbatch_sizes(programs: ModelPrograms, sizes: Sizes, microbatch_size: int) -> dict[sympy.Symbol, int]:
    """The call's sizes with the batch replaced by a micro-batch."""
    if programs.batch_symbol is None:
        return dict(sizes)
    return {**sizes, programs.batch_symbol: microbatch_size}


def all_microbatch_sizes(
    programs: ModelPrograms, sizes: Sizes, plan: Plan
) -> dict[int, dict[sympy.Symbol, int]]:
    """`microbatch_sizes` for each size of micro-batches that the plan has, the largest first."""
    return {size: microbatch_sizes(programs, sizes, size) for size in plan.microbatch_sizes}


def batch_size(programs: ModelPrograms, sizes: Sizes) -> int:
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
    recomputed = [role for role in Role if recomputes(options.recompute, role)]
    stages = filled_stages(programs, parameter_fqns, micro, topology, recomputed)
    trains = programs.trains
    transfers = build_transfers(
        topology,
        boundaries,
        owned_numels(programs, parameter_fqns, stages),
        training=trains,
        exchange=RowExchange(options.dedup, options.payload_dtype),
    )
    owned = [s.index for s in stages if s.owned_fqns] if topology.attention_group_size > 1 else []
    n = workload.n_microbatches
    training: Schedule | None = None
    if trains and programs.needs_two_phases(options.gather_outputs):
        training = two_phase(topology, n, transfers, owned_stages=owned)
    elif trains and options.schedule == "gpipe":
        training = lower(gpipe(topology, n), topology, transfers, owned_stages=owned)
    elif trains:
        generate = in_order if options.schedule == "af_pipe_in_order" else af_pipe
        compute_only = generate(topology, n, interleave=options.microbatches_in_flight)
        training = lower(compute_only, topology, transfers, owned_stages=owned)
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
