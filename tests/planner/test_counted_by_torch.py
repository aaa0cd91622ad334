"""The closed forms against torch itself on tiny models of transformers: its FLOP counter, and what its autograd saves.

Stated tolerances: matmul FLOPs exactly; core FLOPs exactly once the masked half, which eager attention computes, is added; saved
bytes within 5%, with grouped experts and norms that keep their input alone (as fused ones do).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from torch.utils.flop_counter import FlopCounterMode

from disagmoe_compile.models.config_file import spec_from_config
from disagmoe_compile.models.hf import build
from disagmoe_compile.planner.layer_costs import LINEAR_CORE_CHUNK
from disagmoe_compile.planner.model_spec import Context, ModelSpec
from disagmoe_compile.planner.step_costs import ComponentCosts, ModelCosts, model_costs

SEQ_LENGTH = 64
MATMULS = ("mm", "addmm")


def spec_of(config: Any, name: str) -> ModelSpec:
    return spec_from_config(json.loads(json.dumps(config.to_dict(), default=str)), name=name)


def total(costs: ModelCosts) -> ComponentCosts:
    parts = (*costs.attention, *costs.experts, *costs.shared, costs.head)
    return sum(parts[1:], start=parts[0])


def split_flops(counter: FlopCounterMode) -> tuple[int, int]:
    """Plain matmuls, and the rest: batched ones of an attention core."""
    by_op = {str(op).rpartition(".")[2]: flops for op, flops in counter.get_flop_counts()["Global"].items()}
    matmuls = sum(flops for op, flops in by_op.items() if op in MATMULS)
    return matmuls, by_op.get("bmm", 0) + by_op.get("baddbmm", 0)


@cache
def counted(family: str) -> tuple[ModelSpec, tuple[int, int], tuple[int, int]]:
    """Spec, forward and backward FLOPs (matmuls, core) of one sequence through a model of four layers."""
    model, config = build(family, n_layers=4)
    model.config._attn_implementation = "eager"
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 250, (1, SEQ_LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return spec_of(config, family), split_flops(forward), split_flops(backward)


FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_matmul_flops_of_forward_and_backward_are_those_that_torch_counts(family: str) -> None:
    spec, forward, backward = counted(family)
    costs = total(model_costs(spec, seq_length=SEQ_LENGTH))
    assert costs.forward_flops - costs.core_forward_flops == forward[0]
    assert costs.backward_flops - costs.core_backward_flops == backward[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_core_flops_are_those_that_torch_counts_with_the_masked_half(family: str) -> None:
    spec, forward, backward = counted(family)
    softmax = [layer for layer in spec.layers if layer.context is not Context.LINEAR]
    widths = sum(
        (layer.attention or spec.attention).query_dim + (layer.attention or spec.attention).output_dim
        for layer in softmax
    )
    unmasked = 2 * SEQ_LENGTH**2 * widths
    linear = 0
    if spec.linear is not None:
        shape, chunk = spec.linear, LINEAR_CORE_CHUNK
        key, value = shape.key_head_dim, shape.value_head_dim
        # All of the delta rule but its two triangular solves, which the counter does not know.
        a_head = 4 * chunk * key + 2 * chunk * value + 6 * key * value
        linear = (len(spec.layers) - len(softmax)) * SEQ_LENGTH * shape.value_heads * a_head
    assert forward[1] == unmasked + linear
    if spec.linear is None:
        assert backward[1] == 2 * unmasked  # a flash kernel recomputes the scores: 2.5


def test_the_causal_half_is_what_the_closed_form_counts() -> None:
    spec, forward, _ = counted("qwen3_moe")
    core = total(model_costs(spec, seq_length=SEQ_LENGTH)).core_forward_flops
    assert core == forward[1] * (SEQ_LENGTH + 1) / 2 / SEQ_LENGTH


class InputKeepingNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number a row, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise AssertionError("what is saved for backward is counted; backward itself is not run")


def saved_bytes(family: str, n_layers: int, kv_heads: int) -> tuple[int, Any]:
    model, config = build(family, n_layers=n_layers, n_kv_heads=kv_heads)
    model.config._attn_implementation = "sdpa"
    model.set_experts_implementation("grouped_mm")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, weight=module.weight: InputKeepingNorm.apply(x, weight)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if saved.untyped_storage().data_ptr() not in parameters:
            held[saved.untyped_storage().data_ptr()] = saved
        return saved

    ids = torch.randint(3, 250, (1, SEQ_LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(saved.untyped_storage().nbytes() for saved in held.values()), config


@pytest.mark.parametrize(("family", "kv_heads"), [("qwen3_moe", 2), ("qwen3_moe", 4), ("qwen2_moe", 2)])
def test_activation_bytes_of_a_layer_are_those_that_autograd_saves(family: str, kv_heads: int) -> None:
    """One layer more, so that embedding, head and loss cancel."""
    (two, _), (three, config) = (saved_bytes(family, n_layers, kv_heads) for n_layers in (2, 3))
    costs = model_costs(spec_of(config, family), seq_length=SEQ_LENGTH, element_bytes=4)
    layer = costs.attention[-1] + costs.experts[-1] + costs.shared[-1]
    assert three - two == pytest.approx(layer.activation_bytes, rel=0.05)
