"""Costs counted on a traced model's stages: equal to the closed forms where there are any, and exact about causal attention."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from disagmoe_compile.backend.model_costs import traced_costs
from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.models.config_file import spec_from_config
from disagmoe_compile.models.hf import build
from disagmoe_compile.passes.stage_flops import core_flops, fake_tensors, flop_counter
from disagmoe_compile.planner.step_costs import ModelCosts, model_costs
from disagmoe_compile.testing.virtual import capture_call

SAMPLES, TOKENS = 4, 32


@pytest.fixture(scope="module")
def both() -> tuple[ModelCosts, ModelCosts, int]:
    """Counted, by closed forms, and the model's number of parameters."""
    model, config = build("qwen3_moe", n_layers=2)
    ids = torch.randint(3, 250, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    call = capture_call(model, {"input_ids": ids, "labels": ids.clone()})
    counted = traced_costs(call.partition.programs, call.captured.sizes(call.arguments))
    spec = spec_from_config(json.loads(json.dumps(config.to_dict(), default=str)), name="tiny")
    formulas = model_costs(spec, seq_length=TOKENS, element_bytes=4)
    return counted, formulas, sum(p.numel() for p in model.parameters())


def test_flops_of_every_stage_are_those_of_the_closed_forms(both: tuple[ModelCosts, ModelCosts, int]) -> None:
    counted, formulas, _ = both
    for ours, theirs in zip(
        (*counted.attention, *counted.experts, counted.head),
        (*formulas.attention, *formulas.experts, formulas.head),
    ):
        assert ours.forward_flops == theirs.forward_flops
        assert ours.backward_flops == theirs.backward_flops
        assert ours.core_forward_flops == theirs.core_forward_flops
        assert ours.core_backward_flops == theirs.core_backward_flops


def test_parameters_are_counted_once(both: tuple[ModelCosts, ModelCosts, int]) -> None:
    counted, formulas, n_parameters = both
    assert counted.parameters == formulas.parameters == n_parameters


def test_a_row_of_the_exchange_and_the_residual(both: tuple[ModelCosts, ModelCosts, int]) -> None:
    counted, formulas, _ = both
    for name in (
        "seq_length",
        "token_bytes",
        "residual_bytes_per_token",
        "num_experts",
        "top_k",
        "element_bytes",
    ):
        assert getattr(counted, name) == getattr(formulas, name)


def test_saved_bytes_of_the_experts_agree_and_unfused_norms_add_to_attention(
    both: tuple[ModelCosts, ModelCosts, int],
) -> None:
    counted, formulas, _ = both
    assert counted.experts[0].activation_bytes == pytest.approx(
        formulas.experts[0].activation_bytes, rel=0.01
    )
    ratio = counted.attention[1].activation_bytes / formulas.attention[1].activation_bytes
    assert 1 < ratio < 1.5
    assert counted.attention[1].activation_bytes_recompute == formulas.attention[1].activation_bytes_recompute


@pytest.mark.parametrize("causal", [True, False])
def test_attention_on_fake_cpu_tensors_is_counted_without_its_masked_half(causal: bool) -> None:
    """torch's own counter knows no CPU kernel of fused attention: it counts nothing."""
    batch, heads, length, width = 2, 3, 8, 16
    with FakeTensorMode():
        q, k, v = (torch.empty(batch, heads, length, width, requires_grad=True) for _ in range(3))
        with flop_counter() as forward:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with flop_counter() as backward:
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    pairs = length * (length + 1) / 2 if causal else length**2
    assert forward.get_total_flops() == core_flops(forward) == 4 * batch * heads * pairs * width
    assert backward.get_total_flops() == core_flops(backward) == 2.5 * forward.get_total_flops()


def test_a_model_without_a_loss_has_no_backward() -> None:
    model = build("mixtral", n_layers=1)[0].eval()
    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        call = capture_call(model, {"input_ids": ids})
    counted = traced_costs(call.partition.programs, call.captured.sizes(call.arguments))
    assert counted.experts[0].forward_flops == 16 * 2 * 6 * 64 * 32
    assert math.isclose(
        sum(part.backward_flops for part in (*counted.attention, *counted.experts, counted.head)), 0
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_is_counted_in_the_mode_it_runs_in(mode) -> None:
    model = build("mixtral", n_layers=1)[0].eval()
    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    with mode():
        call = capture_call(model, {"input_ids": ids, "labels": ids})
        counted = traced_costs(call.partition.programs, call.captured.sizes(call.arguments))
        assert not torch.is_grad_enabled() and torch.is_inference_mode_enabled() == (
            mode is torch.inference_mode
        )
    assert counted.experts[0].forward_flops == 16 * 2 * 6 * 64 * 32
    assert counted.experts[0].backward_flops == counted.experts[0].activation_bytes == 0


def test_a_size_that_data_decides_and_counting_needs_is_named_by_line():
    def pads(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, torch.nonzero(x).shape[0]))

    module = torch.fx.symbolic_trace(pads)
    (found,) = module.graph.find_nodes(op="call_function", target=torch.nonzero)
    with FakeTensorMode(shape_env=ShapeEnv()):
        found.meta["example_value"] = torch.nonzero(torch.ones(4))
    message = r"`nonzero` .*depends on the values of a tensor"
    with pytest.raises(UnsupportedModelError, match=message), fake_tensors(module):
        module(torch.ones(4))
    with pytest.raises(RuntimeError, match="of another kind"), fake_tensors(module.forward):
        raise RuntimeError("of another kind")
