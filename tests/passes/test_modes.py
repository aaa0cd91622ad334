"""no_grad, autocast and vmap blocks of a model hold for the same values after the graph is cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.metadata import output_node, target_name
from disagmoe_compile.passes.modes import modes_of, switches_mode, transform_blocks
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.passes.program import ModelPrograms
from disagmoe_compile.testing.graphs import (
    capture_model,
    loss_and_gradients,
    loss_position,
    relative_error,
    worst_error,
)
from disagmoe_compile.testing.programs import run_programs

HIDDEN, EXPERTS = 8, 4


class Experts(torch.nn.Module):
    """Every expert on every token, most under a weight of zero; `around` is entered around the experts alone."""

    def __init__(self, around=None) -> None:
        super().__init__()
        self.around = around
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3)

    def forward(self, x):
        tokens = x.reshape(-1, HIDDEN)
        scores = self.router(tokens)
        top, ids = scores.topk(2, dim=-1)
        weights = torch.full_like(scores, float("-inf")).scatter(1, ids, top).sigmoid()
        if self.around is None:
            return self.experts(tokens, weights).view(x.shape)
        with self.around():
            mixed = self.experts(tokens, weights)
        return mixed.float().view(x.shape)

    def experts(self, tokens, weights):
        rows = tokens.repeat(EXPERTS, 1) * weights.t().reshape(-1, 1)
        inner = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.weight).relu()
        return torch.bmm(inner, self.weight).sum(dim=0)


class Model(torch.nn.Module):
    """`mix(model, x, early)` runs before each of two MoE layers; `early` is what it returned before the first."""

    def __init__(self, mix, around=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = mix
        self.embed = torch.nn.Embedding(16, HIDDEN)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(Experts(around) for _ in range(2))
        self.head = torch.nn.Linear(HIDDEN, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids, labels):
        x, early = self.embed(input_ids), None
        for layer in self.layers:
            y = self.mix(self, x, early)
            early = y if early is None else early
            x = x + y + layer(y)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def gradient_inside_no_grad(model, x, early):
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
        with torch.enable_grad():
            y = model.linear(x)
        scale = scale + x.square().mean(-1, keepdim=True)
    return y / scale


def low_precision_block(model, x, early):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.linear(x)
        with torch.autocast("cpu", enabled=False):
            z = model.linear(x)
        y = y + model.linear(z)
    return y.float()


def vmapped_over_both_layers(model, x, early):
    """Its block reads a value from before the first experts and one from behind them."""
    if early is None:
        return model.linear(x)
    return torch.vmap(torch.vmap(lambda a, b: torch.tanh(a) * b))(early, x)


def nothing_but_a_count_under_no_grad(model, x, early):
    """Once the count is an update of a buffer the block is empty (torchtitan's `tokens_per_expert.add_`)."""
    y = model.linear(x)
    with torch.no_grad():
        model.calls.add_(1)
    return y.tanh()


MIXES = [
    gradient_inside_no_grad, low_precision_block, vmapped_over_both_layers, nothing_but_a_count_under_no_grad,
]  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, 16, (4, 6), generator=generator),
        "labels": torch.randint(0, 16, (4, 6), generator=generator),
    }


@dataclass(frozen=True, slots=True)
class Case:
    captured: CapturedGraph
    args: list
    programs: ModelPrograms

    def error(self, programs: ModelPrograms, n_microbatches: int) -> float:
        """The largest relative error of loss and gradients against the captured graph."""
        graph_module = self.captured.graph_module
        expected = loss_and_gradients(graph_module, self.args, loss_position(graph_module(*self.args)))

        def run(*flat):
            return run_programs(self.captured, programs, flat, n_microbatches)

        loss, gradients = loss_and_gradients(run, self.args, 0)
        return max(relative_error(loss, expected[0]), worst_error(gradients, expected[1]))


@pytest.fixture(scope="module")
def case():
    """mix -> its model captured and partitioned, once."""

    @cache
    def get(mix) -> Case:
        captured, args = capture_model(Model(mix), batch())
        return Case(captured, args, partition_model(captured).programs)

    return get


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_loss_and_gradients_equal_eager(case, mix):
    # In bfloat16 the sum of two micro-batches' gradients is rounded twice.
    n_microbatches = 1 if mix is low_precision_block else 2
    found = case(mix)
    assert found.programs.n_boundaries == 2
    assert found.error(found.programs, n_microbatches) < 1e-5


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_a_stage_leaves_the_modes_as_it_found_them(case, mix):
    for program in case(mix).programs.attention:
        graph = program.module.graph
        modes, around = modes_of(graph)
        assert modes[output_node(graph)] == around
        openers = [n for n in graph.nodes if target_name(n).endswith("_increment_nesting")]
        assert all(opener in transform_blocks(graph) for opener in openers)


@pytest.mark.parametrize("mix", [gradient_inside_no_grad, low_precision_block], ids=lambda mix: mix.__name__)
def test_missing_switches_would_be_noticed(case, mix):
    """Negative control: without its switches the same stage computes something else."""
    found = case(mix)
    programs = partition_model(found.captured).programs
    for program in programs.attention:
        for node in reversed(program.module.graph.nodes):
            if switches_mode(node):
                program.module.graph.erase_node(node)
        program.module.recompile()
    assert found.error(programs, 1) > 1e-4


AROUND_EXPERTS = {
    "no_grad": (torch.no_grad, "no_grad"),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast block"),
}


@pytest.mark.parametrize("name", AROUND_EXPERTS)
def test_experts_inside_a_block_that_changes_them_are_no_region(name):
    around, reason = AROUND_EXPERTS[name]
    captured, _ = capture_model(Model(lambda model, x, early: model.linear(x), around), batch())
    partition = partition_model(captured)
    assert partition.programs.n_boundaries == 0
    assert any(reason in line for line in dict(partition.reports)["find_regions"].skipped)


def test_experts_with_autocast_switched_off_are_a_region():
    captured, _ = capture_model(
        Model(lambda model, x, early: model.linear(x), lambda: torch.autocast("cpu", enabled=False)), batch()
    )
    assert partition_model(captured).programs.n_boundaries == 2
