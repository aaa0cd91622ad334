"""Experts with a buffer of slots: routed pairs alone where it is certain which is in which slot, else all slots; both exact."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_layer import EXPERTS, LENGTH, SAMPLES, TOP_K, Layer, Routed, outcome, refusals
from torch import Tensor

CAPACITY = 5  # of 24 pairs for 3 experts: some are dropped


def run_experts(m: Layer, slots: Tensor, hidden: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return torch.bmm(hidden(torch.baddbmm(m.b1[:, None], slots, m.w1)), m.w2)


def rank_of_pairs(ids: Tensor) -> Tensor:
    """[T, k] how many pairs of the same expert come before, tokens first."""
    mask = F.one_hot(ids.flatten(), EXPERTS)
    return ((mask.cumsum(0) - 1) * mask).sum(-1).view(-1, TOP_K)


def rank_by_choice(ids: Tensor) -> Tensor:
    """The same with all first choices before the second ones."""
    mask = F.one_hot(ids.t().flatten(), EXPERTS)
    return (mask.cumsum(0) * mask).sum(-1).sub(1).view(TOP_K, -1).t()


def rank_among_tokens(ids: Tensor) -> Tensor:
    """Wrong: a first and a second choice of one expert may get the same number."""
    mask = F.one_hot(ids, EXPERTS)
    return ((mask.cumsum(0) - 1) * mask).sum(-1)


def one_hot_masks(
    position: Callable[[Tensor], Tensor] = rank_of_pairs,
    flat: bool = False,
    weigh: str = "output",
    weights: Callable[[Tensor], Tensor] = lambda w: w,
    converted: Callable[[Tensor], Tensor] = lambda combine: combine,
    overwritten: bool = False,
    sent: Callable[[Tensor], Tensor] | None = None,
) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        w, where = weights(w), position(ids)
        kept = where < CAPACITY
        slot = F.one_hot(where.clamp(max=CAPACITY - 1), CAPACITY).float()
        expert = F.one_hot(ids, EXPERTS) * kept.unsqueeze(-1)
        dispatch = torch.einsum("tke,tkc->tec", expert.float(), slot)
        combine = torch.einsum("tk,tke,tkc->tec", w, expert.float(), slot)
        if weigh == "cross":  # the expert of one choice with the slot of another
            combine = torch.einsum("te,tc->tec", (w[..., None] * expert).sum(1), slot.sum(1))
        if weigh == "scaled":
            combine = combine * w.sum(-1)[:, None, None]
        if weigh == "input":
            dispatch, combine = combine, dispatch
        if sent is not None:
            dispatch = sent(combine).to(x.dtype)
        combine = converted(combine)
        if overwritten:
            combine[0] = 0.5
        out = run_experts(m, torch.einsum("tec,td->ecd", dispatch, x))
        if flat:
            return combine.flatten(1) @ out.flatten(0, 1)
        return torch.einsum("tec,ecd->td", combine, out)

    return routed


def padded(
    position: Callable[[Tensor], Tensor] = rank_of_pairs,
    write_last: int = CAPACITY,
    read_shift: int = 0,
    masked: bool = True,
    added: bool = False,
    hidden: Callable[[Tensor], Tensor] = F.silu,
) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        where = position(ids)
        kept = where < CAPACITY
        slots = x.new_zeros(EXPERTS, CAPACITY + 1, x.shape[-1])
        slots[ids, where.clamp(max=write_last)] = x.unsqueeze(1).expand(-1, TOP_K, -1)
        out = run_experts(m, slots[:, :CAPACITY], hidden)
        rows = out[ids, (where + read_shift).clamp(max=CAPACITY - 1)]
        if added:
            return (rows + (w * kept).unsqueeze(-1)).sum(1)
        return (rows * (w * kept if masked else w).unsqueeze(-1)).sum(1)

    return routed


def dropped_on_the_way_in(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    """Every pair has a slot and a weight, but only some have their tokens there: the others get an expert's bias."""
    n_pairs = TOP_K * SAMPLES * LENGTH
    where, expert = rank_of_pairs(ids), F.one_hot(ids, EXPERTS).float()
    slot = F.one_hot(where, n_pairs).float()
    dispatch = torch.einsum("tke,tkc->tec", expert * (where < CAPACITY)[..., None], slot)
    out = run_experts(m, torch.einsum("tec,td->ecd", dispatch, x))
    return torch.einsum("tk,tke,tkc,ecd->td", w, expert, slot, out)


