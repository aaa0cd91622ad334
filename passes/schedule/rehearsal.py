"""What list scheduling rehearses with: how long each action takes, and what stages send to each other over which links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.ir import Direction
from disagmoe_compile.plan.sharing import Leg, Link
from disagmoe_compile.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Message:
    """From a pass of a stage to the same of another: `legs` as amounts over the rehearsal's links."""

    to: int
    legs: tuple[Leg, ...]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Times that the order is made for, in any unit.

    `seconds`: of an action of a stage. `messages`: what a stage sends forward, or backward. `sums`: of a stage that has replicas,
    how its gradients are summed. `links`: amount that each moves in a unit of time. `latency`: of each message.
    """

    seconds: Mapping[tuple[ActionKind, int], float]
    messages: Mapping[tuple[Direction, int], Sequence[Message]]
    links: Mapping[Link, float]
    sums: Mapping[int, tuple[Leg, ...]] = field(default_factory=dict)
    latency: float = 0.0

    @staticmethod
    def of_exchanges(
        topology: Topology, seconds: Mapping[tuple[ActionKind, int], float], exchange: float
    ) -> Rehearsal:
        """Each stage sends to the next, and back, what takes `exchange` alone; groups have a way out and a way in."""
        group = topology.group_of_stage

        def message(src: int, dst: int) -> Message:
            return Message(dst, (Leg(exchange, ((group(src), "out"), (group(dst), "in"))),))

        last = topology.n_stages - 1
        forward = {(Direction.FORWARD, s): [message(s, s + 1)] for s in range(last)}
        backward = {(Direction.BACKWARD, s + 1): [message(s + 1, s)] for s in range(last)}
        links: dict[Link, float] = {(g, way): 1.0 for g in topology.groups for way in ("out", "in")}
        return Rehearsal(seconds, forward | backward, links)

    @staticmethod
    def uniform(topology: Topology) -> Rehearsal:
        """Every stage and gradient takes as long as any other, an exchange half of it."""
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        table = {(kind, stage): 1.0 for stage in range(topology.n_stages) for kind in kinds}
        whole = {(ActionKind.BACKWARD, stage): 2.0 for stage in range(topology.n_stages)}
        return Rehearsal.of_exchanges(topology, table | whole, 0.5)
