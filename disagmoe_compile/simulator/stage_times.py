"""Seconds of a stage on GPUs of a cluster, from the planner's costs of one sequence. The same for AF-Pipe and every rival.

    seconds = (FLOPs outside the attention core) / (peak x gemm) + (FLOPs of the core) / (peak x attention_core)

A weight gradient takes what the forward's matmuls take (the core has no weights); the input gradient is the rest of the backward,
and with recompute another forward before it. Routed experts run at the speed of a grouped matmul with their number of rows, and
the rank with most experts sets the pace.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import ComponentCosts, ModelCosts, grouped_gemm_efficiency


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one stage and micro-batch. `backward` is the whole of it, `weight` its weight part; recompute is in the input part."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(
            self.forward + other.forward, self.backward + other.backward, self.weight + other.weight
        )

    @property
    def input(self) -> float:
        return self.backward - self.weight

    def by_kind(self) -> dict[ActionKind, float]:
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.BACKWARD_INPUT: self.input,
            ActionKind.BACKWARD_WEIGHT: self.weight,
        }


@dataclass(frozen=True, slots=True)
class Speed:
    """What a cluster's GPUs and links reach. Bytes/s one way, of one GPU."""

    cluster: Cluster

    @property
    def nic(self) -> float:
        return self.one_nic * self.cluster.nics_per_node / self.cluster.gpus_per_node

    @property
    def one_nic(self) -> float:
        return self.cluster.nic_bytes_per_s * self.cluster.efficiencies.network.value

    @property
    def link(self) -> float:
        return self.cluster.gpu.link_bytes_per_s * self.cluster.efficiencies.link.value

    def seconds(self, costs: ComponentCosts, sequences: float, *, recompute: bool) -> StageSeconds:
        """Of `sequences` (a share of one, too) on one GPU."""
        peak, reached = self.cluster.gpu.flops, self.cluster.efficiencies
        matmul, core = peak * reached.gemm.value, peak * reached.attention_core.value

        def spent(flops: float, of_core: float) -> float:
            return sequences * ((flops - of_core) / matmul + of_core / core)

        forward = spent(costs.forward_flops, costs.core_forward_flops)
        backward = spent(costs.backward_flops, costs.core_backward_flops)
        weight = min(sequences * (costs.forward_flops - costs.core_forward_flops) / matmul, backward)
        return StageSeconds(forward, backward + forward * recompute, weight)

    def expert_seconds(
        self, model: ModelCosts, boundary: int, sequences: float, ranks: int, *, recompute: bool
    ) -> StageSeconds:
        """Routed experts of one boundary, `sequences` of them shared by `ranks` ranks."""
        rows = sequences * model.seq_length * model.top_k / model.num_experts
        efficiency = grouped_gemm_efficiency(
            rows, ridge_flops_per_byte=self.cluster.ridge_flops_per_byte, element_bytes=model.element_bytes
        )
        share = sequences / (effective_ranks(model.num_experts, ranks) * efficiency)
        return self.seconds(model.experts[boundary], share, recompute=recompute)


def effective_ranks(num_experts: int, ranks: int) -> float:
    """E / ceil(E / N): the rank with most experts sets the pace."""
    return num_experts / -(-num_experts // ranks)
