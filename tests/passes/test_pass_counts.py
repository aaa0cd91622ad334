"""Every pass says what it did: counts and reasons, against what stands in the graph before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.metadata import is_computed_size, target_name
from disagmoe_compile.passes.pipeline import default_passes, partition_model, working_copy
from disagmoe_compile.testing.graphs import capture_model

HIDDEN, NUM_EXPERTS, N_LAYERS = 8, 4, 2
N_STAGES = 2 * N_LAYERS + 1


class Experts(nn.Module):
    """Every expert on every token, most under a weight of zero; tokens are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS)
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN) * 0.3)
        self.register_buffer("tokens_of_expert", torch.zeros(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        scores = self.router(tokens)
        top, ids = scores.topk(2, dim=-1)
        with torch.no_grad():
            self.tokens_of_expert += torch.histc(ids.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
        weights = torch.zeros_like(scores).scatter(1, ids, top.sigmoid())
        rows = torch.einsum("td,edh->eth", tokens, self.weight).relu()
        return torch.einsum("eth,te->th", rows, weights).view(x.shape)


class Model(nn.Module):
    """Something to do for every pass: checkpoints, writes in place, buffers that count, sizes of tensors on the way, a mean as
    the loss; and something to leave alone: a write that a view sees, a top-k that routes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, HIDDEN)
        self.mix = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(N_LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(N_LAYERS))
        self.head = nn.Linear(HIDDEN, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for mix, experts in zip(self.mix, self.experts):
            x = x + checkpoint(lambda x, mix=mix: mix(x).tanh(), x, use_reentrant=False)
            x += experts(x)
        view = x[..., :2]
        x.mul_(0.5)
        best = torch.cat([x, view], -1).topk(2, dim=-1).values
        logits = self.head(x) + best.sum(-1, keepdim=True)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Step:
    """A pass on the model: how often each thing stands in the graph before and after it, and what it reports."""

    before: Counter[str]
    after: Counter[str]
    report: PassReport

    def added(self, *names: str) -> int:
        return sum(self.after[name] - self.before[name] for name in names)


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))
    captured, _ = capture_model(Model(), {"input_ids": ids, "labels": ids.roll(1, 1)})
    found: dict[str, Step] = {}
    before = [_contents(working_copy(captured))]

    def observe(index: int, name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        found[name] = Step(before[-1], _contents(graph_module), report)
        before.append(found[name].after)

    partition_model(captured, observers=[observe])
    return found


def _contents(graph_module: fx.GraphModule) -> Counter[str]:
    """Operations by name; `nodes`: all of them; `sizes`: those that read a size; `streams`: those with a stream."""
    nodes = list(graph_module.graph.nodes)
    counts = Counter(target_name(node) for node in nodes if node.op not in ("placeholder", "output"))
    counts["nodes"] = len(nodes)
    counts["operations"] = sum(node.op not in ("placeholder", "output") for node in nodes)
    counts["sizes"] = sum(is_computed_size(node) for node in nodes)
    counts["streams"] = sum("stream" in node.meta for node in nodes)
    return counts


def inline_checkpoint(step: Step) -> None:
    report = step.report
    assert (report.matched, report.inserted, report.skipped) == (N_LAYERS, 2 * N_LAYERS, ())
    assert step.added("tag_activation_checkpoint") == -report.matched
    assert step.added("linear", "tanh") == report.inserted


def deinplace(step: Step) -> None:
    report = step.report
    assert report.matched == step.before["iadd"] + step.before["mul_"] == 2 * N_LAYERS + 1
    assert step.added("add") == report.matched - len(report.skipped) == N_LAYERS
    buffers, view = report.skipped[:-1], report.skipped[-1]
    assert all("`iadd`" in reason and "an input of the model" in reason for reason in buffers)
    assert "`mul_`" in view and "is another name of the storage and is read later" in view


def find_regions(step: Step) -> None:
    report = step.report
    assert (report.matched, report.inserted) == (N_LAYERS, 0)
    (reason,) = report.skipped  # the top-k that chooses no experts
    assert "`topk`" in reason and "it is read by `sum`" in reason
    assert len(report.notes) == N_LAYERS and "style masked_dense, 4 experts, top-2" in report.notes[0]


def canonicalize_experts(step: Step) -> None:
    report = step.report
    assert (report.matched, report.skipped) == (N_LAYERS, ())
    assert step.added("experts") == report.matched
    assert report.notes[0] == "1 distinct expert functions"
    removed = int(report.notes[1].split()[0])
    assert step.added("nodes") == report.inserted - removed and removed > 0


def rematerialize_sizes(step: Step) -> None:
    report = step.report
    assert report.matched == step.before["sizes"] > 0
    assert (step.after["sizes"], report.skipped) == (0, ())
    assert step.added("nodes") == report.inserted - report.matched


def buffer_updates(step: Step) -> None:
    report = step.report
    assert (report.matched, report.inserted, report.skipped) == (N_LAYERS, N_LAYERS, ())
    assert step.added("add_to_buffer") == report.inserted and step.after["iadd"] == 0
    assert report.notes[0] == "experts.0.tokens_of_expert: 1 deltas"


def label_roles(step: Step) -> None:
    report = step.report
    assert (report.matched, report.inserted, report.skipped) == (step.after["nodes"] - 1, 0, ())
    assert report.notes[0].startswith(f"{N_LAYERS + 1} attention parts")


def partition(step: Step) -> None:
    report = step.report
    stages = [name for name in step.after if name.startswith(("attention_", "experts_"))]
    assert (report.matched, report.inserted, report.skipped) == (N_LAYERS, len(stages), ())
    assert len(stages) == N_STAGES
    assert report.notes[1] == f"{step.before['nodes']} nodes became {step.after['nodes']}"


def insert_transfers(step: Step) -> None:
    report = step.report
    assert (report.matched, report.skipped) == (N_LAYERS, ())
    assert step.added("m2n_send") == step.added("m2n_recv") == 2 * report.matched
    assert step.added("nodes") == report.inserted


def linearize_loss(step: Step) -> None:
    report = step.report
    assert (report.matched, report.skipped, report.notes) == (1, (), ("1 terms",))
    assert step.added("nodes") == report.inserted and step.added("loss_denominators") == 1


def assign_streams(step: Step) -> None:
    report = step.report
    assert (report.matched, report.inserted, report.skipped) == (step.after["streams"], 0, ())
    assert step.before["streams"] == 0 and step.after["streams"] == step.after["operations"]


CHECKS: dict[str, Callable[[Step], None]] = {
    check.__name__: check
    for check in (
        inline_checkpoint, deinplace, find_regions, canonicalize_experts, rematerialize_sizes, buffer_updates, label_roles,
        partition, insert_transfers, linearize_loss, assign_streams,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", [one.name for one in default_passes()])
def test_a_pass_counts_what_it_did(steps: dict[str, Step], name: str) -> None:
    assert name in CHECKS, f"say above what pass {name} must count"
    assert steps[name].report.matched > 0, "the model gives the pass nothing to do"
    CHECKS[name](steps[name])
