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

    def in_step(self, by_speed: float = 0.0) -> Cluster:
        """All GPUs as equal ones that do the same at the same time, each with its kind's share of the batch and of the experts:
        equal shares at 0, in proportion to the speed of its matmuls at 1, and between at between.

        Each part of a step takes as long as on the kind that is slowest with its share, and nothing is held whose share does not
        fit a kind's memory, as if all that a GPU holds grew with its share. Nodes are as large as divides both.
        """
        one, other = self.kinds
        if self.is_one_kind:
            return one.with_nodes(one.nodes + other.nodes)
        speeds = [kind.gpu.flops * kind.efficiencies.gemm.value for kind in self.kinds]
        mean = sum(kind.gpus * speed for kind, speed in zip(self.kinds, speeds)) / self.gpus
        shares = [1 + by_speed * (speed / mean - 1) for speed in speeds]

        def slowest(what: str, peak: Callable[[Cluster], float]) -> tuple[float, Efficiency]:
            """The least peak for a share, and the part of it that makes the least of what is reached."""
            peaks = [peak(kind) / share for kind, share in zip(self.kinds, shares)]
            reached = min(
                rate * getattr(kind.efficiencies, what).value for kind, rate in zip(self.kinds, peaks)
            )
            return min(peaks), Efficiency(reached / min(peaks), f"the least of {one.name} and {other.name}")

        per_node = math.gcd(one.gpus_per_node, other.gpus_per_node)
        flops, gemm = slowest("gemm", lambda kind: kind.gpu.flops)
        _, core = slowest("attention_core", lambda kind: kind.gpu.flops)
        memory_rate, memory = slowest("memory", lambda kind: kind.gpu.memory_bytes_per_s)
        link_rate, link = slowest("link", lambda kind: kind.gpu.link_bytes_per_s)
        nic_rate, network = slowest(
            "network", lambda kind: kind.nic_bytes_per_s * kind.nics_per_node / kind.gpus_per_node
        )
        name = f"{one.name} and {other.name} in step"
        gpu = GPU(
            name=name,
            flops=flops,
            memory_bytes=min(kind.gpu.memory_bytes / share for kind, share in zip(self.kinds, shares)),
            memory_bytes_per_s=memory_rate,
            link_bytes_per_s=link_rate,
            sources=tuple(dict.fromkeys((*one.gpu.sources, *other.gpu.sources))),
        )
        reached = Efficiencies(gemm, core, memory, link, network)
        return Cluster(name, gpu, per_node, per_node, nic_rate, self.gpus // per_node, reached)


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
