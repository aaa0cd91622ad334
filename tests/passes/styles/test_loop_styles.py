"""Whole models whose experts are unrolled loops: any split of ranks equals eager, and the function of an expert is the expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models import styles
from disagmoe_compile.testing.parity import Reference, assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, capture_call, run_captured

EXPERTS, WIDTH = 5, 16
STYLES = (
    "masked_loop",
    "where_loop",
    "weights_before",
    "module_list",
    "module_list_plain",
    "meaningless_names",
)
N_LAYERS = {"module_list": 2}
# attention ranks, FFN ranks, micro-batches, pipeline groups
SPLITS = [(1, 1, 1, 1), (1, 2, 2, 1), (2, 3, 1, 1), (1, 4, 1, 1), (1, 2, 2, 2)]


@dataclass(frozen=True)
class Traced:
    model: nn.Module
    call: CapturedCall
    reference: Reference


@cache
def traced(style: str) -> Traced:
    model = styles.build(
        style, n_layers=N_LAYERS.get(style, 1), num_experts=EXPERTS, hidden=WIDTH, expert_hidden=12, vocab=32
    )
    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample in range(4):
        labels[sample, : sample + 1] = -100
    batch = {"input_ids": ids, "labels": labels}
    return Traced(model, capture_call(model, batch), eager_reference(model, **batch))


def run(style: str, split: tuple[int, int, int, int]) -> None:
    found = traced(style)
    assert [e.style for e in found.call.partition.programs.experts] == ["expert_loop"] * N_LAYERS.get(
        style, 1
    )
    attention, ffn, n_microbatches, groups = split
    result = run_captured(
        found.call,
        attention_group_size=attention,
        ffn_group_size=ffn,
        n_microbatches=n_microbatches,
        pipeline_groups=groups,
    )
    assert_parity(result.loss, result.gradients, found.reference)


@pytest.mark.parametrize("style", STYLES)
def test_two_ffn_ranks_and_two_micro_batches_equal_eager(style):
    run(style, (1, 2, 2, 1))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_separate_parameters_equal_eager_however_ranks_are_split(split):
    run("module_list", split)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("split", SPLITS[:4], ids=str)
def test_every_style_equals_eager_however_ranks_are_split(style, split):
    run(style, split)


def expert_of(style: str, model: nn.Module, e: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Expert e of the first layer, as the model computes it, with its weight."""
    if style == "meaningless_names":
        return lambda x, w: model.b[0].e[e](x) * w[:, None]
    moe = model.blocks[0].moe
    if style in ("module_list", "module_list_plain"):
        return lambda x, w: moe.experts[e](x) * w[:, None]
    if style == "masked_loop":
        return lambda x, w: F.relu(x @ moe.w1[e]) @ moe.w2[e] * w[:, None]

    def gated(x: Tensor) -> Tensor:
        gate, up = (x @ moe.gate_up[e].T).chunk(2, -1)
        return F.silu(gate) * up @ moe.down[e].T

    return (
        (lambda x, w: gated(x * w[:, None]))
        if style == "weights_before"
        else (lambda x, w: gated(x) * w[:, None])
    )


@pytest.mark.parametrize("n_rows", [0, 1, 17])
@pytest.mark.parametrize("style", STYLES)
def test_the_function_of_an_expert_and_its_gradients_are_the_experts(style, n_rows):
    found = traced(style)
    program, e = found.call.partition.programs.experts[0], 3
    arguments = found.call.arguments
    rows = torch.randn(n_rows, WIDTH, requires_grad=True)
    weight = torch.rand(n_rows, requires_grad=True)
    own = [arguments[(p.inputs[e] if p.is_separate else p.inputs[0]).position] for p in program.params]
    slices = [t if p.is_separate else t[e] for t, p in zip(own, program.params, strict=True)]
    actual = program.function(rows, weight, *slices)
    expected = expert_of(style, found.model, e)(rows, weight)
    torch.testing.assert_close(actual, expected)
    seed = torch.randn(expected.shape)
    for a, b in zip(
        torch.autograd.grad(actual, [rows, weight, *own], seed),
        torch.autograd.grad(expected, [rows, weight, *own], seed),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_separate_parameters_belong_to_their_expert_in_the_plan():
    found = traced("module_list")
    result = run_captured(found.call, attention_group_size=1, ffn_group_size=2)
    stage = result.plan.stages[1]
    assert len(stage.param_fqns) == 3 * EXPERTS and set(stage.expert_of) == set(stage.param_fqns)
    assert all(f".experts.{expert}." in fqn for fqn, expert in stage.expert_of.items())


def test_a_frozen_expert_gets_no_gradient_and_the_others_theirs():
    model = styles.build("module_list", n_layers=1, num_experts=3, hidden=WIDTH, expert_hidden=12, vocab=32)
    for parameter in model.blocks[0].moe.experts[1].parameters():
        parameter.requires_grad_(False)
    ids = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    reference = eager_reference(model, **batch)
    result = run_captured(capture_call(model, batch), attention_group_size=1, ffn_group_size=2)
    assert not any(".experts.1." in name for name in result.gradients)
    assert_parity(result.loss, result.gradients, reference)
