"""Finds the MoE regions (analysis only) and says why a routed part of the model is not one.

Styles are tried in order; a region that two styles claim belongs to the first. A top-k that no region uses
is reported with what reads it, so that a style to come knows where to start.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import sympy
from torch import fx

from disagmoe_compile.passes.aliasing import analysing, live_nodes
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import describe, is_call, is_gather, is_tensor, shape, value
from disagmoe_compile.passes.modes import mode_obstacle
from disagmoe_compile.passes.regions import NoMatch, Region, Style, in_graph_order
from disagmoe_compile.passes.styles.expert_loop import ExpertLoop
from disagmoe_compile.passes.styles.gathered import Gathered
from disagmoe_compile.passes.styles.grouped_mm import GroupedMM
from disagmoe_compile.passes.styles.masked_dense import MaskedDense
from disagmoe_compile.passes.styles.slot_regions import SlotRegions
from disagmoe_compile.passes.styles.slots import is_maximum_with_position
from disagmoe_compile.passes.styles.writes import late_write

STYLES: tuple[Style, ...] = (GroupedMM(), Gathered(), MaskedDense(), SlotRegions(), ExpertLoop())


@dataclass(frozen=True, slots=True)
class FindRegions:
    styles: tuple[Style, ...] = STYLES
    name: str = "find_regions"
    requires: frozenset[Capability] = frozenset({Capability.DEINPLACED})
    provides: frozenset[Capability] = frozenset({Capability.REGIONS_KNOWN})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        with analysing(graph_module.graph):
            return self._find(graph_module)

    def _find(self, graph_module: fx.GraphModule) -> PassReport:
        graph, found, stopped = graph_module.graph, [], []
        live = live_nodes(graph)
        claimed: set[fx.Node] = set()
        for style in self.styles:
            result = style.find(graph)
            fitting = []
            for region in result.regions:
                if region.exit in claimed or region.exit not in live:
                    continue
                computed = _computed_with_params(region)
                claimed |= computed
                reason = late_write(graph, region, computed) or _other_rows(region)
                if reason is None:
                    fitting.append(region)
                else:
                    stopped.append(f"{style.name}: {reason}")
            obstacles = [mode_obstacle(graph, _interior(region)) for region in fitting]
            found += [region for region, obstacle in zip(fitting, obstacles) if obstacle is None]
            stopped += [f"{style.name}: {reason}" for reason in result.stopped]
            stopped += [f"{style.name}: {describe(o[0])}: {o[1]}" for o in obstacles if o is not None]
        regions = in_graph_order(graph, found)
        graph_module.meta["disagmoe_regions"] = regions
        stopped += unused_choices(graph, regions)
        notes = tuple(
            f"region {b}: style {r.style}, {r.num_experts} experts, top-{r.top_k}, leaves at "
            f"{describe(r.exit)}"
            for b, r in enumerate(regions)
        )
        return PassReport(matched=len(regions), skipped=tuple(stopped), notes=notes)


def _computed_with_params(region: Region) -> set[fx.Node]:
    """What the region computes with its parameters, the exit included."""
    pending = [node for param in region.params for node in (param if isinstance(param, tuple) else (param,))]
    before: set[fx.Node] = set()
    backwards = [region.exit]
    while backwards:
        node = backwards.pop()
        if node not in before and node is not region.tokens:
            before.add(node)
            backwards += node.all_input_nodes
    found = {region.exit}
    while pending:
        for user in pending.pop().users:
            if user in before and user not in found:
                found.add(user)
                pending.append(user)
    return found


def _other_rows(region: Region) -> NoMatch | None:
    """Where the exit certainly has another number of rows than tokens: a sum into a buffer of more rows, say."""
    tokens, rows = (sympy.prod(map(sympy.sympify, shape(node)[:-1])) for node in (region.tokens, region.exit))
    difference = tokens - rows * region.summed
    if tokens.free_symbols != rows.free_symbols:
        return None  # sizes that depend on data
    some = difference.subs(dict.fromkeys(difference.free_symbols, 12))
    if some.is_zero is not False:
        return None
    return NoMatch(region.exit, f"it has {rows} rows for {tokens // region.summed} tokens")


def _interior(region: Region) -> list[fx.Node]:
    """What the region computes between its tokens, weights and parameters and its exit, the exit included."""
    ends = {region.tokens, region.token_ids, region.expert_ids, region.weights, region.base}
    found: dict[fx.Node, None] = {}
    pending = [region.exit]
    while pending:
        node = pending.pop()
        if node not in found and node not in ends and node.op != "placeholder":
            found[node] = None
            pending += node.all_input_nodes
    return [node for node in found if is_tensor(node) and value(node).is_floating_point()]


def _readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a value, past the parts that are only taken out of it."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        is_part = user.target is operator.getitem and not is_gather(user)
        found |= dict.fromkeys(_readers(user) if is_part else [user])
    return list(found)


def unused_choices(graph: fx.Graph, regions: tuple[Region, ...]) -> list[str]:
    """One line per top-k that routes no found region; where there is none of either, per other choice that may route."""
    routing: set[fx.Node] = set()
    pending = [node for r in regions for node in (r.expert_ids, r.weights, *r.chosen_by) if node is not None]
    stops = {region.tokens for region in regions} | {region.exit for region in regions}
    while pending:
        node = pending.pop()
        if node not in routing and node not in stops:
            routing.add(node)
            pending += node.all_input_nodes
    unused = [node for node in graph.nodes if is_call(node, "topk") and node not in routing]
    if not unused and not regions:
        unused = [
            node
            for node in graph.nodes
            if is_call(node, "argmax", "argsort", "sort", "multinomial") or is_maximum_with_position(node)
        ]
    return [
        f"{describe(node)} routes no region that a style recognises; it is read by "
        + (", ".join(describe(reader) for reader in _readers(node)[:2]) or "nothing")
        for node in unused
    ]
