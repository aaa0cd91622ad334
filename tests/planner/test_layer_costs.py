"""Closed forms of a layer against counts made another way: a walk over (query, key) pairs, weights times tokens, the paper."""

from __future__ import annotations

import pytest
from specs import EVERY_KIND, MLA, spec

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.layer_costs import (
    CostSet,
    SequenceWork,
    active_parameters,
    attention_block,
    dense_block,
    mean_context,
    routed_experts,
    router_block,
    shared_experts,
    total_parameters,
)
from disagmoe_compile.planner.model_spec import ActiveConvention, Context, LayerSpec, ModelSpec

FULL = LayerSpec()


def keys_seen(seq_length: int, window: int | None = None, chunk: int | None = None) -> int:
    return sum(
        1
        for query in range(seq_length)
        for key in range(query + 1)
        if (window is None or query - key < window) and (chunk is None or query // chunk == key // chunk)
    )


@pytest.mark.parametrize(("seq_length", "window"), [(7, None), (7, 3), (7, 7), (7, 100), (1, 1)])
def test_mean_context_of_a_window_counts_pairs(seq_length: int, window: int | None) -> None:
    mean = mean_context(seq_length, Context.SLIDING, window=window)
    assert mean * seq_length == pytest.approx(keys_seen(seq_length, window))


@pytest.mark.parametrize(("seq_length", "chunk"), [(7, 3), (9, 3), (7, 7), (7, 100), (1, 1)])
def test_mean_context_of_chunks_counts_pairs(seq_length: int, chunk: int) -> None:
    mean = mean_context(seq_length, Context.CHUNKED, chunk=chunk)
    assert mean * seq_length == pytest.approx(keys_seen(seq_length, chunk=chunk))


def test_only_layers_of_that_context_are_limited() -> None:
    assert mean_context(64, Context.FULL, window=8, chunk=8) == mean_context(64)
    narrow, wide = (
        attention_block(EVERY_KIND["sliding"], LayerSpec(context), SequenceWork(64)).core_forward_flops
        for context in (Context.SLIDING, Context.FULL)
    )
    assert narrow == pytest.approx(wide * keys_seen(64, 8) / keys_seen(64))


def test_the_core_costs_two_matmuls_a_pair() -> None:
    small, tokens = spec(), 24
    assert (
        attention_block(small, FULL, SequenceWork(tokens)).core_forward_flops
        == 2 * 2 * keys_seen(tokens) * 96
    )
    latent = attention_block(spec(attention=MLA), FULL, SequenceWork(tokens)).core_forward_flops
    assert latent == 2 * keys_seen(tokens) * 4 * (24 + 12)  # scores over 24 elements a head, values of 12


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_weight_of_a_matmul_costs_two_flops_a_token(kind: str) -> None:
    """But for norms, biases, convolution and sinks, which are no matmuls, all weights of a layer are used once a token."""
    model, tokens = EVERY_KIND[kind], 16
    work = SequenceWork(tokens)
    for layer in model.layers:
        part = attention_block(model, layer, work)
        no_matmul = model.hidden
        if layer.context is Context.LINEAR:
            assert model.linear is not None
            mixed = 2 * model.linear.key_dim + model.linear.value_dim
            no_matmul += 4 * mixed + 2 * model.linear.value_heads + model.linear.value_head_dim
        matmul_flops = part.forward_flops - part.core_forward_flops
        assert matmul_flops == 2 * tokens * (part.parameters - no_matmul)
    assert router_block(model, work).forward_flops == 2 * tokens * model.hidden * model.num_experts
    matrices = 3 if model.gated_mlp else 2
    assert routed_experts(model, work).forward_flops == 2 * tokens * matrices * 2 * 48 * 32


def test_the_paper_intensities_come_out_of_its_costs() -> None:
    """I_attn = (H (2 + 2/g) + 4 S) / (2 k) and I_ffn = 2 D_e, as printed."""
    model, s, g = spec(), 4096, 3
    work = SequenceWork(s, cost_set=CostSet.PAPER)
    exchange_bytes = 2 * s * model.top_k * model.hidden
    attention, router = attention_block(model, FULL, work), router_block(model, work)
    assert (attention.forward_flops + router.forward_flops) / exchange_bytes == pytest.approx(
        (model.hidden * (2 + 2 / g) + 4 * s) / (2 * model.top_k)
    )
    assert routed_experts(model, work).forward_flops / exchange_bytes == pytest.approx(
        2 * model.expert_hidden
    )


def test_backward_is_twice_the_matmuls_and_two_and_a_half_cores() -> None:
    part = attention_block(spec(), FULL, SequenceWork(32))
    matmuls = part.forward_flops - part.core_forward_flops
    assert part.core_backward_flops == 2.5 * part.core_forward_flops
    assert part.backward_flops == 2 * matmuls + part.core_backward_flops


def test_a_gate_is_a_third_matmul() -> None:
    work = SequenceWork(8)
    gated, plain = (dense_block(spec(dense_hidden=96, gated_mlp=g), work) for g in (True, False))
    assert gated.forward_flops == 1.5 * plain.forward_flops
    assert gated.parameters - 48 == 1.5 * (plain.parameters - 48)


def test_a_model_without_shared_experts_pays_nothing_for_them() -> None:
    assert shared_experts(spec(), SequenceWork(8)).parameters == 0
    assert shared_experts(spec(), SequenceWork(8)).forward_flops == 0


def counted_by_hand(model: ModelSpec) -> int:
    h, d, e = model.hidden, model.expert_hidden, model.num_experts
    attention = h * 96 + 2 * h * 32 + 96 * h
    return model.n_layers * (2 * h + attention + e * h + e * 3 * h * d) + 2 * model.vocab * h + h


def test_total_parameters_by_hand_and_active_ones_by_convention() -> None:
    model = spec()
    assert total_parameters(model) == counted_by_hand(model)
    everything = active_parameters(model, ActiveConvention.ALL)
    assert total_parameters(model) - everything == 2 * 6 * 3 * 48 * 32  # six idle experts in two layers
    assert everything - active_parameters(model, ActiveConvention.NO_INPUT_EMBEDDING) == 4800
    assert everything - active_parameters(model, ActiveConvention.NO_EMBEDDINGS) == 9600


def test_a_tied_embedding_is_counted_once_and_is_active_as_the_head() -> None:
    tied = EVERY_KIND["tied"]
    assert total_parameters(spec()) - total_parameters(tied) == 4800
    assert active_parameters(tied, ActiveConvention.NO_INPUT_EMBEDDING) == active_parameters(
        tied, ActiveConvention.ALL
    )


@pytest.mark.parametrize("name", ["seq_length", "element_bytes"])
def test_an_empty_sequence_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 1, got 0"):
        SequenceWork(**{"seq_length": 8, name: 0})