def expert_choice(
    shift: int = 0, scatter: bool = False, alpha: int = 1, other: bool = False, written: bool = False
) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        weights, chosen = p.topk(4, dim=0)  # [C, E]
        slots = x[chosen.t()]
        out = run_experts(m, slots)
        if other:
            out = out + (x * 2)[chosen.t()]
        rows = (out * weights.t()[..., None]).flatten(0, 1)
        index = (chosen.t().flatten() + shift) % x.shape[0] if shift else chosen.t().flatten()
        if scatter:
            return torch.zeros_like(x).scatter_add(0, index[:, None].expand(-1, x.shape[-1]), rows)
        total = torch.zeros_like(x)
        if written:
            total[0] = 1.0
        return total.index_add(0, index, rows, alpha=alpha)

    return routed


CERTAIN = {
    "one-hot masks": (one_hot_masks(rank_of_pairs), "capacity"),
    "one-hot masks, first choices first": (one_hot_masks(rank_by_choice), "capacity"),
    "one-hot masks, flattened combine": (one_hot_masks(rank_of_pairs, flat=True), "capacity"),
    "weights detached": (one_hot_masks(weights=Tensor.detach), "capacity"),
    "weights through 16 bits": (one_hot_masks(weights=lambda w: w.bfloat16().float()), "capacity"),
    "weights as integers": (one_hot_masks(weights=lambda w: (w * 9).long().float()), "capacity"),
    "sent where the combine is positive": (one_hot_masks(sent=lambda combine: combine > 0), "capacity"),
    "sent where the combine is not zero": (
        one_hot_masks(weights=lambda w: w - 0.5, sent=lambda combine: combine.to(torch.bool)),
        "capacity",
    ),
    "padded": (padded(), "capacity"),
    "padded, first choices first": (padded(rank_by_choice), "capacity"),
    "expert choice": (expert_choice(), "expert_choice"),
    "expert choice with scatter_add": (expert_choice(scatter=True), "expert_choice"),
}


@pytest.mark.parametrize("case", CERTAIN)
def test_routed_pairs_alone_are_sent_where_their_slots_are_certain(case):
    routed, style = CERTAIN[case]
    found = outcome(routed)
    assert found.styles == [style] and found.error < 1e-5, found


