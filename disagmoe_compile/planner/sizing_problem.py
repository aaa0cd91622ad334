"""The sizing problem: which choices there are for a model on a cluster, and which of them go together.

    SizingProblem  =  ModelCosts (of one sequence)  +  Cluster  +  TrainingWorkload  +  SizingOptions

A choice is a `Candidate`. It has two halves, which the solver chooses by binaries of their own and couples by linear rows:

    Layout    p groups of M attention and N FFN ranks, p (M + N) = all GPUs; sequences of a micro-batch; side of the shared
    experts Policy    recompute on either side, optimizer state sharded over the attention replicas or not, micro-batches in
    flight

Legend: p pipeline groups of each kind, M and N ranks of one attention and one FFN group, E experts, q micro-batches in flight in
one direction (twice as many in all), n micro-batches of a step, b sequences of one micro-batch on one attention rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.recompute import RECOMPUTE, recomputes
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts

GroupSizes = tuple[int, int, int]
"""Pipeline groups, attention ranks and FFN ranks of one group."""
MOST_SEQUENCES_A_MICROBATCH = 16
"""Largest micro-batch that is tried where the user names none."""


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """What one step trains on: exactly `global_batch_size` sequences, or at most `sequences_per_gpu` a GPU.

    Exactly means that M b n must equal it. With `sequences_per_gpu` the step takes the largest M b n up to that, so that M needs
    not divide anything. `micro_batch_size` fixes b, `n_microbatches` fixes n. `fills_pipeline`: b and n are not chosen, they are
    those that `torch.compile` takes where nobody says (`microbatches_that_fill`).
    """

    seq_length: int
    global_batch_size: int | None = None
    sequences_per_gpu: int | None = None
    micro_batch_size: int | None = None
    n_microbatches: int | None = None
    fills_pipeline: bool = False

    def __post_init__(self) -> None:
        counts = [f.name for f in fields(self) if f.name != "fills_pipeline"]
        _require_whole(self, [name for name in counts if getattr(self, name) is not None])
        if (self.global_batch_size is None) == (self.sequences_per_gpu is None):
            raise InputError(
                "give either global_batch_size or sequences_per_gpu, got "
                f"{self.global_batch_size} and {self.sequences_per_gpu}"
            )

    def sequences(self, gpus: int) -> int:
        """The batch that is asked for: its size, or the most that it may be."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.sequences_per_gpu is not None
        return self.sequences_per_gpu * gpus


def microbatches_that_fill(share: int, groups: int) -> int:
    """Micro-batches of an attention rank with `share` samples: as many as divide them, at most the 8p that fill a pipeline."""
    return max(n for n in range(1, min(share, 8 * groups) + 1) if share % n == 0)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Bytes a parameter. Default: mixed precision with Adam as in ZeRO (arXiv 1910.02054).

    bf16 weights and gradients; fp32 master weights and two moments.
    """

    weight_bytes: float = 2
    gradient_bytes: float = 2
    optimizer_bytes: float = 12

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a finite number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class SizingOptions:
    """What the user fixes; None lets the planner choose.

    `recompute`: one of `plan.recompute.RECOMPUTE`.
    `dedup`: copies of a token that are sent. `whole_nodes`: every group takes whole nodes. `free_nics`: NICs are shared out like
    GPUs; otherwise a group has those of its GPUs. `nic_share`: share of all NICs that the two sides use together (the paper
    uses half). `usable_memory`: share of a GPU's memory that a plan may fill, ASSUMED; the rest is for kernels, buffers of
    messages and fragmentation.
    """

    dedup: Dedup = Dedup.RANK
    pipeline_groups: int | None = None
    attention_group_size: int | None = None
    ffn_group_size: int | None = None
    whole_nodes: bool = False
    free_nics: bool = False
    nic_share: float = 1.0
    recompute: str | None = None
    shared_experts_on: str | None = None
    shard_optimizer: bool | None = False
    usable_memory: float = 0.9
    state: TrainingState = field(default_factory=TrainingState)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dedup", _dedup(self.dedup))
        sizes = ("pipeline_groups", "attention_group_size", "ffn_group_size")
        _require_whole(self, [name for name in sizes if getattr(self, name) is not None])
        for name in ("nic_share", "usable_memory"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1):
                raise InputError(f"{name} must be a share above 0 and up to 1, got {value!r}")
        if self.recompute not in (None, *RECOMPUTE):
            raise InputError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}")
        if self.shared_experts_on not in (None, "attention", "ffn"):
            raise InputError(f"shared_experts_on must be attention or ffn, got {self.shared_experts_on!r}")


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Sizes of one pair of groups; an attention rank runs `n_microbatches` of `micro_batch_size` sequences a step."""

    pipeline_groups: int
    attention_group_size: int
    ffn_group_size: int
    micro_batch_size: int
    n_microbatches: int
    shared_on_ffn: bool

    @property
    def global_batch_size(self) -> int:
        return self.attention_group_size * self.micro_batch_size * self.n_microbatches

    @property
    def sizes(self) -> GroupSizes:
        return self.pipeline_groups, self.attention_group_size, self.ffn_group_size

    @property
    def family(self) -> Family:
        return Family(self.pipeline_groups, self.micro_batch_size, self.shared_on_ffn)


