"""Families of transformers are split exactly; what cannot be split says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from disagmoe_compile.testing import family_check
from disagmoe_compile.testing.family_check import (
    PLANS,
    FamilyReport,
    check_family,
    eager_in_parts,
    token_batch,
)
from disagmoe_compile.testing.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE

hf = pytest.importorskip("disagmoe_compile.models.hf")
pytest.importorskip("transformers")

DOCS = Path(__file__).parents[2] / "docs" / "families.md"

KINDS = {
    "latent attention, shared experts, groups of experts, a dense first layer": ("deepseek_v3", 3),
    "attention sinks, sliding window, biases in the experts": ("gpt_oss", 2),
    "convolutions, one expert a token's first choice": ("lfm2_moe", 2),
    "weights at the input": ("llama4_text", 2),
}


def assert_exact(report: FamilyReport) -> None:
    assert report.reason is None, report.reason
    assert report.graphs == 1
    assert report.worst_errors is not None and set(report.worst_errors) == set(PLANS)
    assert max(report.worst_errors.values()) <= min(LOSS_TOLERANCE, GRADIENT_TOLERANCE), report


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_family_equals_eager(kind):
    family, n_layers = KINDS[kind]
    assert_exact(check_family(family, n_layers=n_layers))


def rows_of_docs() -> dict[str, list[str]]:
    """family -> its cells in docs/families.md."""
    table = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1:]]
    return {row[0]: row for row in cells}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(rows_of_docs()) if DOCS.exists() else [])
def test_a_family_is_as_its_docs_say(family):
    report = check_family(family)
    if rows_of_docs()[family][5] == "sharded":
        assert report.worst_errors is not None, report.reason
        assert max(report.worst_errors.values()) <= GRADIENT_TOLERANCE, report
    else:
        assert report.reason


def test_docs_list_the_families_that_are_found():
    assert sorted(rows_of_docs()) == list(hf.families())


def test_at_least_fifty_families_are_split():
    assert sum(row[5] == "sharded" for row in rows_of_docs().values()) >= 50


def test_a_family_that_fails_is_a_report_not_an_error(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("backend='backend' raised:\nUnsupportedModelError: no such layer\n\nSet TORCH...")

    monkeypatch.setattr(family_check.hf, "build", broken)
    report = check_family("qwen3_moe", n_layers=2)
    assert (report.graphs, report.reason) == (0, "no such layer")


class Mean(torch.nn.Module):
    """The mean of a learned score over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(128))

    def forward(self, input_ids, labels):
        valid = labels[:, 1:] != -100
        self.loss = (self.weight[input_ids[:, 1:]] * valid * input_ids[:, 1:]).sum() / valid.sum()
        return self


def test_eager_in_parts_is_eager_where_nothing_mixes_samples():
    whole, parts = (eager_in_parts(Mean(), token_batch(), n) for n in (1, 3))
    assert abs(whole.loss - parts.loss) < 1e-4
    torch.testing.assert_close(whole.gradients["weight"], parts.gradients["weight"])
