"""Batched experts, one layer at a time: each spelling of a style is exact; what is not certain is refused, by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_layer import EXPERTS, LENGTH, TOP_K, WIDTH, Layer, Routed, captured_layer, outcome, refusals
from torch import Tensor

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.pipeline import partition_model

# -- gathered weights


def gathered(
    hidden: Callable[[Tensor], Tensor] = F.silu, combine: str = "einsum", at_input: bool = False
) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        rows = x.unsqueeze(1).expand(-1, TOP_K, -1)
        if at_input:
            rows = rows * w.unsqueeze(-1)
        h = hidden(torch.einsum("tkd,tkdh->tkh", rows, m.w1[ids]) + m.b1[ids])
        out = torch.matmul(h.unsqueeze(-2), m.w2[ids]).squeeze(-2)
        if at_input:
            return out.sum(1)
        if combine == "einsum":
            return torch.einsum("tkd,tk->td", out, w)
        if combine == "bmm":
            return torch.bmm(w.unsqueeze(1), out).squeeze(1)
        if combine == "three operands":
            return torch.einsum("tkh,tkhd,tk->td", h, m.w2[ids], w)
        if combine == "both":
            return torch.einsum("tkh,tkhd->td", h * w[..., None], m.w2[ids])
        weighted = out * w[..., None]
        return weighted.amax(1) if combine == "max" else getattr(weighted, combine)(-2)

    return routed


@pytest.mark.parametrize("combine", ["einsum", "bmm", "three operands", "both", "sum", "mean"])
def test_gathered_weights_are_exact_however_they_are_summed(combine):
    found = outcome(gathered(combine=combine))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_weights_at_the_input_of_biased_experts_are_exact():
    found = outcome(gathered(at_input=True))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_parts_of_a_projection_stay_parts_of_a_row():
    def halves(h):
        gate, up = h[..., :4].softmax(-1), h[..., 3:]
        return torch.cat([gate * up, h[..., 4:].chunk(3, -1)[1], up.flip(-1)[..., :2]], -1)

    found = outcome(gathered(hidden=halves))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_tokens_in_several_dimensions_are_exact():
    def routed(m, x, w, ids, _):
        x, w, ids = x.view(-1, LENGTH, WIDTH), w.view(-1, LENGTH, TOP_K), ids.view(-1, LENGTH, TOP_K)
        h = torch.einsum("bsd,bskdh->bskh", x, m.w1[ids]).relu()
        return torch.einsum("bskh,bskhd,bsk->bsd", h, m.w2[ids], w).flatten(0, 1)

    found = outcome(routed)
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_weights_of_another_order_are_exact_because_pairs_are_by_position():
    def routed(m, x, w, ids, probabilities):
        return gathered()(m, x, probabilities.gather(1, ids.flip(-1)), ids, probabilities)

    found = outcome(routed)
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_rows_of_pairs_that_are_not_summed_leave_one_by_one():
    found = outcome(gathered(combine="max"))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def less_one_in_place(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 1] -= 1
    return ids


@pytest.mark.parametrize("chosen", [lambda ids: ids - 1, less_one_in_place])
def test_ids_from_the_end_are_exact(chosen):
    found = outcome(lambda m, x, w, ids, p: gathered()(m, x, w, chosen(ids), p))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def squared_mean(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)


def deviation(h: Tensor) -> Tensor:
    return h / (torch.var(h, -1, False, True) + 1)


@pytest.mark.parametrize("hidden", [squared_mean, deviation])
def test_values_of_one_row_inside_an_expert_are_exact(hidden):
    found = outcome(gathered(hidden=hidden))
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def test_tokens_added_to_their_experts_rows_are_exact():
    def routed(m, x, w, ids, _):
        out = torch.einsum("td,tkdh,tkhe->tke", x, m.w1[ids], m.w2[ids])
        return ((out * w[..., None] + x[:, None]) * w[..., None]).sum(1)

    found = outcome(routed)
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def squeezed(m, x, w, ids, p):
    weights, ids = p.topk(1, -1)
    h = F.silu(torch.einsum("td,tdh->th", x, m.w1[ids.squeeze(-1)]) + m.b1[ids.squeeze(-1)])
    return torch.bmm(h[:, None], m.w2[ids.squeeze(-1)]).squeeze(1) * weights


def kept_dimension(m, x, w, ids, p):
    weights, ids = p.topk(1, -1)
    rows = x.repeat_interleave(1, 0)
    h = F.silu(torch.bmm(rows.unsqueeze(1), m.w1[ids.view(-1)]).squeeze(1) + m.b1[ids.view(-1)])
    out = torch.bmm(h.unsqueeze(1), m.w2[ids.view(-1)]).squeeze(1) * weights.view(-1, 1)
    return out.view(x.shape[0], 1, -1).sum(1)


def from_a_table(m, x, w, ids, p):
    ids = torch.arange(x.shape[0]) * 7 % EXPERTS
    h = torch.bmm(x[:, None], m.w1[ids]).relu()
    return torch.bmm(h, m.w2[ids])[:, 0]


@pytest.mark.parametrize("routed", [squeezed, kept_dimension, from_a_table])
def test_one_expert_a_token_is_exact_with_and_without_a_sum(routed):
    found = outcome(routed)
    assert found.styles == ["gathered"] and found.error < 1e-5, found


def other_ids(m, x, w, ids, _):
    h = torch.einsum("td,tkdh->tkh", x, m.w1[ids]).relu()
    return torch.einsum("tkh,tkhd,tk->td", h, m.w2[ids.flip(-1)], w)


def gathered_gate(m, x, w, ids, _):
    out = torch.einsum("td,tkdh,tkhe->tke", x, m.w1[ids], m.w2[ids])
    return (out * out.sum(-1, keepdim=True).softmax(1)).sum(1)


def masked_by_number(m, x, w, ids, _):
    out = torch.einsum("td,tkdh,tkhe->tke", x, m.w1[ids], m.w2[ids])
    return (out * (ids > 0)[..., None]).sum(1)


def written_inside(m, x, w, ids, _):
    h = torch.einsum("td,tkdh->tkh", x, m.w1[ids])
    h[:, 0] = 0
    return torch.einsum("tkh,tkhd,tk->td", h, m.w2[ids], w)


def written_input(m, x, w, ids, _):
    x = x.clone()
    h = torch.einsum("td,tkdh->tkh", x, m.w1[ids])
    x[:, 0] = 0
    return torch.einsum("tkh,tkhd,tk->td", h, m.w2[ids], w) + x


REFUSED_GATHERED = {
    "softmax over tokens": (gathered(hidden=lambda h: h.softmax(0)), "`softmax`.*may mix rows"),
    "softmax over the experts of a token": (
        gathered(hidden=lambda h: h.softmax(1)),
        "`softmax`.*may mix rows",
    ),
    "mean over tokens": (gathered(hidden=lambda h: h - h.mean(0)), "`mean`"),
    "normalised over tokens": (
        gathered(hidden=lambda h: F.batch_norm(h.mT, None, None, training=True).mT),
        "batch_norm",
    ),
    "one scale for all experts": (
        gathered(hidden=lambda h: F.layer_norm(h, h.shape[-2:])),
        "normalises over rows",
    ),
    "random numbers": (gathered(hidden=lambda h: F.dropout(h, 0.5)), "random numbers"),
    "other ids for the second matrix": (other_ids, "other experts than the ids of its pairs say"),
    "weights that are computed inside": (gathered_gate, "`softmax`.*may mix rows"),
    "no weight": (masked_by_number, "is no weight"),
    "written inside": (written_inside, "writes in place to a value inside"),
    "input written while they run": (written_input, "writes in place to what the experts read"),
}


@pytest.mark.parametrize("case", REFUSED_GATHERED)
def test_gathered_weights_that_are_no_sum_over_independent_rows_are_refused(case):
    routed, reason = REFUSED_GATHERED[case]
    skipped = refusals(routed)
    assert any(re.search(reason, line) and "test_batched_styles.py" in line for line in skipped), skipped


def test_parameter_that_is_also_read_elsewhere_is_refused():
    def routed(m, x, w, ids, p):
        return gathered()(m, x, w, ids, p) + m.w1.mean()

    with pytest.raises(UnsupportedModelError, match="`w1` is used by experts and"):
        partition_model(captured_layer(routed)[0])


# -- every expert on every token


def dense(scores: Callable[..., Tensor], at_input: bool = False, bias: bool = False) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        s = scores(w, ids, probabilities)
        rows = torch.einsum("td,te->etd", x, s) if at_input else x
        h = torch.einsum("etd,edh->eth", rows, m.w1) if at_input else torch.einsum("td,edh->eth", rows, m.w1)
        h = F.silu(h + m.b1[:, None] if bias else h)
        out = torch.bmm(h, m.w2)
        return out.sum(0) if at_input else (out * s.t().unsqueeze(-1)).sum(0)

    return routed


def masked(w, ids, p):
    return p * F.one_hot(ids, EXPERTS).sum(1)


ZEROS = {
    "scatter": lambda w, ids, p: torch.zeros_like(p).scatter(1, ids, w),
    "sum of one-hot": lambda w, ids, p: torch.einsum("tk,tke->te", w, F.one_hot(ids, EXPERTS).float()),
    "mask": masked,
    "normalised": lambda w, ids, p: masked(w, ids, p) / masked(w, ids, p).sum(-1, keepdim=True),
    "where": lambda w, ids, p: torch.where(F.one_hot(ids, EXPERTS).sum(1) > 0, p, 0.0),
    "softmax of minus infinity": lambda w, ids, p: (
        torch.full_like(p, -torch.inf).scatter(1, ids, w).softmax(-1)
    ),
    "argmax": lambda w, ids, p: p * F.one_hot(p.argmax(-1), EXPERTS),
}


@pytest.mark.parametrize("zeros", ZEROS)
def test_zeros_by_structure_make_dense_experts_sparse(zeros):
    found = outcome(dense(ZEROS[zeros], bias=True))
    assert found.styles == ["masked_dense"] and found.error < 1e-5, found


def test_weights_at_the_input_without_bias_are_exact():
    found = outcome(dense(masked, at_input=True))
    assert found.styles == ["masked_dense"] and found.error < 1e-5, found


def written_before(w, ids, p):
    zeros = torch.zeros_like(p)
    zeros[:, 0] = 0.5
    return zeros.scatter(1, ids, w)


def mask_written(w, ids, p):
    mask = F.one_hot(ids, EXPERTS).sum(1)
    mask[:, 0] = 1
    return p * mask


def repeated_in_place(w, ids, p):
    ids = ids.clone()
    ids[:, 1] = ids[:, 0]
    return torch.zeros_like(p).scatter(1, ids, w)


REFUSED_DENSE = {
    "the same expert twice, written in place": (dense(repeated_in_place), "the same expert twice"),
    "zeros written before": (dense(written_before), "writes in place to the constant"),
    "mask written after": (dense(mask_written), "not zero by structure"),
    "ids of the whole batch": (
        dense(lambda w, ids, p: p * F.one_hot(p.mean(0).argmax(-1), EXPERTS)),
        "for other tokens than those that enter",
    ),
    "softmax over all experts": (dense(lambda w, ids, p: p), "not zero by structure"),
    "threshold": (dense(lambda w, ids, p: torch.where(p > 0.1, p, 0.0)), "not zero by structure"),
    "ties of the last of the top-k": (dense(lambda w, ids, p: p * (p >= w[:, -1:])), "not zero by structure"),
    "small numbers": (
        dense(lambda w, ids, p: torch.full_like(p, -9.0).scatter(1, ids, w).exp()),
        "not exactly zero",
    ),
    "bias behind a weight at the input": (dense(masked, at_input=True, bias=True), "more than zero"),
    "the same expert twice": (
        dense(lambda w, ids, p: torch.zeros_like(p).scatter(1, ids % 2, w)),
        "the same expert twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED_DENSE)
def test_dense_experts_without_structural_zeros_stay_dense(case):
    routed, reason = REFUSED_DENSE[case]
    skipped = refusals(routed)
    assert any(re.search(reason, line) for line in skipped), skipped
