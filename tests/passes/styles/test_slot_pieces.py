"""Experts that each take their own slots of a buffer: exact where every piece certainly meets its own expert; else opaque."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from one_layer import EXPERTS, TOP_K, Layer, Routed, outcome, refusals
from torch import Tensor

CAPACITY = 5  # of 24 pairs for 3 experts: some are dropped
Run = Callable[[Layer, Tensor], Tensor]


def routed_by(run: Run) -> Routed:
    """GShard's masks; `run` [E, C, D] -> [E, C, D]."""

    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, _: Tensor) -> Tensor:
        mask = F.one_hot(ids.flatten(), EXPERTS)
        where = ((mask.cumsum(0) - 1) * mask).sum(-1).view(-1, TOP_K)
        kept = where < CAPACITY
        slot = F.one_hot(where.clamp(max=CAPACITY - 1), CAPACITY).float()
        expert = (F.one_hot(ids, EXPERTS) * kept.unsqueeze(-1)).float()
        dispatch = torch.einsum("tke,tkc->tec", expert, slot)
        combine = torch.einsum("tk,tke,tkc->tec", w, expert, slot)
        return torch.einsum("tec,ecd->td", combine, run(m, torch.einsum("tec,td->ecd", dispatch, x)))

    return routed


def gated(m: Layer, e: int, rows: Tensor) -> Tensor:
    gate, up = F.linear(rows, m.w1[e].t(), m.b1[e]).chunk(2, -1)[0], rows @ m.w1[e]
    return F.silu(gate.mean(-1, keepdim=True)) * up @ m.w2[e]


def normed(m: Layer, e: int, rows: Tensor) -> Tensor:
    return F.layer_norm(m.experts[e](rows), rows.shape[-1:], m.experts[e].bias, m.experts[e].bias)


def with_leading_dimension(m: Layer, slots: Tensor) -> Tensor:
    """fairscale, DeepSpeed: [groups, experts, slots, D] cut in dimension 1."""
    pieces = slots.reshape(1, EXPERTS, -1, slots.shape[-1]).chunk(EXPERTS, dim=1)
    out = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces)], dim=1)
    return out.reshape(EXPERTS, -1, slots.shape[-1])


def slots_first(m: Layer, slots: Tensor) -> Tensor:
    slots_CED = slots.transpose(0, 1)
    return torch.stack([m.experts[e](slots_CED[:, e]) for e in range(EXPERTS)], 1).transpose(0, 1)


def without_the_dimension(m: Layer, slots: Tensor) -> Tensor:
    pieces = slots.split(1)
    return torch.cat([m.experts[e](pieces[e].squeeze(0)).unsqueeze(0) for e in range(EXPERTS)])


def stacked(
    run: Callable[[Layer, int, Tensor], Tensor] = lambda m, e, rows: m.experts[e](rows),
    order: Sequence[int] = range(EXPERTS),
) -> Run:
    return lambda m, slots: torch.stack([run(m, e, slots[order[e]]) for e in range(EXPERTS)])


EXACT: dict[str, Run] = {
    "stacked": stacked(),
    "stacked parameters": stacked(gated),
    "norms with scale and shift": stacked(normed),
    "cut twice": lambda m, slots: torch.stack([m.experts[e](slots[e]) * slots[e] for e in range(EXPERTS)]),
    "iterated": lambda m, slots: torch.stack([expert(rows) for expert, rows in zip(m.experts, slots)]),
    "chunk and cat": lambda m, slots: torch.cat(
        [F.relu(expert(piece)) for expert, piece in zip(m.experts, slots.chunk(EXPERTS))]
    ),
    "slots first": slots_first,
    "leading dimension": with_leading_dimension,
    "without the dimension": without_the_dimension,
    "unbound, then scaled together": lambda m, slots: (
        torch.stack([m.experts[e](rows) for e, rows in enumerate(slots.unbind())]) * m.w2.mean(1)[:, None]
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_experts_that_take_their_own_slots_are_exact(case):
    found = outcome(routed_by(EXACT[case]))
    assert len(found.styles) == 1 and found.error < 1e-5, found


REFUSED: dict[str, tuple[Run, str]] = {
    "slots of another expert": (stacked(order=[1, 0, 2]), "topk"),
    "one matrix twice in some experts": (
        stacked(lambda m, e, rows: rows @ m.experts[e].weight @ m.experts[max(e, 1)].weight),
        "twice, another does not",
    ),
    "one expert for all": (stacked(lambda m, e, rows: m.experts[0](rows)), "belongs to several experts"),
    "one expert of another kind": (
        stacked(lambda m, e, rows: m.experts[e](rows).relu() if e == 1 else m.experts[e](rows)),
        "compute different functions",
    ),
    "slots that meet": (
        stacked(lambda m, e, rows: m.experts[e](rows - rows.mean(0))),
        "slots of an expert meet",
    ),
    "dropout": (stacked(lambda m, e, rows: F.dropout(m.experts[e](rows))), "random numbers inside an expert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_do_not_certainly_take_their_own_slots_are_refused(case):
    run, reason = REFUSED[case]
    skipped = refusals(routed_by(run))
    assert any(re.search(reason, line) and "test_slot_pieces.py" in line for line in skipped), skipped


@pytest.mark.parametrize("case", ["stacked", "leading dimension"])
def test_routed_pairs_alone_are_sent_to_experts_that_take_their_own_slots(case):
    assert outcome(routed_by(EXACT[case])).styles == ["capacity"]


def test_a_cat_with_an_empty_vector_is_no_joining_of_pieces():
    """An empty cache of keys is one."""

    def routed(m: Layer, x: Tensor, w: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        keys = torch.cat([x.new_zeros(0), x.view(3, 2, -1, x.shape[-1])], dim=2)
        return routed_by(stacked())(m, keys.flatten(0, 2), w, ids, p)

    assert outcome(routed).styles == ["capacity"]
