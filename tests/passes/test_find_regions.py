"""Regions are found by dataflow; what stops a match is named; only row-by-row experts count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.graphs import (
    capture_model,
    loss_and_gradients,
    loss_position,
    relative_error,
    worst_error,
)
from disagmoe_compile.testing.programs import run_programs

EXPERTS, TOP_K, WIDTH, HIDDEN = 4, 2, 16, 16


class Routed(nn.Module):
    """A hand-written MoE in the style of torchtitan: argsort, bincount, grouped_mm, scatter_add."""

    def __init__(self, combine: str = "scatter_add", activation: str = "silu"):
        super().__init__()
        torch.manual_seed(0)
        self.combine, self.activation = combine, activation
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.1)

    def forward(self, x):
        tokens = self.embed(x).reshape(-1, WIDTH)
        weights, ids = self.gate(tokens).float().softmax(-1).topk(TOP_K, -1)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        offsets = torch.cumsum(torch.bincount(flat, minlength=EXPERTS), 0, dtype=torch.int32)
        rows = tokens[order // TOP_K]
        hidden = F.grouped_mm(rows, self.w1, offs=offsets)
        hidden = F.silu(hidden) if self.activation == "silu" else hidden.softmax(0)
        rows = F.grouped_mm(hidden, self.w2, offs=offsets)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1).to(rows.dtype)
        index = order // TOP_K
        if self.combine == "scatter_add":
            index = index.reshape(-1, 1).expand(-1, WIDTH)
            mixed = torch.zeros_like(tokens).scatter_add(0, index, rows)
        elif self.combine == "index_add":
            mixed = torch.zeros_like(tokens).index_add(0, index, rows)
        else:
            mixed = torch.zeros_like(tokens).index_add(0, index.flip(0), rows)
        return (tokens + mixed).float().square().mean()


def captured_routed(**options):
    model = Routed(**options).bfloat16()
    x = torch.randn(6, 3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    mark_batch(x)
    return capture_model(model, {"x": x})


def skipped(result):
    return dict(result.reports)["find_regions"].skipped


def test_argsort_and_scatter_add_equal_eager():
    captured, args = captured_routed()
    programs = partition_model(captured).programs
    assert [(e.style, e.num_experts, e.top_k) for e in programs.experts] == [("grouped_mm", EXPERTS, TOP_K)]
    expected = loss_and_gradients(captured.graph_module, args, loss_position(captured.graph_module(*args)))
    actual = loss_and_gradients(lambda *a: run_programs(captured, programs, a, 2), args, 0)
    # bf16 keeps 8 bits; sums of a token's two rows are rounded at other places.
    assert relative_error(actual[0], expected[0]) < 1e-2
    assert worst_error(actual[1], expected[1]) < 5e-2


def test_index_add_is_a_sum_over_pairs():
    captured, _ = captured_routed(combine="index_add")
    assert partition_model(captured).programs.n_boundaries == 1


def test_rows_added_to_other_tokens_are_no_region():
    captured, _ = captured_routed(combine="shuffled")
    result = partition_model(captured)
    assert result.programs.n_boundaries == 0
    assert any("other tokens" in reason for reason in skipped(result))


def test_rows_that_interact_are_no_region():
    captured, _ = captured_routed(activation="softmax over rows")
    result = partition_model(captured)
    assert result.programs.n_boundaries == 0
    assert any("softmax" in reason and "mix rows" in reason for reason in skipped(result))


def test_unrecognised_top_k_is_named_with_its_reader():
    captured, _ = captured_routed(combine="shuffled")
    (line,) = [reason for reason in skipped(partition_model(captured)) if reason.startswith("`topk`")]
    assert "test_find_regions.py" in line and "read by" in line


class DenseMasked(nn.Module):
    """Every expert on every token, with scores scattered from a top-k, as Llama 4 does; optionally biased."""

    def __init__(self, background: float = float("-inf"), bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.background = background
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.1)
        self.bias = bias

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        logits = self.gate(tokens)
        values, ids = logits.topk(TOP_K, dim=1)
        scores = torch.full_like(logits, self.background).scatter_(1, ids, values).sigmoid()
        rows = tokens.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        hidden = torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.w1)
        hidden = hidden.exp() if self.bias else hidden.relu()
        mixed = torch.bmm(hidden, self.w2).view(-1, WIDTH).reshape(EXPERTS, -1, WIDTH).sum(dim=0)
        return (tokens + mixed).square().mean()


def captured_dense(**options):
    x = torch.randn(6, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    mark_batch(x)
    return capture_model(DenseMasked(**options), {"x": x})


def test_masked_dense_with_structural_zeros_is_sparse():
    captured, args = captured_dense()
    programs = partition_model(captured).programs
    assert [(e.style, e.top_k) for e in programs.experts] == [("masked_dense", TOP_K)]
    expected = loss_and_gradients(captured.graph_module, args, 0)
    actual = loss_and_gradients(lambda *a: run_programs(captured, programs, a, 2), args, 0)
    assert relative_error(actual[0], expected[0]) < 1e-5
    assert worst_error(actual[1], expected[1]) < 1e-5


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"background": -30.0}, "not exactly zero"), ({"bias": True}, "more than zero")],
)
def test_small_scores_or_experts_that_shift_zero_stay_dense(options, reason):
    captured, _ = captured_dense(**options)
    result = partition_model(captured)
    assert result.programs.n_boundaries == 0
    assert any(reason in line for line in skipped(result))


def test_parameter_of_both_sides_is_refused_by_name():
    class Shared(Routed):
        def forward(self, x):
            return super().forward(x) + self.w1.float().square().sum() * x.float().mean()

    captured, _ = capture_model(Shared().bfloat16(), {"x": torch.randn(6, 3, WIDTH).bfloat16()})
    with pytest.raises(UnsupportedModelError, match="`w1` is used by experts and"):
        partition_model(captured)
