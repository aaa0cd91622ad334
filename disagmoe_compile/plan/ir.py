"""The plan: what every rank computes, what moves between them, and in which order. Frozen data, no torch.

Stages alternate: stage 2b is the attention part before MoE boundary b, stage 2b+1 the experts of boundary b, the last one the
head (final norm, logits, loss). Boundaries count MoE regions; dense layers belong to the attention stage they precede.

Transfers of boundary b, named by it:
    dispatch.b      2b   -> 2b+1   one row per (token, destination rank), with that rank's (row, expert, weight) pairs
    combine.b       2b+1 -> 2b+2   one pre-summed row per (token, rank)
    residual.b      2b   -> 2b+2   what attention hands on past the experts; only where the two stages are on different groups
and, mirrored, the gradients: combine_bwd.b, dispatch_bwd.b, residual_bwd.b. `grads.s` sums the gradients that attention stage s
owns over the replicas of its group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from disagmoe_compile.plan.action import Action
from disagmoe_compile.plan.recompute import recomputes
from disagmoe_compile.plan.shares import fair_share, samples_of
from disagmoe_compile.plan.topology import Group, Role, Topology

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TransferKind(StrEnum):
    DISPATCH = "dispatch"
    COMBINE = "combine"
    P2P = "p2p"
    COLLECTIVE = "collective"


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Splits(StrEnum):
    """STATIC: a message has the size of its spec, or that of its micro-batch where it is smaller than the largest. ROUTED: sizes
    follow the routing of this step.
    """

    STATIC = "static"
    ROUTED = "routed"


@dataclass(frozen=True, slots=True)
class TokenDim:
    """A dimension whose size the routing decides each step: `rows` (tokens sent to a rank) or `pairs` (token, expert)."""

    name: str
    upper_bound: int

    def __post_init__(self) -> None:
        if self.upper_bound < 0:
            raise ValueError(f"upper bound of {self.name} must not be negative, got {self.upper_bound}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one micro-batch (the largest, where they differ) on one rank; for ROUTED transfers, of one message between
    two ranks.
    """

    name: str
    shape: tuple[int | TokenDim, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r} of {self.name}; one of {', '.join(DTYPE_BYTES)}")

    def nbytes(self, sizes: Mapping[str, int] | None = None) -> int:
        """Bytes with token dimensions replaced by `sizes`, or at their upper bound where `sizes` is None."""
        dims = [
            d if isinstance(d, int) else d.upper_bound if sizes is None else sizes[d.name] for d in self.shape
        ]
        return math.prod(dims) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Stage:
    """`param_fqns` are the parameters this stage uses. Expert parameters hold the experts one after another in dim 0 and are
    sharded over the F-group by expert, except those of `expert_of`, which belong to one expert each (fqn -> expert) and live
    whole on its rank.

    `owned_fqns`: those whose gradients this stage reduces; a parameter shared by stages of one group is owned by its lowest.
    FLOPs and bytes are of one micro-batch on one rank (experts: of the whole group, as routing decides the share).
    `activation_bytes` is what it keeps for its backward, from F on; `second_forward_bytes` what it makes beside that once its
    backward begins, where the plan recomputes it. A stage compiler that recomputes pointwise operations keeps less.
    """

    index: int
    role: Role
    layers: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    param_fqns: tuple[str, ...]
    owned_fqns: tuple[str, ...] = ()
    num_experts: int | None = None
    forward_flops: int = 0
    activation_bytes: int = 0
    second_forward_bytes: int = 0
    expert_of: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.role is Role.FFN) != bool(self.index % 2):
            raise ValueError(f"stages alternate: stage {self.index} cannot be {self.role}")
        if (self.role is Role.FFN) != (self.num_experts is not None):
            raise ValueError(
                f"expert stages, and only they, have experts: stage {self.index}, {self.num_experts}"
            )
        if not set(self.owned_fqns) <= set(self.param_fqns):
            raise ValueError(f"stage {self.index} owns parameters that it does not use")
        if not set(self.expert_of) <= set(self.param_fqns):
            raise ValueError(f"stage {self.index} gives experts parameters that it does not use")
        strays = [expert for expert in self.expert_of.values() if not 0 <= expert < (self.num_experts or 0)]
        if strays:
            raise ValueError(
                f"stage {self.index} has {self.num_experts or 0} experts, but a parameter of expert {strays[0]}"
            )

    @property
    def name(self) -> str:
        """`A0`, `F0`, `A1`, ...; the head is the last A."""
        return f"{'F' if self.role is Role.FFN else 'A'}{self.index // 2}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """`src` and `dst` are stage indices. Payload sizes are per message from one source rank to one destination rank."""

    name: str
    kind: TransferKind
    direction: Direction
    src: int
    dst: int
    payload: tuple[TensorSpec, ...]
    splits: Splits
    backward_of: str | None = None

    def __post_init__(self) -> None:
        if (self.direction is Direction.BACKWARD) != (self.backward_of is not None):
            raise ValueError(
                f"backward transfers, and only they, mirror a forward one: {self.name}, {self.backward_of}"
            )
        if (self.kind is TransferKind.COLLECTIVE) != (self.src == self.dst):
            raise ValueError(
                f"only a collective stays inside its stage: {self.name} from {self.src} to {self.dst}"
            )

    def nbytes(self, sizes: Mapping[str, int] | None = None) -> int:
        """Bytes of one message; see TensorSpec.nbytes."""
        return sum(spec.nbytes(sizes) for spec in self.payload)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per worker group its actions in host order. All ranks of a group run the same list; sizes differ, order does not.

    Compute-only schedules hold F, B, I, W (and OVERLAP of these); lowering adds the rest.
    """

    name: str
    lowered: bool
    actions: Mapping[Group, tuple[Action, ...]]

    def of(self, group: Group) -> tuple[Action, ...]:
        return self.actions[group]


