"""Closed forms against counts made another way: torch's FLOP counter and a walk over (query, key) pairs."""

from __future__ import annotations

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.layer_costs import CostSet, LayerShape, layer_costs, mean_context

SHAPE = LayerShape(
    hidden=48, heads=6, kv_heads=2, head_dim=16, expert_hidden=32, num_experts=8, top_k=2, shared_experts=1
)


def counted_flops(shape: LayerShape, tokens: int) -> tuple[int, int]:
    """FLOPs of the matmuls of a layer but for the attention core, as torch counts them on meta tensors."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x_TH = torch.empty(tokens, shape.hidden, device="meta")
    query_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    with FlopCounterMode(display=False) as attention:
        for width in (query_dim, kv_dim, kv_dim):
            x_TH @ torch.empty(shape.hidden, width, device="meta")
        torch.empty(tokens, query_dim, device="meta") @ torch.empty(query_dim, shape.hidden, device="meta")
        x_TH @ torch.empty(shape.hidden, shape.num_experts, device="meta")
    with FlopCounterMode(display=False) as experts:
        for _ in range(shape.top_k + shape.shared_experts):
            up = x_TH @ torch.empty(shape.hidden, shape.expert_hidden, device="meta")
            gate = x_TH @ torch.empty(shape.hidden, shape.expert_hidden, device="meta")
            (up * gate) @ torch.empty(shape.expert_hidden, shape.hidden, device="meta")
    return attention.get_total_flops(), experts.get_total_flops()


def keys_seen(seq_length: int, window: int | None) -> int:
    return sum(
        1 for query in range(seq_length) for key in range(query + 1) if window is None or query - key < window
    )


def test_corrected_costs_equal_what_torch_counts() -> None:
    tokens = 24
    costs = layer_costs(SHAPE, seq_length=tokens)
    attention, experts = counted_flops(SHAPE, tokens)
    core = 2 * 2 * keys_seen(tokens, None) * SHAPE.heads * SHAPE.head_dim  # QK^T and PV
    assert costs.attention_flops == attention + core
    assert costs.ffn_flops == experts


@pytest.mark.parametrize(("seq_length", "window"), [(7, None), (7, 3), (7, 7), (7, 100), (1, 1)])
def test_mean_context_counts_pairs(seq_length: int, window: int | None) -> None:
    assert mean_context(seq_length, window) * seq_length == pytest.approx(keys_seen(seq_length, window))


def test_exchange_is_one_direction_without_de_duplication() -> None:
    assert (
        layer_costs(SHAPE, seq_length=10, sequences=3).exchange_bytes == 2 * 30 * SHAPE.top_k * SHAPE.hidden
    )


def test_the_papers_intensities_come_out_of_its_costs() -> None:
    # I_attn = (H (2 + 2/g) + 4 S) / (2 k) and I_ffn = 2 D_e, as printed.
    s, g = 4096, SHAPE.heads / SHAPE.kv_heads
    costs = layer_costs(SHAPE, seq_length=s, cost_set=CostSet.PAPER)
    assert costs.attention_flops / costs.exchange_bytes == pytest.approx(
        (SHAPE.hidden * (2 + 2 / g) + 4 * s) / (2 * SHAPE.top_k)
    )
    assert costs.ffn_flops / costs.exchange_bytes == pytest.approx(2 * SHAPE.expert_hidden)


def test_sequences_scale_every_cost() -> None:
    one, five = (layer_costs(SHAPE, seq_length=64, sequences=n) for n in (1, 5))
    assert five == one + one + one + one + one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden"),
        ({"heads": 5}, "5 heads cannot share 2"),
        ({"top_k": 9}, "top_k 9 is more than the 8 experts"),
        ({"window": 0}, "window"),
        ({"shared_experts": -1}, "shared_experts"),
    ],
)
def test_an_impossible_layer_is_refused(change: dict[str, int], message: str) -> None:
    import dataclasses

    with pytest.raises(InputError, match=message):
        dataclasses.replace(SHAPE, **change)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1, got 0"):
        layer_costs(SHAPE, seq_length=0)
