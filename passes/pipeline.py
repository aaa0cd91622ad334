"""The passes in their fixed order, and the one call that turns a captured graph into the programs of its
stages."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.assign_streams import AssignStreams
from disagmoe_compile.passes.base import GraphPass, Observer, PassReport, bound_options
from disagmoe_compile.passes.batch_coupling import batch_coupled
from disagmoe_compile.passes.buffer_updates import ASSIGNED, BufferUpdates
from disagmoe_compile.passes.canonicalize_experts import CanonicalizeExperts
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.contract import Capability, ContractError
from disagmoe_compile.passes.deinplace import Deinplace
from disagmoe_compile.passes.find_regions import FindRegions
from disagmoe_compile.passes.graph_rules import validate_graph
from disagmoe_compile.passes.inline_checkpoint import InlineCheckpoint
from disagmoe_compile.passes.insert_transfers import InsertTransfers
from disagmoe_compile.passes.label_roles import LabelRoles
from disagmoe_compile.passes.linearize_loss import UNSPLIT_LOSS, LinearizeLoss
from disagmoe_compile.passes.manager import CAPTURED, PassManager
from disagmoe_compile.passes.partition import Partition
from disagmoe_compile.passes.probe import coupled_by_numbers
from disagmoe_compile.passes.program import ModelPrograms
from disagmoe_compile.passes.programs import model_programs
from disagmoe_compile.passes.registry import registered_passes, with_extra, without
from disagmoe_compile.passes.rematerialize_sizes import RematerializeSizes
from disagmoe_compile.plan.collector import collector_paused

# What the programs of the stages are made from.
_NEEDED = frozenset({Capability.TRANSFERS, Capability.LINEAR_LOSS})


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """`graph_module`: the top-level graph after all passes; same flat inputs and outputs as Dynamo's, runs
    in one process.

    `batch_coupled`: operations that mix samples, so that micro-batches compute something else than the whole
    batch would.
    """

    graph_module: fx.GraphModule
    programs: ModelPrograms
    reports: tuple[tuple[str, PassReport], ...]
    fingerprint: str
    batch_coupled: tuple[str, ...]


def default_passes(loss_reduction: str = "auto") -> tuple[GraphPass, ...]:
    return (
        InlineCheckpoint(),
        Deinplace(),
        FindRegions(),
        CanonicalizeExperts(),
        RematerializeSizes(),
        BufferUpdates(),
        LabelRoles(),
        Partition(),
        InsertTransfers(),
        LinearizeLoss(loss_reduction),
        AssignStreams(),
    )


def assemble(
    loss_reduction: str = "auto", extra: Iterable[GraphPass] = (), disabled: Iterable[str] = ()
) -> PassManager:
    """The passes that run: ours, those that other packages register, and `extra`; less those `disabled`.

    Raises InputError for a name in `disabled` that no pass has, ContractError where what remains cannot run.
    """
    passes = with_extra(default_passes(loss_reduction), (*registered_passes(), *extra), CAPTURED)
    return PassManager(without(passes, disabled), needed=_NEEDED)


def partition_model(
    captured: CapturedGraph,
    *,
    observers: Sequence[Observer] = (),
    loss_reduction: str = "auto",
    extra_passes: Iterable[GraphPass] = (),
    disabled: Iterable[str] = (),
) -> PartitionResult:
    """Splits a captured graph into attention and expert programs; the captured graph itself is left as it is.

    Raises UnsupportedModelError where a split cannot be shown to be safe, and ContractError naming pass, node and rule where
    a pass broke the graph. A graph without an MoE region gives one attention program (the whole model) and no experts.
    """
    manager = assemble(loss_reduction, extra_passes, disabled)
    passes = manager.passes
    with collector_paused():
        graph_module = working_copy(captured)
        reports = manager.run(graph_module, observers)
    violations = validate_graph(graph_module)
    if violations:
        raise ContractError(
            f"the partitioned graph breaks {len(violations)} rules: {'; '.join(map(str, violations))}"
        )
    programs = model_programs(graph_module, captured.batch_symbol)
    unsplit_loss = graph_module.meta.get(UNSPLIT_LOSS)
    by_rules = batch_coupled(programs)  # first: what rules refuse they can explain
    by_numbers = coupled_by_numbers(programs, captured, unsplit_loss, loss_reduction)
    coupled = tuple(dict.fromkeys([*by_rules, *by_numbers]))
    return PartitionResult(graph_module, programs, reports, fingerprint(programs, passes), coupled)


def working_copy(captured: CapturedGraph) -> fx.GraphModule:
    """A copy of the captured graph whose placeholders say what they are."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(captured.graph_module.graph, copies)
    graph.output(results)
    for node in copies.values():
        node.meta = dict(node.meta)
    graph_module = fx.GraphModule(captured.graph_module, graph, class_name="TopLevel")
    graph_module.meta["disagmoe_batch_symbol"] = captured.batch_symbol
    graph_module.meta[ASSIGNED] = captured.assigned_buffers
    for node, source in zip(metadata.placeholders(graph), captured.inputs):
        node.meta[metadata.SOURCE] = source
    return graph_module


def fingerprint(programs: ModelPrograms, passes: Sequence[GraphPass]) -> str:
    """SHA-256 (16 hex digits) of stage codes, shapes, and the passes' names, source and options. Equal in
    every process.

    Symbols are numbered by first appearance: Dynamo's own names depend on what it traced before.
    """
    digest = hashlib.sha256()
    symbols: dict[str, str] = {}

    def dims(shape: tuple[object, ...]) -> str:
        parts = []
        for dim in shape:
            free = sorted(map(str, getattr(dim, "free_symbols", ())))
            text = str(dim)
            for name in free:
                text = text.replace(name, symbols.setdefault(name, f"d{len(symbols)}"))
            parts.append(text)
        return ",".join(parts)

    def add(*parts: object) -> None:
        digest.update("\0".join(map(str, parts)).encode())

    for program in programs.attention:
        add(
            program.stage, program.module.code, program.dispatch, program.carried, dict(program.model_outputs)
        )
        add(dict(program.buffer_deltas))
        for i in program.inputs:
            add(i.kind, i.name, dims(i.shape), i.dtype, i.requires_grad)
        for o in program.outputs:
            add(dims(o.shape), o.dtype, o.requires_grad)
    for experts in programs.experts:
        add(experts.stage, experts.function.code, experts.num_experts, experts.top_k, experts.style)
        for param in experts.params:
            add(dims(param.shape))
            for i in param.inputs:
                add(i.name, dims(i.shape), i.dtype, i.requires_grad)
    if programs.loss is not None:
        add(programs.loss.denominators.code, programs.loss.coefficients, programs.loss.output_index)
    for graph_pass in passes:
        add(
            graph_pass.name,
            bound_options(graph_pass),
            inspect.getsource(sys.modules[type(graph_pass).__module__]),
        )
    return digest.hexdigest()[:16]
