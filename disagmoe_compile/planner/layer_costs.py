"""Closed-form costs of one transformer layer with experts, of one forward pass, in two sets.

`corrected` (the default) is derived from the layer's matmuls, 2 FLOPs a multiply-add:
    attention    2 S (2 H qd + 2 H kvd) + 2 S H E + 4 S ctx qd     projections, router, attention core
    experts      6 S H D (k + shared)                              gated MLP: three matmuls
    ctx = (S + 1) / 2, mean number of keys of a causal query; with a window w < S: (w (w + 1) / 2 + (S - w) w) / S
    qd = heads * head_dim, kvd = kv_heads * head_dim, which differ from H in Qwen3, GPT-OSS, GLM
`paper` is what DisagMoE (arXiv 2605.11005) prints; its projection term counts multiply-adds where its core term counts FLOPs:
    attention    S H^2 (2 + 2 / g) + 4 S^2 H                       g = heads / kv_heads
    experts      4 k S H D
In both, V = element_bytes * S k H: ONE exchange in ONE direction, without de-duplication.

Legend: S tokens of a sequence, H hidden size, D hidden size of an expert, E experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.cost_model import StageCosts


class CostSet(StrEnum):
    CORRECTED = "corrected"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer. `shared_experts` are computed for every token; `window` bounds the keys a query sees."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_hidden: int
    num_experts: int
    top_k: int
    shared_experts: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "expert_hidden", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.top_k > self.num_experts:
            raise InputError(f"top_k {self.top_k} is more than the {self.num_experts} experts")
        if self.shared_experts < 0 or (self.window is not None and self.window < 1):
            raise InputError(
                f"shared_experts must be at least 0 and window at least 1, got {self.shared_experts} and {self.window}"
            )


def layer_costs(
    shape: LayerShape,
    *,
    seq_length: int,
    sequences: int = 1,
    element_bytes: int = 2,
    cost_set: CostSet = CostSet.CORRECTED,
) -> StageCosts:
    """Forward FLOPs and exchange bytes of `sequences` sequences in one layer, experts shared by all of them included."""
    if seq_length < 1 or sequences < 1 or element_bytes < 1:
        raise InputError(
            f"seq_length, sequences and element_bytes must be at least 1, got {seq_length}, {sequences}, {element_bytes}"
        )
    attention, experts = (
        _corrected(shape, seq_length) if cost_set is CostSet.CORRECTED else _paper(shape, seq_length)
    )
    exchange = element_bytes * seq_length * shape.top_k * shape.hidden
    return StageCosts(sequences * attention, sequences * experts, float(sequences * exchange))


def mean_context(seq_length: int, window: int | None) -> float:
    """Mean number of keys that a causal query of a sequence sees, itself included."""
    if window is None or window >= seq_length:
        return (seq_length + 1) / 2
    return (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length


def _corrected(shape: LayerShape, seq_length: int) -> tuple[float, float]:
    query_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = 2 * seq_length * (2 * shape.hidden * query_dim + 2 * shape.hidden * kv_dim)
    router = 2 * seq_length * shape.hidden * shape.num_experts
    core = 4 * seq_length * mean_context(seq_length, shape.window) * query_dim
    active = shape.top_k + shape.shared_experts
    return projections + router + core, 6 * seq_length * shape.hidden * shape.expert_hidden * active


def _paper(shape: LayerShape, seq_length: int) -> tuple[float, float]:
    queries_per_kv = shape.heads / shape.kv_heads
    attention = seq_length * shape.hidden**2 * (2 + 2 / queries_per_kv) + 4 * seq_length**2 * shape.hidden
    return attention, 4 * shape.top_k * seq_length * shape.hidden * shape.expert_hidden
