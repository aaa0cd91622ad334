"""What passes promise one another, checked before any graph is touched and verified on the graph after each
pass.

A capability is a property of the graph with a check that finds the first node breaking it. A pass lists what
it requires and what it provides; a wrong order of passes is therefore an error of construction, and a pass
that does not keep its word is caught at once, by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import fx

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.aliasing import storage_roots, written
from disagmoe_compile.passes.buffer_op import add_to_buffer
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.sizes import symbol_sources

if TYPE_CHECKING:
    from disagmoe_compile.passes.base import GraphPass


class Capability(StrEnum):
    SOURCES = "sources"  # every placeholder says what it is
    NO_CHECKPOINTS = "no_checkpoints"  # no activation-checkpoint operator hides layers
    DEINPLACED = "deinplaced"  # no augmented assignment is left where a value could replace it
    REGIONS_KNOWN = "regions_known"  # the MoE regions are in the graph module's meta
    CANONICAL_EXPERTS = "canonical_experts"  # every known region is one call of `experts`
    SIZES = "sizes"  # no size is taken from a tensor that the model computes
    BUFFER_UPDATES = "buffer_updates"  # buffers change by `add_to_buffer` alone, behind everything else
    PLACED = "placed"  # every node has a boundary
    PARTITIONED = "partitioned"  # the graph is attention and experts modules and getitems
    TRANSFERS = "transfers"  # whatever enters or leaves an experts module passes m2n nodes
    LINEAR_LOSS = "linear_loss"  # the loss is a sum of numerators over denominators, or there is none
    STREAMS = "streams"  # every node has a stream


# A capability holds from the pass that provides it until one of these takes its place.
_UNTIL: Mapping[Capability, Capability] = {
    Capability.NO_CHECKPOINTS: Capability.PARTITIONED,
    Capability.DEINPLACED: Capability.PARTITIONED,
    Capability.REGIONS_KNOWN: Capability.CANONICAL_EXPERTS,
    Capability.CANONICAL_EXPERTS: Capability.PARTITIONED,
    Capability.SIZES: Capability.PARTITIONED,
    Capability.PLACED: Capability.PARTITIONED,
    Capability.PARTITIONED: Capability.TRANSFERS,
}


class ContractError(DisagMoEError):
    """A pass in the wrong place, or one that did not do what it provides: a defect of this project, not of
    the model."""


def check_order(
    passes: Iterable[GraphPass],
    given: frozenset[Capability],
    needed: frozenset[Capability] = frozenset(),
) -> None:
    """Raises ContractError for the first pass whose requirements do not hold where it stands.

    `needed` must hold after the last pass.
    """
    have = given
    for index, graph_pass in enumerate(passes):
        missing = sorted(graph_pass.requires - standing(have))
        if missing:
            raise ContractError(
                f"pass {index} ({graph_pass.name}) requires {', '.join(missing)}, which no earlier pass "
                "provides; reorder the passes, or leave the one that provides it on"
            )
        have |= graph_pass.provides
    missing = sorted(needed - standing(have))
    if missing:
        raise ContractError(f"no pass provides {', '.join(missing)}, which the programs of the stages need")


def standing(have: frozenset[Capability]) -> frozenset[Capability]:
    """Those of the capabilities provided so far that the graph must still have."""
    return frozenset(c for c in have if _UNTIL.get(c) not in have)


def verify(capabilities: Iterable[Capability], graph_module: fx.GraphModule, culprit: str) -> None:
    """Raises ContractError naming the first violated capability and the node that violates it."""
    for capability in sorted(capabilities):
        fault = _CHECKS[capability](graph_module)
        if fault is not None:
            raise ContractError(f"pass {culprit} does not hold to `{capability}`: {fault}")


def _first(graph_module: fx.GraphModule, broken: Callable[[fx.Node], bool]) -> str | None:
    return next((f"node {node.name}" for node in graph_module.graph.nodes if broken(node)), None)


def _sources(gm: fx.GraphModule) -> str | None:
    return _first(gm, lambda n: n.op == "placeholder" and metadata.source_of(n) is None)


def _no_checkpoints(gm: fx.GraphModule) -> str | None:
    return _first(gm, lambda n: metadata.target_name(n) == "tag_activation_checkpoint")


def _deinplaced(gm: fx.GraphModule) -> str | None:
    return None if gm.meta.get("disagmoe_deinplaced") else "the pass left no mark"


def _regions_known(gm: fx.GraphModule) -> str | None:
    return None if "disagmoe_regions" in gm.meta else "no regions in the graph module's meta"


def _canonical(gm: fx.GraphModule) -> str | None:
    def broken(node: fx.Node) -> bool:
        return metadata.target_name(node) == "experts" and metadata.EXPERTS not in node.meta

    expected = len(gm.meta.get("disagmoe_regions", ()))
    found = sum(metadata.EXPERTS in node.meta for node in gm.graph.nodes)
    return _first(gm, broken) or (
        None if found == expected else f"{found} experts calls for {expected} regions"
    )


def _sizes(gm: fx.GraphModule) -> str | None:
    known = set(symbol_sources(gm.graph))

    def broken(node: fx.Node) -> bool:
        if not metadata.is_computed_size(node):
            return False
        found = metadata.value(node)
        dims = found if isinstance(found, torch.Size) else (found,)
        # Sizes that depend on data (`nonzero`) are no expression of the inputs' sizes, and stay.
        return metadata.free_symbols(map(metadata.expression, dims)) <= known

    return _first(gm, broken)


def _buffer_updates(gm: fx.GraphModule) -> str | None:
    roots = storage_roots(gm.graph)

    def broken(node: fx.Node) -> bool:
        target = written(node)
        source = None if target is None else metadata.source_of(roots[target])
        return source is not None and source.kind is InputKind.BUFFER

    return _first(gm, broken)


def _placed(gm: fx.GraphModule) -> str | None:
    return _first(gm, lambda n: n.op != "output" and metadata.PLACEMENT not in n.meta)


def _partitioned(gm: fx.GraphModule) -> str | None:
    def broken(node: fx.Node) -> bool:
        return node.op in ("call_method", "get_attr") or (
            node.op == "call_function" and node.target not in (operator.getitem, add_to_buffer)
        )

    return _first(gm, broken)


def _transfers(gm: fx.GraphModule) -> str | None:
    def broken(node: fx.Node) -> bool:
        if node.op != "call_module" or not str(node.target).startswith("experts_"):
            return False
        arrives = [a for a in node.args if isinstance(a, fx.Node) and a.op != "placeholder"]
        leaves = list(node.users)
        return not (
            all(metadata.is_call(a.args[0], "m2n_recv") for a in arrives)
            and all(metadata.is_call(user, "m2n_send") for user in leaves)
        )

    return _first(gm, broken)


def _linear_loss(gm: fx.GraphModule) -> str | None:
    return None if "disagmoe_loss" in gm.meta else "no loss decomposition in the graph module's meta"


def _streams(gm: fx.GraphModule) -> str | None:
    return _first(gm, lambda n: n.op not in ("placeholder", "output") and "stream" not in n.meta)


_CHECKS: Mapping[Capability, Callable[[fx.GraphModule], str | None]] = {
    Capability.SOURCES: _sources,
    Capability.NO_CHECKPOINTS: _no_checkpoints,
    Capability.DEINPLACED: _deinplaced,
    Capability.REGIONS_KNOWN: _regions_known,
    Capability.CANONICAL_EXPERTS: _canonical,
    Capability.SIZES: _sizes,
    Capability.BUFFER_UPDATES: _buffer_updates,
    Capability.PLACED: _placed,
    Capability.PARTITIONED: _partitioned,
    Capability.TRANSFERS: _transfers,
    Capability.LINEAR_LOSS: _linear_loss,
    Capability.STREAMS: _streams,
}
