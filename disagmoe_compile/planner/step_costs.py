"""What one sequence of a training step costs in every stage, and what it sends between them.

    model_costs(spec) ──┐                       closed forms, `layer_costs.py`
                        ├──> ModelCosts ──> the planner
    a traced graph ─────┘                       counted, `backend/model_costs.py`

Stages are those of the compiled model: attention stage b holds everything between the experts of MoE boundary b - 1 and those of
b. Layers without experts belong to the attention stage that follows them, after the last experts to the head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.layer_costs import (
    ComponentCosts,
    CostSet,
    SequenceWork,
    attention_block,
    dense_block,
    embedding,
    head,
    routed_experts,
    router_block,
    shared_experts,
)
from disagmoe_compile.planner.model_spec import ModelSpec

__all__ = [
    "ComponentCosts",
    "CostSet",
    "Dedup",
    "ExchangeBytes",
    "ModelCosts",
    "copies_to_shares",
    "even_shares",
    "exchange_bytes",
    "expected_copies",
    "grouped_gemm_efficiency",
    "model_costs",
    "with_recompute",
]


class Dedup(StrEnum):
    """Copies of a token that M2N sends: one an expert, one a rank that holds any of its experts, one a node that does."""

    NONE = "none"
    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """All stages of a model for ONE sequence of `seq_length` tokens; entry b of each tuple is MoE boundary b.

    `attention[b]`: everything between the experts of boundary b - 1 and those of b: dense layers, attention, norms, router, and
    the embedding in the first. `experts[b]`: the routed experts. `shared[b]`: shared experts, which may run on either side; in a
    traced model they are part of `attention[b]`. `head`: all after the last experts: dense layers, final norm, head, loss.
    `token_bytes`: one row of the exchange. `residual_bytes_per_token`: what crosses from one attention stage to the next beside;
    the closed forms say one row, while a traced model with shared experts hands on their output apart, which makes two.
    """

    name: str
    seq_length: int
    cost_set: CostSet
    element_bytes: int
    attention: tuple[ComponentCosts, ...]
    experts: tuple[ComponentCosts, ...]
    shared: tuple[ComponentCosts, ...]
    head: ComponentCosts
    token_bytes: int
    residual_bytes_per_token: int
    num_experts: int
    top_k: int
    tied_embeddings: bool

    def __post_init__(self) -> None:
        assert len(self.attention) == len(self.experts) == len(self.shared) > 0, "one entry a boundary"

    @property
    def n_boundaries(self) -> int:
        return len(self.experts)

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(part.parameters for part in (*self.attention, *self.experts, *self.shared, self.head))


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes of ONE exchange in ONE direction for ONE sequence: through NICs, and over links inside a node of the experts."""

    nic: float
    link: float


def model_costs(
    spec: ModelSpec, *, seq_length: int, cost_set: CostSet = CostSet.CORRECTED, element_bytes: int = 2
) -> ModelCosts:
    """Costs of every stage of `spec` from the closed forms of `layer_costs.py`. Raises InputError for a length below 1.

    With recompute an attention stage keeps its inputs: the residual stream and the experts' summed output, 2 H a token, the first
    stage token numbers. Ours. The second forward is taken to make everything anew; a traced model is counted.
    """
    work = SequenceWork(seq_length, element_bytes, cost_set)
    stage_inputs = ComponentCosts(activation_bytes_recompute=work.bytes_of(2 * spec.hidden))
    stages: list[ComponentCosts] = []
    current = embedding(spec, work)
    for layer in spec.layers:
        current += attention_block(spec, layer, work)
        if layer.has_experts:
            stages.append(current + router_block(spec, work))
            current = stage_inputs
        else:
            current += dense_block(spec, work)
    return ModelCosts(
        name=spec.name,
        seq_length=seq_length,
        cost_set=cost_set,
        element_bytes=element_bytes,
        attention=tuple(map(_made_again, stages)),
        experts=(_made_again(routed_experts(spec, work)),) * len(stages),
        shared=(_made_again(shared_experts(spec, work)),) * len(stages),
        head=_made_again(current + head(spec, work)),
        token_bytes=spec.hidden * element_bytes,
        residual_bytes_per_token=spec.hidden * element_bytes,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        tied_embeddings=spec.tied_embeddings,
    )


def _made_again(costs: ComponentCosts) -> ComponentCosts:
    return replace(costs, second_forward_bytes=costs.activation_bytes)


def with_recompute(costs: ComponentCosts, *, recompute: bool) -> ComponentCosts:
    """`costs` with recompute decided: the backward includes the second forward, and the activation bytes are the kept ones."""
    if not recompute:
        return costs
    return replace(
        costs,
        backward_flops=costs.backward_flops + costs.forward_flops,
        core_backward_flops=costs.core_backward_flops + costs.core_forward_flops,
        activation_bytes=costs.activation_bytes_recompute,
    )


