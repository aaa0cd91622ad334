"""Sorted rows cut into a piece for each expert: exact where each is certainly its own; else opaque, with the reason."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from one_layer import EXPERTS, TOP_K, Layer, Routed, outcome, refusals
from torch import Tensor


def expert(m: Layer, e: int, rows: Tensor) -> Tensor:
    return F.silu(rows @ m.w1[e]) @ m.w2[e]


def counted(ids: Tensor) -> list[int]:
    return F.one_hot(ids, EXPERTS).sum((0, 1)).tolist()


def scattered(ids: Tensor) -> list[int]:
    counts = ids.new_zeros(ids.shape[0], EXPERTS)
    counts.scatter_(1, ids, 1)
    return counts.sum(0).tolist()


def split(
    run=expert, count=counted, order=range(EXPERTS), chosen=lambda ids: ids, back=lambda perm: perm // TOP_K
) -> Routed:
    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        ids = chosen(ids)
        perm = ids.flatten().argsort()
        pieces = x[perm // TOP_K].split(count(ids))
        out = torch.cat([run(m, e, pieces[e]) for e in order]) * w.flatten()[perm, None]
        return torch.zeros_like(x).index_add(0, back(perm), out)

    return routed


def histogram(ids: Tensor) -> list[int]:
    """torchtitan: `max` is the number of experts, the ids are cast before they are flattened."""
    return torch.histc(ids.float().view(-1), bins=EXPERTS, min=0, max=EXPERTS).int().tolist()


def added_to_a_shared_expert(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    """torchtitan: scores are a column before the experts, rows are added to what a shared expert returns."""
    perm = ids.view(-1).argsort(stable=True)
    index = (perm // TOP_K).reshape(-1, 1).expand(-1, x.shape[-1])
    rows = torch.gather(x, 0, index) * w.view(-1)[perm].reshape(-1, 1)
    out = torch.cat([expert(m, e, piece) for e, piece in enumerate(rows.split(histogram(ids)))])
    return m.embed(x).relu().scatter_add(0, index, out)


def sentinels(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 1] = EXPERTS
    return ids


def rows_of_other_buffers(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    """Summed into more rows than there are tokens."""
    perm = ids.flatten().argsort()
    out = torch.cat([expert(m, e, piece) for e, piece in enumerate(x[perm // TOP_K].split(counted(ids)))])
    total = x.new_zeros(2 * x.shape[0], x.shape[1]).index_add(0, perm // TOP_K, out)
    return total[: x.shape[0]] + total[x.shape[0] :]


def written_behind(what: str) -> Routed:
    """Tokens change after their rows were taken, ids after they were sorted and counted."""

    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        x, ids = x.clone(), ids.clone()
        perm = ids.flatten().argsort()
        pieces = x[perm // TOP_K].split(counted(ids))
        (x[:, :1] if what == "tokens" else ids[:, :1]).zero_()
        out = torch.cat([expert(m, e, pieces[e]) for e in range(EXPERTS)]) * w.flatten()[perm, None]
        return torch.zeros_like(x).index_add(0, perm // TOP_K, out) + x * ids.sum(-1, keepdim=True)

    return routed


def cut_by_running_sums(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    """DeepSeek: slices from one running sum to the next, experts with parameters of their own, put back in the pairs' order."""
    perm = ids.view(-1).argsort()
    rows, outs, start = x[perm // TOP_K], [], 0
    for e, n in enumerate(scattered(ids)):
        outs.append(m.experts[e](rows[start : start + n]))
        start = start + n
    out = torch.cat(outs)
    pairs = torch.empty_like(out)
    pairs[perm] = out
    return (pairs.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


def in_and_out_pair_by_pair(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
    """Two products of each expert with something between them that mixes tokens (JetMoE's attention)."""
    perm, counts = ids.flatten().argsort(), counted(ids)
    into = torch.cat([F.linear(p, m.w1[e].t()) for e, p in enumerate(x[perm // TOP_K].split(counts))])
    pairs = x.new_zeros(ids.numel(), into.shape[1]).index_add(0, perm, into)
    pairs = pairs - pairs.mean(0)
    out = torch.cat([p @ m.w2[e] for e, p in enumerate(pairs[perm].split(counts))])
    return torch.zeros_like(x).index_add(0, perm // TOP_K, out * w.flatten()[perm, None])


EXACT = {
    "split at the counts": (split(), 1),
    "counted by scatter": (split(count=scattered), 1),
    "cut by running sums": (cut_by_running_sums, 1),
    "a histogram up to the number of experts": (split(count=histogram), 1),
    "ids that are cast before they are counted and sorted": (
        split(count=histogram, chosen=lambda ids: ids.int().long()), 1,
    ),
    "added to a shared expert": (added_to_a_shared_expert, 1),
    "pair by pair": (in_and_out_pair_by_pair, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_pieces_of_sorted_rows_are_exact(case):
    routed, n_regions = EXACT[case]
    found = outcome(routed)
    assert found.styles == ["grouped_mm"] * n_regions and found.error < 1e-5, found


REFUSED = {
    "weights of another expert": (
        split(run=lambda m, e, rows: expert(m, (e + 1) % EXPERTS, rows)), "not the slice of expert",
    ),
    "another function": (split(run=lambda m, e, rows: expert(m, e, rows) * (1 + e)), "compute different functions"),
    "one expert for all": (split(run=lambda m, e, rows: m.experts[0](rows)), "different functions|several experts"),
    "rows that interact": (split(run=lambda m, e, rows: expert(m, e, rows).softmax(0)), "may mix rows"),
    "rows added to other tokens": (split(back=lambda perm: perm.flip(0) // TOP_K), "other tokens than they came from"),
    "ids that may repeat, counted once": (
        split(count=scattered, chosen=lambda ids: torch.stack([ids[:, 0], ids[:, 1] // 2], 1)), "not certain that it counts",
    ),
    "an id of no expert, written in place, in the last bin": (
        split(count=histogram, chosen=sentinels), "does not count the rows of each expert",
    ),
    "a sum into more rows than tokens": (rows_of_other_buffers, "rows for .* tokens"),
    "tokens written behind": (written_behind("tokens"), "what the experts read, while they run"),
    "ids written behind": (written_behind("ids"), "what the experts read, while they run"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_pieces_that_are_not_certainly_an_experts_are_refused(case):
    routed, reason = REFUSED[case]
    skipped = refusals(routed)
    assert any(re.search(reason, line) and "test_pieces.py" in line for line in skipped), skipped


@pytest.mark.parametrize("routed", [split(order=(1, 0, 2)), split(count=lambda ids: counted(ids)[::-1])])
def test_pieces_in_another_order_than_the_experts_are_refused(routed):
    assert refusals(routed)
