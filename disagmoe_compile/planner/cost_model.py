"""What a stage costs, and the split of ranks that these costs ask for. Used inside torch.compile, where no sizes are given.

The costs come from a ModelCosts, of a traced graph or of closed forms. Only ratios between
FLOPs and bytes decide a split, so any one unit of work (a micro-batch, a batch, all layers together) does, if it is the same
for all three.

Here a rank brings its own NIC where a node has one per GPU: then a group cannot have other NICs than its ranks'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.allocation import Allocation, AllocationProblem, solve
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts, exchange_bytes


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Forward FLOPs of an attention stage and of an expert stage, and bytes of ONE exchange in ONE direction between them.

    Of the whole stage, whatever the number of ranks that share it. Costs of several stages add up.
    """

    attention_flops: float
    ffn_flops: float
    exchange_bytes: float

    def __post_init__(self) -> None:
        for name in ("attention_flops", "ffn_flops", "exchange_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a finite number of at least 0, got {value!r}")

    @classmethod
    def mean(cls, costs: ModelCosts) -> StageCosts:
        """Of one boundary on average, for one sequence: shared experts and head count as attention, nothing is de-duplicated."""
        n = costs.n_boundaries
        attention = sum(part.forward_flops for part in (*costs.attention, *costs.shared, costs.head))
        return cls(
            attention / n,
            sum(part.forward_flops for part in costs.experts) / n,
            exchange_bytes(costs, Dedup.NONE, ffn_ranks=1, ranks_per_node=1).nic,
        )

    def __add__(self, other: StageCosts) -> StageCosts:
        return StageCosts(
            self.attention_flops + other.attention_flops,
            self.ffn_flops + other.ffn_flops,
            self.exchange_bytes + other.exchange_bytes,
        )


def split_world(
    costs: StageCosts,
    *,
    world_size: int,
    hardware: Cluster,
    pipeline_groups: int = 1,
    allowed_attention_sizes: Sequence[int] | None = None,
    allowed_ffn_sizes: Sequence[int] | None = None,
    max_ffn_size: int | None = None,
    time_limit_s: float = 60,
) -> tuple[int, int, Allocation]:
    """The sizes (M, N) of an A-group and an F-group with p (M + N) = `world_size`, and the allocation behind them.

    `allowed_attention_sizes`: those that divide the batch, or the one the user fixed; `allowed_ffn_sizes` likewise;
    `max_ffn_size`: the experts of a layer, as an FFN rank needs one. Raises InputError where no split satisfies all of these.
    """
    group_ranks = _ranks_of_a_pair(world_size, pipeline_groups)
    if world_size > hardware.gpus:
        raise InputError(
            f"{world_size} ranks do not fit on {hardware.gpus} devices of {hardware.name!r}; add nodes"
        )
    sizes_attention = [m for m in range(1, group_ranks) if _is_among(m, allowed_attention_sizes)]
    most_ffn = group_ranks - 1 if max_ffn_size is None else min(group_ranks - 1, max_ffn_size)
    sizes_ffn = [n for n in range(1, most_ffn + 1) if _is_among(n, allowed_ffn_sizes)]
    if not any(group_ranks - m in sizes_ffn for m in sizes_attention):
        raise InputError(
            f"no split of the ranks into groups satisfies all of: attention_group_size + ffn_group_size = {group_ranks} (world "
            f"size {world_size} / pipeline_groups {pipeline_groups}); attention_group_size is one of {_listed(sizes_attention)} "
            f"(it divides the batch); ffn_group_size is one of {_listed(sizes_ffn)} (each FFN rank needs an expert). Change the "
            "number of ranks, the batch, or the sizes"
        )
    is_tied = hardware.has_nic_per_gpu
    allocation = solve(
        AllocationProblem(
            attention_flops=costs.attention_flops,
            ffn_flops=costs.ffn_flops,
            exchange_bytes=costs.exchange_bytes,
            gpus=group_ranks,
            nics=group_ranks if is_tied else max(2, group_ranks * hardware.nics // hardware.gpus),
            gpu_flops=hardware.gpu.flops,
            nic_bytes_per_s=hardware.nic_bytes_per_s,
            allowed_attention_gpus=_restriction(sizes_attention, group_ranks),
            allowed_ffn_gpus=_restriction(sizes_ffn, group_ranks),
            nics_follow_gpus=is_tied,
        ),
        time_limit_s=time_limit_s,
    )
    return allocation.attention_gpus, allocation.ffn_gpus, allocation


def _ranks_of_a_pair(world_size: int, pipeline_groups: int) -> int:
    if pipeline_groups < 1 or world_size < 2 * pipeline_groups:
        raise InputError(
            f"{world_size} ranks cannot form {pipeline_groups} attention and {pipeline_groups} FFN groups: start at least "
            f"{2 * max(pipeline_groups, 1)} ranks, or lower pipeline_groups (at least 1)"
        )
    if world_size % pipeline_groups:
        raise InputError(
            f"world size {world_size} is not divisible by pipeline_groups {pipeline_groups}: "
            "world size = pipeline_groups * (attention_group_size + ffn_group_size)"
        )
    return world_size // pipeline_groups


def _is_among(size: int, allowed: Sequence[int] | None) -> bool:
    return allowed is None or size in allowed


def _restriction(sizes: Sequence[int], group_ranks: int) -> tuple[int, ...] | None:
    """None where every size is allowed: the model is smaller without the set."""
    return None if len(sizes) == group_ranks - 1 else tuple(sizes)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "none"
