"""Whole models of the batched styles on virtual ranks: loss and every gradient equal eager, and the lowerings agree."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from disagmoe_compile.models import styles
from disagmoe_compile.passes.aot.batched import BatchedExperts
from disagmoe_compile.passes.aot.experts import GroupedExperts, reference_experts
from disagmoe_compile.testing.parity import assert_parity, eager_reference
from disagmoe_compile.testing.virtual import capture_call, run_captured

SHAPES = [(1, 1, 1), (1, 2, 2), (2, 3, 1), (1, 4, 1)]
STYLES = {
    "gathered_einsum": "gathered", "batched_mm": "gathered", "batched_mm_weights_at_input": "gathered",
    "dense_einsum": "masked_dense", "dense_scatter": "masked_dense", "dense_softmax_of_mask": "masked_dense",
    "padded_bmm": "capacity", "gshard": "capacity", "gshard_fixed_capacity": "capacity",
    "gshard_module_list": "capacity",
    "padded_bmm_fixed_capacity": "capacity", "expert_choice": "expert_choice", "sorted_grouped_mm": "grouped_mm",
    "sorted_bincount": "grouped_mm",
}  # fmt: skip
COUPLED = {
    "gshard": "cumsum", "gshard_fixed_capacity": "cumsum", "gshard_module_list": "cumsum",
    "padded_bmm_fixed_capacity": "cumsum", "expert_choice": "topk",
}  # fmt: skip
FAST = ("gathered_einsum", "dense_einsum", "gshard_module_list", "expert_choice")
EVERY = [pytest.param(s, marks=() if s in FAST else pytest.mark.slow) for s in STYLES]


@cache
def captured(style: str):
    model = styles.build(style, n_layers=1)
    ids = torch.randint(3, 128, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample in range(4):
        labels[sample, : sample + 1] = -100
    batch = {"input_ids": ids, "labels": labels}
    return capture_call(model, batch), eager_reference(model, **batch)


@pytest.mark.parametrize("style", EVERY)
def test_loss_and_gradients_equal_eager(style):
    call, reference = captured(style)
    assert [e.style for e in call.partition.programs.experts] == [STYLES[style]]
    for attention, ffn, n_microbatches in SHAPES:
        if style in COUPLED and (attention > 1 or n_microbatches > 1):
            continue  # there eager acts on each micro-batch
        run = run_captured(
            call, attention_group_size=attention, ffn_group_size=ffn, n_microbatches=n_microbatches
        )
        tolerance = 1e-2 if style.startswith("sorted") else 1e-4  # these multiply in bfloat16
        assert_parity(run.loss, run.gradients, reference, gradient_tolerance=tolerance)


@pytest.mark.parametrize("style", EVERY)
def test_what_couples_samples_is_named(style):
    lines = captured(style)[0].partition.batch_coupled
    assert any(COUPLED[style] in line for line in lines) if style in COUPLED else not lines


@pytest.mark.parametrize("style", FAST)
@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (3, 9)])
def test_lowerings_of_the_function_agree(style, counts):
    """Loop, grouped and batched, forward and gradients, with no row, one row and many."""
    (program,) = captured(style)[0].partition.programs.experts
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    rows, weight = random(sum(counts), program.in_features), random(sum(counts))
    params = [random(2, *(int(d) for d in p.shape[1:])) for p in program.params]
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    expert = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    loop = reference_experts(program, rows, weight, offsets, *params)
    grouped = GroupedExperts(program.function, 0)(rows, weight, offsets, expert, *params)[0]
    outputs = [loop, grouped]
    if min(counts) > 0:  # the batched form pads to the busiest expert outside
        order = [list(range(3)) + [0] * 6, list(range(3, 12))]
        index = torch.tensor(order).t()
        padded = BatchedExperts(program.function)(rows[index], weight[index], *params)[0]
        outputs.append(torch.cat([padded[:3, 0], padded[:, 1]]))
    seed = torch.randn(loop.shape, generator=generator)
    inputs = [rows, weight, *params]
    expected = torch.autograd.grad(loop, inputs, seed, allow_unused=True, materialize_grads=True)
    for output in outputs[1:]:
        torch.testing.assert_close(output, loop, rtol=1e-4, atol=1e-5)
        actual = torch.autograd.grad(output, inputs, seed, allow_unused=True, materialize_grads=True)
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
