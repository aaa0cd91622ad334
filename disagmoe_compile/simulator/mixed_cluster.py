"""A cluster of two kinds of nodes: attention ranks on the one, FFN ranks on the other.

Each side has its own kind's FLOP/s, memory, NICs, links and efficiencies, and its own number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.efficiency import Efficiencies, Efficiency
from disagmoe_compile.planner.hardware import GPU, Cluster


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """`attention`: the nodes of attention ranks, `ffn`: those of FFN ranks. Raises InputError where one is no `Cluster`."""

    attention: Cluster
    ffn: Cluster

    def __post_init__(self) -> None:
        for name in ("attention", "ffn"):
            if not isinstance(getattr(self, name), Cluster):
                raise InputError(f"{name} nodes must be a Cluster, got {getattr(self, name)!r}")

    @property
    def kinds(self) -> tuple[Cluster, Cluster]:
        return self.attention, self.ffn

    @property
    def is_one_kind(self) -> bool:
        """The nodes of both sides are equal, whatever their numbers."""
        return self.attention.with_nodes(1) == self.ffn.with_nodes(1)

    @property
    def name(self) -> str:
        return " + ".join(f"{kind.nodes} x {kind.name}" for kind in self.kinds)

    @property
    def gpus(self) -> int:
        """Of both kinds."""
        return self.attention.gpus + self.ffn.gpus

    @property
    def gpus_per_node(self) -> int:
        """Of the larger node."""
        return max(self.attention.gpus_per_node, self.ffn.gpus_per_node)

    @property
    def placement(self) -> str:
        """Of the two sides, in words."""
        return f"attention on {self.attention.name}, FFN on {self.ffn.name}"

    def of(self, role: Role) -> Cluster:
        return self.attention if role is Role.ATTENTION else self.ffn

    def swapped(self) -> MixedCluster:
        """Each side on the other kind."""
        return MixedCluster(self.ffn, self.attention)

    def in_lockstep(self) -> Cluster:
        """All GPUs as equal ones that do the same at the same time: each part of a step takes as long as on the kind that is
        slower at it, and nothing is held that does not fit the smaller memory. Nodes are as large as divides both.
        """
        one, other = self.kinds
        if self.is_one_kind:
            return one.with_nodes(one.nodes + other.nodes)
        per_node = math.gcd(one.gpus_per_node, other.gpus_per_node)
        flops, gemm = self._worse("gemm", lambda c: c.gpu.flops)
        _, core = self._worse("attention_core", lambda c: c.gpu.flops)
        memory_rate, memory = self._worse("memory", lambda c: c.gpu.memory_bytes_per_s)
        link_rate, link = self._worse("link", lambda c: c.gpu.link_bytes_per_s)
        nic_rate, network = self._worse(
            "network", lambda c: c.nic_bytes_per_s * c.nics_per_node / c.gpus_per_node
        )
        name = f"{one.name} and {other.name} in lockstep"
        gpu = GPU(
            name=name,
            flops=flops,
            memory_bytes=min(one.gpu.memory_bytes, other.gpu.memory_bytes),
            memory_bytes_per_s=memory_rate,
            link_bytes_per_s=link_rate,
            sources=tuple(dict.fromkeys((*one.gpu.sources, *other.gpu.sources))),
        )
        reached = Efficiencies(gemm, core, memory, link, network)
        return Cluster(name, gpu, per_node, per_node, nic_rate, self.gpus // per_node, reached)

    def _worse(self, what: str, peak: Callable[[Cluster], float]) -> tuple[float, Efficiency]:
        """The lesser peak, and the share of it that makes the lesser of what is reached."""
        least = min(map(peak, self.kinds))
        reached = min(peak(c) * getattr(c.efficiencies, what).value for c in self.kinds)
        return least, Efficiency(reached / least, f"the lesser of {self.attention.name} and {self.ffn.name}")


AnyCluster = Cluster | MixedCluster


def side(cluster: AnyCluster, role: Role) -> Cluster:
    """The nodes of a role's ranks: of equal nodes all."""
    return cluster.of(role) if isinstance(cluster, MixedCluster) else cluster


def each(cluster: AnyCluster, change: Callable[[Cluster], Cluster]) -> AnyCluster:
    """A cluster with its nodes of either kind changed."""
    if isinstance(cluster, MixedCluster):
        return MixedCluster(change(cluster.attention), change(cluster.ffn))
    return change(cluster)


def mean_flops(cluster: AnyCluster) -> float:
    """Peak FLOP/s, the mean over all GPUs."""
    if isinstance(cluster, MixedCluster):
        return sum(one.gpus * one.gpu.flops for one in cluster.kinds) / cluster.gpus
    return cluster.gpu.flops
