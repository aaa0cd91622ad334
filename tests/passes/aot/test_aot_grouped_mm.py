"""The row operators equal a plain loop, forward and backward, and their two gradients are separate operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from disagmoe_compile.passes.aot.grouped_mm import (
    expand_to_rows,
    grouped_mm,
    grouped_mm_weight_grad,
    segment_sum,
)

COUNTS = ([3, 0, 4, 2], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 5])
K, N = 6, 5


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def expert_of_row(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_mm_equals_gathered_products(counts: list[int], transposed: bool) -> None:
    x = torch.randn(sum(counts), K, dtype=torch.float64)
    weight = torch.randn(len(counts), *((N, K) if transposed else (K, N)), dtype=torch.float64)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, w.transpose(1, 2) if transposed else w, offsets(counts))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        gathered = w[expert_of_row(counts)]
        return torch.einsum("pk,pnk->pn" if transposed else "pk,pkn->pn", x, gathered)

    for actual, expected in zip(gradients(ours, x, weight), gradients(plain, x, weight)):
        torch.testing.assert_close(actual, expected)


def test_weight_gradient_has_the_layout_of_a_transposed_parameter() -> None:
    weight = torch.randn(2, N, K, requires_grad=True)
    grouped_mm(torch.randn(4, K), weight.transpose(1, 2), offsets([1, 3])).sum().backward()
    assert weight.grad is not None and weight.grad.is_contiguous()


def test_rows_past_the_last_expert_give_zeros() -> None:
    out = grouped_mm(torch.ones(5, K), torch.ones(2, K, N), offsets([1, 2]))
    assert torch.equal(out[3:], torch.zeros(2, N)) and bool((out[:3] == K).all())


def test_expert_without_rows_gets_a_zero_weight_gradient() -> None:
    dw = grouped_mm_weight_grad(torch.ones(3, K), torch.ones(3, N), offsets([0, 3]))
    assert torch.equal(dw[0], torch.zeros(K, N)) and torch.equal(dw[1], torch.full((K, N), 3.0))


def test_bf16_products_equal_a_loop_bitwise() -> None:
    x, weight = torch.randn(7, K).bfloat16(), torch.randn(2, K, N).bfloat16()
    expected = torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]])
    assert torch.equal(grouped_mm(x, weight, offsets([3, 4])), expected)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_expanding_to_rows_equals_indexing(counts: list[int]) -> None:
    values = torch.randn(len(counts), N, dtype=torch.float64)
    ours = gradients(lambda v: expand_to_rows(v, offsets(counts), expert_of_row(counts)), values)
    plain = gradients(lambda v: v[expert_of_row(counts)], values)
    for actual, expected in zip(ours, plain):
        torch.testing.assert_close(actual, expected)


def test_segment_sum_keeps_trailing_dimensions() -> None:
    values = torch.arange(12.0).view(3, 2, 2)
    expected = torch.stack([values[:2].sum(0), values[2:].sum(0)])
    assert torch.equal(segment_sum(values, offsets([2, 1])), expected)


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_weight_grad", "segment_sum"])
def test_registrations_are_sound(op: str) -> None:
    rows, ends = torch.randn(4, K), offsets([1, 3])
    examples = {
        "grouped_mm": (rows.requires_grad_(), torch.randn(2, K, N, requires_grad=True), ends),
        "grouped_mm_weight_grad": (rows, torch.randn(4, N), ends),
        "segment_sum": (rows.detach(), ends),
    }
    args = examples[op] if op == "grouped_mm" else tuple(a.detach() for a in examples[op])
    torch.library.opcheck(getattr(torch.ops.disagmoe, op).default, args)