@dataclass(frozen=True, slots=True)
class Workload:
    """`global_batch_size` samples a call; each attention rank takes at most `microbatch_size` of them `n_microbatches` times.

    Where the batch does not divide, micro-batches differ by one sample, and some have none: `Plan.samples_of`.
    """

    global_batch_size: int
    n_microbatches: int
    microbatch_size: int
    tokens_per_sample: int

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "n_microbatches", "microbatch_size", "tokens_per_sample"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the runtime, the simulator and inspection need. `training` is None for a graph without gradients.

    `forward_only` runs the forward alone (eval, no_grad). `resident_limit` bounds, per group, how many (stage, micro-batch)
    activations may be held at once; validation counts them. `graph_fingerprint` identifies the captured graph and the passes
    that transformed it; `fingerprint` the whole plan.
    """

    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    topology: Topology
    workload: Workload
    training: Schedule | None
    forward_only: Schedule
    resident_limit: int
    graph_fingerprint: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def transfer(self, name: str) -> Transfer:
        for transfer in self.transfers:
            if transfer.name == name:
                return transfer
        raise KeyError(
            f"no transfer {name!r} in the plan; it has {', '.join(t.name for t in self.transfers)}"
        )

    def samples_of(self, member: int, microbatch: int) -> range:
        """Samples of the global batch that member `member` of each attention group takes in this micro-batch; maybe none."""
        n = self.workload.n_microbatches
        members = self.topology.attention_group_size
        return samples_of(self.workload.global_batch_size, members, n, member, microbatch)

    def share_of(self, member: int) -> range:
        """Samples that member `member` of each attention group takes in all micro-batches together."""
        return fair_share(self.workload.global_batch_size, self.topology.attention_group_size, member)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Sizes that occur besides 0, the largest first: one or two."""
        members, n = self.topology.attention_group_size, self.workload.n_microbatches
        sizes = {len(self.samples_of(member, i)) for member in range(members) for i in range(n)}
        return tuple(sorted(sizes - {0}, reverse=True))

    def recomputes(self, role: Role) -> bool:
        """Whether stages of this role keep only their inputs and run their forward again in the backward."""
        return recomputes(self.options.get("recompute", "none"), role)

    @property
    def mean_fill(self) -> float:
        """Samples of the mean micro-batch over those of the largest, which stages and transfers have; 1 where all are equal."""
        workload, members = self.workload, self.topology.attention_group_size
        return workload.global_batch_size / (members * workload.n_microbatches * workload.microbatch_size)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of the serialised plan."""
        from disagmoe_compile.plan.serialize import to_dict

        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()[:16]
