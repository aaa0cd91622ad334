"""Regions with a buffer of slots for every expert: narrowed to the routed pairs where these are certain.

Expert choice and routing with a capacity send the rows of routed pairs alone, once per (token, rank). Where it is not
certain which pair is in which slot, the rows of all slots are sent, which is exact for any masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.regions import Found, NoMatch
from disagmoe_compile.passes.styles.capacity import with_capacity
from disagmoe_compile.passes.styles.expert_choice import with_expert_choice
from disagmoe_compile.passes.styles.slots import SlotMatch, depths_of, read_layout


@dataclass(frozen=True, slots=True)
class SlotRegions:
    name: str = "slots"

    def find(self, graph: fx.Graph) -> Found:
        regions, stopped = [], []
        done: set[fx.Node] = set()
        depths = depths_of(graph)
        for node in list(graph.nodes):
            layout = None if node in done else read_layout(node)
            if layout is None:
                continue
            match = SlotMatch(graph, node, layout, depths)
            done |= match.inside
            if not match.chosen_by:
                continue
            for narrow in (with_expert_choice, with_capacity, lambda _, match: match.region()):
                try:
                    regions.append(narrow(graph, match))
                    break
                except NoMatch as reason:
                    stopped.append(reason)
            else:
                continue
            if regions[-1].style != "slots":
                del stopped[-1:]
        return Found(tuple(regions), tuple(stopped))
