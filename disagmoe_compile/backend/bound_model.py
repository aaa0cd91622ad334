"""A user's model on this rank: its topology, the process groups, and the parameters that this rank owns. Made at the first
compile of a model; later graphs of the same model (eval, no_grad, another length) find it again.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from disagmoe_compile.backend.plan_stages import Sizes, holding_stages
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.capture import CapturedGraph, root_module
from disagmoe_compile.config import Options
from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.passes.pipeline import PartitionResult
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.runtime.agreement import agree, broadcast_text
from disagmoe_compile.runtime.binding import Binding, bind
from disagmoe_compile.runtime.clip import refuse_norms_of_parts
from disagmoe_compile.runtime.model_hooks import refuse_averages_of_wholes
from disagmoe_compile.runtime.optimizer_hooks import OptimizerGuard
from disagmoe_compile.runtime.overflows import share_overflows
from disagmoe_compile.runtime.pending import fill
from disagmoe_compile.runtime.placement import placements
from disagmoe_compile.runtime.process_group import PipelineGroups
from disagmoe_compile.runtime.retrace import drop_parameter_guards, guard_model_identity
from disagmoe_compile.runtime.state_dict import install
from disagmoe_compile.runtime.transport.process_group import ProcessGroupTransport


@dataclass(frozen=True, slots=True)
class BoundModel:
    """`in_flight`: micro-batches that the planner wants under way in one direction; None where nothing was planned."""

    topology: Topology
    in_flight: int | None
    groups: PipelineGroups
    binding: Binding
    transport: ProcessGroupTransport


_SAME_MODEL = "every rank must build the same model and call it in the same way"
OPTIMIZER_GUARD = OptimizerGuard()  # one per process: optimizers know parameters, not models
_MODELS: weakref.WeakKeyDictionary[nn.Module, BoundModel] = weakref.WeakKeyDictionary()


def bound_model(captured: CapturedGraph, partition: PartitionResult, options: Options) -> BoundModel:
    """Collective. At the first graph of a model plans its topology on rank 0; binds the parameters that no earlier graph used.

    Raises DivergenceError where ranks captured different graphs, InputError where sizes do not fit.
    """
    world = dist.group.WORLD
    assert world is not None
    root = root_module()
    known = _MODELS.get(root)
    # a known model's group: a rank that traces it anew meets those that call it, and all are told
    meeting = world if known is None else known.groups.world
    agree("the trace of a model", {"the captured graph": partition.fingerprint}, meeting, _SAME_MODEL)
    for one in captured.inputs:
        if one.kind is InputKind.BUFFER:
            _take_from_rank_zero(captured.example_inputs[one.position], world)
    fqns = captured.parameter_names()
    parameters = {fqn: captured.example_inputs[position] for position, fqn in fqns.items()}
    sizes = captured.sizes(captured.example_inputs)
    if known is None:
        chosen = json.loads(from_rank_zero(lambda: _sizes_text(partition, sizes, options), world))
        topology, in_flight = Topology(**chosen["topology"]), chosen["in_flight"]
    else:
        topology, in_flight = known.topology, known.in_flight
    stages = holding_stages(partition.programs, fqns, topology)
    where = placements(stages, topology, {fqn: p.shape for fqn, p in parameters.items()})
    if known is None:
        groups = PipelineGroups.create(topology, options.timeout_s)
        binding = bind(parameters, where, dist.get_rank(), groups.world)
        fill(root)  # what this graph does not read has no owner: whole on every rank, as it would have been
        share_overflows()
        refuse_norms_of_parts()
        refuse_averages_of_wholes()
        OPTIMIZER_GUARD.watch(binding, on_first_step=install(root, binding, groups))
        transport = ProcessGroupTransport(topology, groups.lanes, groups.replicas, options.timeout_s)
        known = _MODELS[root] = BoundModel(topology, in_flight, groups, binding, transport)
    else:
        known.binding.extend(parameters, where)
        OPTIMIZER_GUARD.watch(known.binding)
    resharded = [
        position for position, fqn in fqns.items() if fqn in known.binding and known.binding[fqn].is_resharded
    ]
    drop_parameter_guards([captured.sources[position] for position in resharded])
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    guard_model_identity(nodes[min(fqns)]._dynamo_source)
    return known


def _take_from_rank_zero(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Buffers that the graph reads are rank 0's on every rank, as in DDP."""
    values = buffer.detach().contiguous()
    dist.broadcast(values, 0, group=group)
    if values.data_ptr() != buffer.data_ptr():
        buffer.detach().copy_(values)


def _sizes_text(partition: PartitionResult, sizes: Sizes, options: Options) -> str:
    topology, chosen = choose_sizes(partition.programs, sizes, options, dist.get_world_size())
    is_given = options.microbatches_in_flight is not None or options.plan is not None
    return json.dumps(
        {
            "topology": {name: getattr(topology, name) for name in Topology.__slots__},
            "in_flight": None if is_given else chosen.microbatches_in_flight,
        }
    )


def from_rank_zero(make: Callable[[], str], group: dist.ProcessGroup) -> str:
    """`make()` of rank 0, on every rank; an error that it raises is raised on every rank, so none waits for an answer."""
    text = None
    if dist.get_rank() == 0:
        try:
            text = json.dumps({"text": make()})
        except DisagMoEError as error:
            text = json.dumps({"error": str(error), "input": isinstance(error, InputError)})
    answer = json.loads(broadcast_text(text, group))
    if "error" in answer:
        raise (InputError if answer["input"] else DisagMoEError)(answer["error"])
    return str(answer["text"])