@dataclass(frozen=True, slots=True, order=True)
class Family:
    """What a layout and a policy must agree on."""

    pipeline_groups: int
    micro_batch_size: int
    shared_on_ffn: bool


@dataclass(frozen=True, slots=True, order=True)
class Policy:
    recompute_attention: bool
    recompute_ffn: bool
    shard_optimizer: bool
    in_flight: int


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One complete choice; NICs are of one attention and one FFN group."""

    layout: Layout
    policy: Policy
    attention_nics: float
    ffn_nics: float


@dataclass(frozen=True, slots=True)
class SizingProblem:
    """See the module docstring. Raises InputError where the model has no experts to spread or the cluster too few GPUs."""

    costs: ModelCosts
    cluster: Cluster
    workload: TrainingWorkload
    options: SizingOptions = field(default_factory=SizingOptions)

    def __post_init__(self) -> None:
        if self.costs.seq_length != self.workload.seq_length:
            raise InputError(
                f"costs are of {self.costs.seq_length} tokens, the workload has {self.workload.seq_length}"
            )
        if self.cluster.gpus < 2:
            raise InputError("a plan needs at least 2 GPUs, one for attention and one for the experts, got 1")

    def depths(self) -> list[int]:
        """Numbers of pipeline groups: divisors of the GPUs, at most one group of each kind a MoE boundary."""
        if self.options.pipeline_groups is not None:
            wanted = self.options.pipeline_groups
            return [wanted] if self._is_depth(wanted) else []
        return [p for p in range(1, self.costs.n_boundaries + 1) if self._is_depth(p)]

    def _is_depth(self, groups: int) -> bool:
        gpus = self.cluster.gpus
        return gpus % groups == 0 and gpus // groups >= 2 and groups <= self.costs.n_boundaries

    def group_sizes(self, groups: int) -> Iterator[tuple[int, int]]:
        """(M, N) with p (M + N) = all GPUs, each FFN rank with an expert, within what the user fixed."""
        pair = self.cluster.gpus // groups
        step = self.cluster.gpus_per_node if self.options.whole_nodes else 1
        for ffn in range(step, min(self.costs.num_experts, pair - step) + 1, step):
            attention = pair - ffn
            is_wanted = _fits(self.options.attention_group_size, attention) and _fits(
                self.options.ffn_group_size, ffn
            )
            if attention % step == 0 and is_wanted:
                yield attention, ffn

    def micro_batches(self, groups: int, attention: int) -> Iterator[tuple[int, int]]:
        """(b, n) for M attention ranks: M b n is the batch asked for, or the largest number up to it."""
        wanted = self.workload.sequences(self.cluster.gpus)
        for size, count in self._shares(groups, wanted // attention):
            used = attention * size * count
            if used == wanted or (0 < used < wanted and self.workload.global_batch_size is None):
                yield size, count

    def _shares(self, groups: int, share: int) -> Iterator[tuple[int, int]]:
        """(b, n) to try where an attention rank has `share` sequences; 0 where it has too few."""
        size, count = self.workload.micro_batch_size, self.workload.n_microbatches
        if count is None and size is None and self.workload.fills_pipeline and share:
            count = microbatches_that_fill(share, groups)
        if count is not None:
            yield share // count if size is None else size, count
            return
        powers = [2**i for i in range(MOST_SEQUENCES_A_MICROBATCH.bit_length())]
        for one in powers if size is None else (size,):
            yield one, share // one

    def sides_of_shared_experts(self) -> tuple[bool, ...]:
        """Whether shared experts may run on FFN ranks. A model without any has nothing to choose: attention."""
        if not any(s.parameters or s.forward_flops for s in self.costs.shared):
            return (False,)
        side = self.options.shared_experts_on
        return (False, True) if side is None else (side == "ffn",)

    def layouts(self) -> list[Layout]:
        return [
            Layout(groups, attention, ffn, size, count, side)
            for groups in self.depths()
            for attention, ffn in self.group_sizes(groups)
            for size, count in self.micro_batches(groups, attention)
            for side in self.sides_of_shared_experts()
        ]

    def policies(self, groups: int) -> list[Policy]:
        """In flight: powers of two and p times them up to 8p; 4p keeps all groups busy both ways, 8p halves the stalls. Every
        number up to 4p where micro-batches are those that fill the pipeline, of which there are no more than 8p.
        """
        in_flight = sorted({q for i in range(4) for q in (2**i, groups * 2**i) if q <= 8 * groups})
        if self.workload.fills_pipeline:
            in_flight = list(range(1, 4 * groups + 1))
        shard = (False, True) if self.options.shard_optimizer is None else (self.options.shard_optimizer,)
        sides = [self._may_recompute(role) for role in (Role.ATTENTION, Role.FFN)]
        return [Policy(a, f, s, q) for a, f, s, q in itertools.product(*sides, shard, in_flight)]

    def _may_recompute(self, role: Role) -> tuple[bool, ...]:
        choice = self.options.recompute
        return (False, True) if choice is None else (recomputes(choice, role),)

    def nics_of_groups(self, layout: Layout) -> Iterator[tuple[float, float]]:
        """NICs of an attention and an FFN group: those of their GPUs, or every split into whole ones."""
        share = self.options.nic_share
        if not self.options.free_nics:
            per_gpu = share * self.cluster.nics_per_node / self.cluster.gpus_per_node
            yield layout.attention_group_size * per_gpu, layout.ffn_group_size * per_gpu
            return
        pair = self.nics_of_pair(layout.pipeline_groups)
        for attention in range(1, pair):
            yield attention, pair - attention

    def nics_of_pair(self, groups: int) -> int:
        """Whole NICs that one attention and one FFN group share where they are free."""
        return math.floor(self.options.nic_share * self.cluster.nics / groups)

    @staticmethod
    def go_together(layout: Layout, policy: Policy) -> bool:
        """Two sets of q micro-batches, the second may be short by one."""
        return 2 * policy.in_flight - 1 <= layout.n_microbatches

    @property
    def memory_bytes(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return self.options.usable_memory * self.cluster.gpu.memory_bytes


def _fits(wanted: int | None, size: int) -> bool:
    return wanted is None or wanted == size


def _dedup(value: str) -> Dedup:
    if value not in list(Dedup):
        raise InputError(f"dedup must be one of {', '.join(Dedup)}, got {value!r}")
    return Dedup(value)


def _require_whole(owner: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