def expected_copies(num_experts: int, top_k: int, destinations: int) -> float:
    """Expected number of distinct destinations of a token whose `top_k` of `num_experts` experts are drawn uniformly.

    Destinations hold experts as evenly as possible: their numbers differ by one at most. Where N divides E it is the known
    N (1 - C(E - E/N, k) / C(E, k)). Real routers are not uniform: those that choose groups of experts first (DeepSeek-V2, V3)
    send fewer copies to nodes. Raises InputError where a destination would hold no expert.
    """
    if not 1 <= destinations <= num_experts or not 1 <= top_k <= num_experts:
        raise InputError(
            f"{top_k} of {num_experts} experts on {destinations} destinations: each destination needs an expert, and a token "
            f"from 1 to {num_experts}"
        )
    return copies_to_shares(top_k, even_shares(num_experts, destinations))


def even_shares(num_experts: int, ranks: int) -> list[int]:
    """Experts of each rank, the larger shares first."""
    small, larger = divmod(num_experts, ranks)
    return [small + (rank < larger) for rank in range(ranks)]


def copies_to_shares(top_k: int, shares: Sequence[int]) -> float:
    """The same where destination d holds `shares[d]` experts: the sum over d of 1 - C(E - shares[d], k) / C(E, k). Ours."""
    experts = sum(shares)
    all_choices = math.comb(experts, top_k)
    return sum(
        count * (1 - math.comb(experts - share, top_k) / all_choices)
        for share, count in Counter(shares).items()
    )


def exchange_bytes(costs: ModelCosts, dedup: Dedup, *, ffn_ranks: int, ranks_per_node: int) -> ExchangeBytes:
    """Bytes one exchange moves in one direction for one sequence, with the F-group on nodes of its own. Ours.

        none   k rows a token through NICs (the paper's V)
        rank   a row for each distinct rank, through NICs
        node   a row for each distinct node through NICs, to a rank there that needs it; from there a row to each other rank
               that does, over links. On the way back ranks of a node sum their rows first, so the bytes are the same.
    Ranks hold experts as evenly as possible and nodes `ranks_per_node` ranks, the last may have fewer. Routing numbers and
    weights, k times 8 bytes a token, are not counted. Raises InputError where a rank would hold no expert.
    """
    if ffn_ranks < 1 or ranks_per_node < 1:
        raise InputError(
            f"ffn_ranks and ranks_per_node must be at least 1, got {ffn_ranks} and {ranks_per_node}"
        )
    row_bytes = float(costs.token_bytes * costs.seq_length)
    if dedup is Dedup.NONE:
        return ExchangeBytes(nic=costs.top_k * row_bytes, link=0.0)
    ranks = expected_copies(costs.num_experts, costs.top_k, ffn_ranks)
    if dedup is Dedup.RANK:
        return ExchangeBytes(nic=ranks * row_bytes, link=0.0)
    shares = even_shares(costs.num_experts, ffn_ranks)
    shares_of_nodes = [sum(shares[i : i + ranks_per_node]) for i in range(0, ffn_ranks, ranks_per_node)]
    nodes = copies_to_shares(costs.top_k, shares_of_nodes)
    return ExchangeBytes(nic=nodes * row_bytes, link=max(0.0, ranks - nodes) * row_bytes)


def grouped_gemm_efficiency(
    rows_per_expert: float,
    *,
    ridge_flops_per_byte: float,
    tile_rows: int = 128,
    element_bytes: int = 2,
) -> float:
    """Share (0 to 1) of a large matmul's speed that a grouped matmul reaches with `rows_per_expert` rows an expert. ASSUMED.

        min( r / (r + tile_rows / 2),  r (2 / element_bytes) / ridge_flops_per_byte )

    Ours, not measured. First term: an expert's rows are padded to whole tiles, and with random routing half a tile is empty on
    average; kernels work on 128 rows (vLLM's `BatchedDeepGemmExperts`: "The Deep Gemm kernels only support block size of 128").
    Second: with few rows the time is that of reading the weights once, and r rows do 2 r FLOPs an element of `element_bytes`.
    `ridge_flops_per_byte`: achieved FLOP/s over achieved bytes/s of the GPU's memory, where a large matmul turns compute-bound.
    The cluster's `gemm` efficiency is to be multiplied by it.
    """
    if not (rows_per_expert > 0 and ridge_flops_per_byte > 0 and tile_rows >= 0 and element_bytes > 0):
        raise InputError(
            f"rows_per_expert and ridge_flops_per_byte must be positive, got {rows_per_expert!r} and {ridge_flops_per_byte!r}"
        )
    padding = rows_per_expert / (rows_per_expert + tile_rows / 2)
    weight_reading = rows_per_expert * 2 / element_bytes / ridge_flops_per_byte
    return min(padding, weight_reading)
