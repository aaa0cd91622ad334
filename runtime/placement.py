"""Which rank holds which rows of which parameter, read off a plan's stages. Pure arithmetic, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.plan.ir import Stage
from disagmoe_compile.plan.topology import Group, Topology

Rows = tuple[int, int]  # first row of dimension 0, and the one after the last


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """`ranges`: owner rank -> its rows of dimension 0, or None for the whole tensor. Other ranks hold
    nothing.

    `group` is the worker group of the owners: replicas of the whole, contiguous shards in rank order, or the
    one rank that has the whole parameter of its expert.
    """

    fqn: str
    global_shape: tuple[int, ...]
    group: Group
    ranges: Mapping[int, Rows | None]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError(f"parameter {self.fqn} has no owner")
        rows = [r for r in self.ranges.values() if r is not None]
        if not rows:
            return
        if len(rows) != len(self.ranges):
            raise ValueError(
                f"parameter {self.fqn} is whole on some ranks and a shard on others: {self.ranges}"
            )
        ends = [0, *(end for _, end in rows)]
        starts = [*(start for start, _ in rows), self.global_shape[0]]
        if ends != starts:
            raise ValueError(
                f"shards {rows} of {self.fqn} do not cover its {self.global_shape[0]} rows once each"
            )

    @property
    def is_sharded(self) -> bool:
        return None not in self.ranges.values()

    @property
    def is_split(self) -> bool:
        """Whether no rank has all of it."""
        return self.is_sharded and len(self.ranges) > 1

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Shape of this rank's part; a rank that owns nothing holds an empty tensor of the same number of
        dimensions.
        """
        if rank not in self.ranges:
            return (0, *self.global_shape[1:])
        rows = self.ranges[rank]
        return self.global_shape if rows is None else (rows[1] - rows[0], *self.global_shape[1:])

    def counts_on(self, rank: int) -> bool:
        """Whether this rank stands for its rows in a sum over ranks that must see each row once."""
        return rank in self.ranges and (self.is_sharded or rank == min(self.ranges))


def placements(
    stages: Sequence[Stage], topology: Topology, shapes: Mapping[str, Sequence[int]]
) -> dict[str, ParameterPlacement]:
    """Placement of every parameter that a stage uses; `shapes` are the global ones.

    Attention parameters are whole on every rank of their group. Parameters stacked over experts are split by
    expert over their group; one that belongs to a single expert is whole on the rank of that expert. Raises
    UnsupportedModelError where two groups would need the same parameter and one of them trains it, or where
    dimension 0 does not divide into experts.
    """
    found: dict[str, ParameterPlacement] = {}
    trained = {fqn for stage in stages for fqn in stage.owned_fqns}
    for stage in stages:
        group = topology.group_of_stage(stage.index)
        for fqn in stage.param_fqns:
            shape = tuple(shapes[fqn])
            ranges = _ranges(topology, stage, fqn, shape)
            before = found.get(fqn)
            if before is None:
                found[fqn] = ParameterPlacement(fqn, shape, group, ranges)
            elif before.ranges != ranges:
                found[fqn] = _shared(before, ranges, fqn in trained, stage.name)
    return found


def _ranges(topology: Topology, stage: Stage, fqn: str, shape: tuple[int, ...]) -> dict[int, Rows | None]:
    ranks, num_experts = topology.ranks_of_stage(stage.index), stage.num_experts
    if num_experts is None or len(ranks) == 1:
        return dict.fromkeys(ranks)
    owned = {rank: topology.experts_of(num_experts, index) for index, rank in enumerate(ranks)}
    if fqn in stage.expert_of:
        return {rank: None for rank, experts in owned.items() if stage.expert_of[fqn] in experts}
    if not shape or shape[0] % num_experts:
        raise UnsupportedModelError(
            f"expert parameter {fqn} has shape {shape}, but only parameters stacked over the {num_experts} experts "
            "can be split over several FFN ranks: set ffn_group_size=1, or stack the experts' weights"
        )
    rows = shape[0] // num_experts  # of one expert
    return {rank: (experts.start * rows, experts.stop * rows) for rank, experts in owned.items()}


def _shared(
    before: ParameterPlacement, ranges: Mapping[int, Rows | None], is_trained: bool, stage: str
) -> ParameterPlacement:
    if is_trained or before.is_sharded or None not in ranges.values():
        raise UnsupportedModelError(
            f"parameter {before.fqn} of {before.group} is used again by stage {stage} on other ranks, so its gradient "
            "would be spread over groups: set pipeline_groups=1, or freeze it"
        )
    return ParameterPlacement(before.fqn, before.global_shape, before.group, {**before.ranges, **ranges})
