"""One routed layer, captured, with its regions found and made canonical: what is found, why not, and how far from eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.passes.canonicalize_experts import CanonicalizeExperts
from disagmoe_compile.passes.deinplace import Deinplace
from disagmoe_compile.passes.find_regions import FindRegions
from disagmoe_compile.passes.pipeline import working_copy
from disagmoe_compile.testing.graphs import (
    capture_model,
    loss_and_gradients,
    loss_position,
    relative_error,
    worst_error,
)

SAMPLES, LENGTH, WIDTH, HIDDEN, EXPERTS, TOP_K = 6, 2, 5, 7, 3, 2
Routed = Callable[["Layer", Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A linear layer, then `routed(layer, tokens, weights, ids, probabilities)`, then a mean of squares."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routed = routed
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.b1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(0, -2)
        probabilities = self.gate(tokens).softmax(-1)
        weights, ids = probabilities.topk(TOP_K, -1)
        return (tokens + self.routed(self, tokens, weights, ids, probabilities)).square().mean()


@dataclass(frozen=True)
class Outcome:
    """`error`: the worst of the loss and of every gradient against the captured graph, once regions are `experts` calls."""

    styles: list[str]
    skipped: tuple[str, ...]
    error: float


def captured_layer(routed: Routed):
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    mark_batch(x)
    return capture_model(Layer(routed), {"x": x})


def refusals(routed: Routed) -> tuple[str, ...]:
    """Why nothing in the layer is a region; fails where something is."""
    graph_module = working_copy(captured_layer(routed)[0])
    Deinplace().run(graph_module)
    report = FindRegions().run(graph_module)
    assert report.matched == 0, report.notes
    return report.skipped


def outcome(routed: Routed) -> Outcome:
    captured, args = captured_layer(routed)
    graph_module = working_copy(captured)
    Deinplace().run(graph_module)
    report = FindRegions().run(graph_module)
    styles = [region.style for region in graph_module.meta["disagmoe_regions"]]
    CanonicalizeExperts().run(graph_module)
    graph_module.recompile()
    position = loss_position(captured.graph_module(*args))
    expected = loss_and_gradients(captured.graph_module, args, position)
    actual = loss_and_gradients(graph_module, args, position)
    error = max(relative_error(actual[0], expected[0]), worst_error(actual[1], expected[1]))
    return Outcome(styles, report.skipped, error)
