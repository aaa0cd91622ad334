"""What one sequence of a training step costs in every stage, and what it sends between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from disagmoe_compile.planner.model_spec import ModelSpec


class CostSet(StrEnum):
    """`corrected` is derived from the matmuls; `paper` is what DisagMoE (arXiv 2605.11005) prints."""

    CORRECTED = "corrected"
    PAPER = "paper"


class Dedup(StrEnum):
    """Copies of a token that M2N sends: one an expert, one a rank that holds any of its experts, one a node that does."""

    NONE = "none"
    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class ComponentCosts:
    """One component of one stage, for ONE sequence. FLOPs count 2 a multiply-add; bytes are of the compute data type.

    `parameters`: elements the stage holds, whatever the batch. `forward_flops`, `backward_flops`: all of them, of which
    `core_forward_flops`, `core_backward_flops` run in the attention core (or a linear layer's recurrence) and not in plain matmuls.
    `activation_bytes`: what the forward keeps for its backward; `activation_bytes_recompute`: the same where only the stage's
    inputs are kept and the backward begins with another forward (then add `forward_flops` to the backward).
    """

    parameters: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    core_forward_flops: float = 0.0
    core_backward_flops: float = 0.0
    activation_bytes: float = 0.0
    activation_bytes_recompute: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """All stages of a model for ONE sequence of `seq_length` tokens; entry b of each tuple is MoE boundary b.

    `attention[b]`: everything between the experts of boundary b - 1 and those of b: dense layers, attention, norms, router, and
    the embedding in the first. `experts[b]`: the routed experts. `shared[b]`: shared experts, which may run on either side; in a
    traced model they are part of `attention[b]`. `head`: all after the last experts: dense layers, final norm, head, loss.
    `token_bytes`: one row of the exchange. `residual_bytes_per_token`: what crosses from one attention stage to the next beside.
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

    @property
    def n_boundaries(self) -> int:
        return len(self.experts)


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes of ONE exchange in ONE direction for ONE sequence: through NICs, and over links inside a node."""

    nic: float
    link: float


def model_costs(
    spec: ModelSpec, *, seq_length: int, cost_set: CostSet = CostSet.CORRECTED, element_bytes: int = 2
) -> ModelCosts:
    """Costs of every stage of `spec` from closed forms."""
    raise NotImplementedError


def expected_copies(num_experts: int, top_k: int, destinations: int) -> float:
    """Expected number of distinct destinations of a token whose `top_k` of `num_experts` experts are drawn uniformly.

    Destinations hold experts as evenly as possible (their numbers differ by one at most); exact: the sum over destinations of
    1 - C(E - e_d, k) / C(E, k), which is N (1 - C(E - E/N, k) / C(E, k)) where N divides E.
    """
    raise NotImplementedError


def exchange_bytes(costs: ModelCosts, dedup: Dedup, *, ffn_ranks: int, ranks_per_node: int) -> ExchangeBytes:
    """Bytes one exchange in one direction moves for one sequence, with the F-group on nodes of its own."""
    raise NotImplementedError


def grouped_gemm_efficiency(
    rows_per_expert: float,
    *,
    tile_rows: int = 128,
    ridge_flops_per_byte: float,
    element_bytes: int = 2,
) -> float:
    """Share (0 to 1] of a large matmul's speed that a grouped matmul reaches with so few rows an expert."""
    raise NotImplementedError
