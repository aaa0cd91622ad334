"""Rank arithmetic: which rank is in which group, which group owns which stage, which rank owns which expert. Pure, no torch.

One world order for all: attention ranks first, group by group, then FFN ranks, group by group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from disagmoe_compile.plan.shares import fair_share


class Role(StrEnum):
    ATTENTION = "attention"
    FFN = "ffn"


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """A worker group; `str` is its name in plans and timelines, e.g. `attention.0`."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role}.{self.index}"

    @staticmethod
    def parse(text: str) -> Group:
        role, _, index = text.partition(".")
        if role not in set(Role) or not index.isdigit():
            raise ValueError(f"not a worker group: {text!r}; expected e.g. attention.0 or ffn.1")
        return Group(Role(role), int(index))


@dataclass(frozen=True, slots=True)
class Topology:
    """M ranks in each of `attention_groups` A-groups, N ranks in each of `ffn_groups` F-groups.

    Attention stage b runs on A-group b mod p_A, expert stage b on F-group b mod p_F. The head (boundary `n_boundaries`) follows
    as boundary B, unless it shares a parameter with stage 0 (`tied_head`): then it runs on A-group 0, so that no gradient
    crosses groups.
    """

    attention_group_size: int
    ffn_group_size: int
    attention_groups: int
    ffn_groups: int
    n_boundaries: int
    tied_head: bool = False

    def __post_init__(self) -> None:
        for name in (
            "attention_group_size",
            "ffn_group_size",
            "attention_groups",
            "ffn_groups",
            "n_boundaries",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")

    @property
    def world_size(self) -> int:
        return self.attention_groups * self.attention_group_size + self.ffn_groups * self.ffn_group_size

    @property
    def n_stages(self) -> int:
        return 2 * self.n_boundaries + 1

    @property
    def groups(self) -> tuple[Group, ...]:
        """All worker groups in rank order."""
        attention = [Group(Role.ATTENTION, g) for g in range(self.attention_groups)]
        return (*attention, *(Group(Role.FFN, g) for g in range(self.ffn_groups)))

    def role_of_stage(self, stage: int) -> Role:
        return Role.FFN if stage % 2 else Role.ATTENTION

    def group_of_stage(self, stage: int) -> Group:
        if not 0 <= stage < self.n_stages:
            raise ValueError(f"stage {stage} is not one of {self.n_stages} stages")
        boundary = stage // 2
        if stage % 2:
            return Group(Role.FFN, boundary % self.ffn_groups)
        is_tied_head = self.tied_head and stage == self.n_stages - 1
        return Group(Role.ATTENTION, 0 if is_tied_head else boundary % self.attention_groups)

    def stages_of_group(self, group: Group) -> tuple[int, ...]:
        return tuple(s for s in range(self.n_stages) if self.group_of_stage(s) == group)

    def ranks_of_group(self, group: Group) -> range:
        if group.role is Role.ATTENTION:
            first, size = group.index * self.attention_group_size, self.attention_group_size
        else:
            first = self.attention_groups * self.attention_group_size + group.index * self.ffn_group_size
            size = self.ffn_group_size
        return range(first, first + size)

    def group_of_rank(self, rank: int) -> Group:
        attention_ranks = self.attention_groups * self.attention_group_size
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside world size {self.world_size}")
        if rank < attention_ranks:
            return Group(Role.ATTENTION, rank // self.attention_group_size)
        return Group(Role.FFN, (rank - attention_ranks) // self.ffn_group_size)

    def index_in_group(self, rank: int) -> int:
        return rank - self.ranks_of_group(self.group_of_rank(rank)).start

    def ranks_of_stage(self, stage: int) -> range:
        return self.ranks_of_group(self.group_of_stage(stage))

    def experts_of(self, num_experts: int, index_in_group: int) -> range:
        """Experts that member `index_in_group` of an F-group owns: contiguous, sizes differ by at most one, larger first."""
        if num_experts < self.ffn_group_size:
            raise ValueError(
                f"{self.ffn_group_size} FFN ranks cannot share {num_experts} experts: "
                f"ffn_group_size must be at most {num_experts}"
            )
        return fair_share(num_experts, self.ffn_group_size, index_in_group)