def after_other_experts(routed: Routed) -> Routed:
    """Two layers of experts with nothing learned between them but the second router."""

    def both(m: Layer, x: Tensor, w: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        x = x + routed(m, x, w, ids, p)
        p = m.gate(x).softmax(-1)
        return routed(m, x, *p.topk(TOP_K, -1), p)

    return both


@pytest.mark.parametrize("routed", [one_hot_masks(), padded()])
def test_experts_that_follow_experts_are_told_apart(routed):
    found = outcome(after_other_experts(routed))
    assert found.styles == ["capacity", "capacity"] and found.error < 1e-5, found


def one_expert_padded(m: Layer, x: Tensor, w: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    weights, ids = p.topk(1, -1)
    mask = F.one_hot(ids.flatten(), EXPERTS)
    where = ((mask.cumsum(0) - 1) * mask).sum(-1)
    slots = x.new_zeros(EXPERTS, CAPACITY + 1, x.shape[-1])
    slots[ids.flatten(), where.clamp(max=CAPACITY)] = x
    rows = run_experts(m, slots[:, :CAPACITY])[ids.flatten(), where.clamp(max=CAPACITY - 1)]
    return rows * (weights.flatten() * (where < CAPACITY))[:, None]


def one_expert_masks(m: Layer, x: Tensor, w: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    weights, ids = p.topk(1, -1)
    mask = F.one_hot(ids, EXPERTS)
    where = ((mask.cumsum(0) - 1) * mask).sum(-1)
    kept = where < CAPACITY
    slot = F.one_hot(where * kept, CAPACITY).float()
    combine = torch.einsum("tk,tke,tkc->tec", weights * kept, mask.float(), slot)
    out = run_experts(m, torch.einsum("tec,td->ecd", combine.bool().float(), x))
    return torch.einsum("tec,ecd->td", combine, out)


@pytest.mark.parametrize("routed", [one_expert_padded, one_expert_masks])
def test_routed_pairs_alone_are_sent_where_a_token_has_one_expert(routed):
    found = outcome(routed)
    assert found.styles == ["capacity"] and found.error < 1e-5, found


UNCERTAIN = {
    "positions among tokens only": (one_hot_masks(rank_among_tokens), "along some of the pairs only"),
    "padded with positions among tokens only": (padded(rank_among_tokens), "along some of the pairs only"),
    "read from other slots": (padded(read_shift=1), "does not count the pairs before"),
    "dropped pairs overwrite the last slot": (padded(write_last=CAPACITY - 1), "overwrites the slot"),
    "dropped pairs keep their weight": (padded(masked=False), "not certainly weighted with zero"),
    "weights in the dispatch": (
        one_hot_masks(rank_of_pairs, weigh="input"),
        "weighted as they are dispatched",
    ),
    "combine detached": (one_hot_masks(converted=Tensor.detach), "changes the weights"),
    "combine through 16 bits": (
        one_hot_masks(converted=lambda combine: combine.bfloat16().float()),
        "changes the weights",
    ),
    "combine as integers": (
        one_hot_masks(weights=lambda w: w * 9, converted=lambda combine: combine.long().float()),
        "changes the weights",
    ),
    "combine overwritten": (one_hot_masks(overwritten=True), "writes in place to what says which pair"),
    "choices mixed": (one_hot_masks(weigh="cross"), "without telling their experts apart"),
    "weights scaled by their sum": (one_hot_masks(weigh="scaled"), "one choice of a token with another"),
    "negative weights compared with zero": (
        one_hot_masks(weights=lambda w: w - 0.5, sent=lambda combine: combine > 0),
        "may be negative",
    ),
    "sent everywhere": (one_hot_masks(sent=lambda combine: combine >= 0), "not certain which pair"),
    "weights added": (padded(added=True), "more than zero"),
    "dropped on the way in": (dropped_on_the_way_in, "slots: "),
    "expert choice with a factor": (expert_choice(alpha=2), "does not sum rows into zeros"),
    "expert choice added to more than zeros": (expert_choice(written=True), "does not sum rows into zeros"),
    "expert choice with other tokens": (expert_choice(other=True), "a second kind of tokens"),
    "expert choice added to other tokens": (expert_choice(shift=1), "other tokens than they came from"),
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_all_slots_are_sent_where_it_is_not_certain_which_pair_is_where(case):
    routed, reason = UNCERTAIN[case]
    found = outcome(routed)
    assert found.styles == ["slots"] and found.error < 1e-5, found
    assert any(re.search(reason, line) and "test_slot_styles.py" in line for line in found.skipped), (
        found.skipped
    )
    assert not any("routes no region" in line and "by nothing" not in line for line in found.skipped)


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (lambda h: h.softmax(1), "`softmax`.*may mix rows"),
        (lambda h: h - h.mean(1, keepdim=True), "slots: "),
        (lambda h: F.batch_norm(h.flatten(0, 1), None, None, training=True).view_as(h), "`batch_norm`"),
    ],
)
def test_slots_that_interact_inside_an_expert_are_refused(hidden, reason):
    skipped = refusals(padded(hidden=hidden))
    assert any(re.search(reason, line) and "test_slot_styles.py" in line for line in skipped), skipped


def test_slots_whose_number_tracing_fixed_are_refused():
    def routed(m, x, w, ids, _):
        capacity = 2 * x.shape[0] // EXPERTS
        where = rank_of_pairs(ids)
        kept = where < capacity
        slot = F.one_hot(where * kept, capacity).float()
        expert = (F.one_hot(ids, EXPERTS) * kept.unsqueeze(-1)).float()
        combine = torch.einsum("tk,tke,tkc->tec", w, expert, slot)
        out = run_experts(m, torch.einsum("tec,td->ecd", combine, x))  # weighted twice: not pairs alone
        return torch.einsum("tec,ecd->td", combine, out)

    skipped = refusals(routed)
    assert any("how many slots there are is not known" in line for line in skipped), skipped


def test_a_projection_for_every_head_is_no_mixture_of_experts():
    def routed(m, x, w, ids, _):
        heads = x.unsqueeze(0).expand(EXPERTS, -1, -1) * torch.arange(1, EXPERTS + 1)[:, None, None]
        return torch.bmm(torch.bmm(heads, m.w1), m.w2).mean(0)

    refusals(routed)
