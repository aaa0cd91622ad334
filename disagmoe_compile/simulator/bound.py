"""What no schedule of the same work on the same groups can beat.

    critical path     the longest chain of computes and messages of one micro-batch, each as fast as if it were alone
    of a resource     (a group's compute, or one direction of its links): the shortest chain before any of its work, plus all of
                      its work, plus the shortest chain after any of it

The bound is the largest of these. It knows data dependencies alone: no list order, no waits for buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from disagmoe_compile.plan.action import COMPUTE_KINDS, ActionKind
from disagmoe_compile.plan.ir import Direction, Transfer
from disagmoe_compile.plan.sharing import Leg, Link, Number
from disagmoe_compile.plan.steps import BACKWARD_INPUTS, BACKWARD_WEIGHTS, parts_of
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.simulator.program import Program

Node = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class Bound:
    """`seconds` in the program's unit; `limit` names what it comes from: `critical path`, or a group's compute or links."""

    seconds: Number
    limit: str
    critical_path: Number


def lower_bound(program: Program) -> Bound:
    """Of a lowered schedule. Micro-batches are alike, so chains are those of one micro-batch per set of stages that it visits."""
    work = _Work(program)
    head, tail = work.heads(), work.tails()
    path = max((head[n] + work.length[n] + tail[n] for n in work.length), default=0)
    bounds: list[tuple[Number, str]] = [(path, "critical path")]
    for resource, nodes in work.nodes_of.items():
        least_head = min(head[n] for n in nodes)
        least_tail = min(tail[n] for n in nodes)
        bounds.append((least_head + work.busy[resource] + least_tail, resource))
    seconds, limit = max(bounds, key=lambda bound: bound[0])
    return Bound(seconds, limit, path)


class _Work:
    """Computes and messages of one micro-batch: their lengths, what each needs, and the load of each resource over the step."""

    def __init__(self, program: Program) -> None:
        self.program, self.routes = program, Routes(program.transfers)
        self.length: dict[Node, Number] = {}
        self.needs: dict[Node, list[Node]] = {}
        self.busy: dict[str, Number] = defaultdict(int)
        self.nodes_of: dict[str, list[Node]] = defaultdict(list)
        computes = self._computes()
        self._add_computes(computes)
        self._add_messages(computes)

    def heads(self) -> dict[Node, Number]:
        """Per node the longest chain before it."""
        head: dict[Node, Number] = {}
        for node in TopologicalSorter(self.needs).static_order():
            head[node] = max((head[n] + self.length[n] for n in self.needs[node]), default=0)
        return head

    def tails(self) -> dict[Node, Number]:
        tail: dict[Node, Number] = dict.fromkeys(self.length, 0)
        for node in reversed(list(TopologicalSorter(self.needs).static_order())):
            for before in self.needs[node]:
                tail[before] = max(tail[before], tail[node] + self.length[node])
        return tail

    def _computes(self) -> dict[tuple[ActionKind, int], tuple[str, int]]:
        """(kind, stage) -> its group and how often it runs. Adds the groups' loads."""
        counts: dict[tuple[ActionKind, int], tuple[str, int]] = {}
        for group, actions in self.program.schedule.actions.items():
            resource = f"compute of {group}"
            for action in actions:
                if action.kind in COMPUTE_KINDS or action.parts:
                    self.busy[resource] += self.program.duration(action)
                for part in parts_of(action):
                    if part.kind in COMPUTE_KINDS:
                        _, n = counts.get((part.kind, part.stage), ("", 0))
                        counts[part.kind, part.stage] = (resource, n + 1)
        return counts

    def _add_computes(self, computes: dict[tuple[ActionKind, int], tuple[str, int]]) -> None:
        for (kind, stage), (resource, _) in computes.items():
            node: Node = ("compute", (kind, stage))
            # in an OVERLAP a part ends with the pair, and may take less of the resource than alone
            alone = self.program.seconds[kind, stage] + self.program.overhead
            pairs = [seconds for pair, seconds in self.program.pairs.items() if (kind, stage) in pair]
            self.length[node] = min([alone, *pairs])
            self.needs[node] = []
            self.nodes_of[resource].append(node)
            if kind is ActionKind.BACKWARD_WEIGHT:
                self.needs[node].append(("compute", (ActionKind.BACKWARD_INPUT, stage)))
            elif kind in BACKWARD_INPUTS:
                self.needs[node].append(("compute", (ActionKind.FORWARD, stage)))

    def _add_messages(self, computes: dict[tuple[ActionKind, int], tuple[str, int]]) -> None:
        for name, transfer in self.routes.by_name.items():
            sources = list(self._of(computes, transfer.src, transfer.direction))
            targets = list(self._of(computes, transfer.dst, transfer.direction))
            if transfer.src == transfer.dst:
                self._add_reduction(transfer, computes)
                continue
            if not sources or not targets:
                continue
            node: Node = ("message", name)
            legs = self.program.messages.get(name, ())
            self.length[node] = self._alone(legs)
            self.needs[node] = sources
            for target in targets:
                self.needs[target].append(node)
            self._load_links(node, legs, computes[sources[0][1]][1])  # type: ignore[index]

    def _add_reduction(
        self, transfer: Transfer, computes: dict[tuple[ActionKind, int], tuple[str, int]]
    ) -> None:
        """The sum of a stage's gradients over replicas, once a step, after its last weight gradient."""
        sources: list[Node] = [
            ("compute", (k, transfer.src)) for k in BACKWARD_WEIGHTS if (k, transfer.src) in computes
        ]
        legs = self.program.messages.get(transfer.name, ())
        if sources and legs:
            node: Node = ("message", transfer.name)
            self.length[node] = self._alone(legs)
            self.needs[node] = sources
            self._load_links(node, legs, 1)

    def _alone(self, legs: Sequence[Leg]) -> Number:
        """The least that a message takes."""
        links = self.program.links
        alone = [leg.amount / min(links[link] for link in leg.links) for leg in legs if leg.amount]
        return max(alone, default=0) + self.program.latency

    def _load_links(self, node: Node, legs: Sequence[Leg], count: int) -> None:
        for leg in legs:
            for link in leg.links:
                if leg.amount:
                    resource = f"link {_text(link)}"
                    self.busy[resource] += count * leg.amount / self.program.links[link]
                    self.nodes_of[resource].append(node)

    @staticmethod
    def _of(
        computes: dict[tuple[ActionKind, int], tuple[str, int]], stage: int, direction: Direction
    ) -> Iterator[Node]:
        kinds = (ActionKind.FORWARD,) if direction is Direction.FORWARD else BACKWARD_INPUTS
        return (("compute", (kind, stage)) for kind in kinds if (kind, stage) in computes)


def _text(link: Link) -> str:
    return " ".join(map(str, link)) if isinstance(link, tuple) else str(link)
