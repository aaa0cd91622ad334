"""Captured models, each traced once a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.pipeline import PartitionResult, partition_model
from disagmoe_compile.testing.graphs import capture_model, loss_and_gradients, loss_position


@dataclass(frozen=True)
class Captured:
    """A captured model, the arguments of one call, and what eager makes of them."""

    graph: CapturedGraph
    args: list[Any]
    loss_position: int
    loss: torch.Tensor
    gradients: Mapping[int, torch.Tensor]

    @cached_property
    def partition(self) -> PartitionResult:
        return partition_model(self.graph)


def language_batch(batch_size: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    """Tokens and labels, with labels of -100 spread unevenly over the samples."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (batch_size, length), generator=generator)
    labels = ids.clone()
    for sample in range(batch_size):
        labels[sample, : 3 * sample + 1] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(scope="session")
def captured_family() -> Callable[..., Captured]:
    """`captured_family("qwen3_moe", n_layers=3)`: a tiny model of a transformers family."""
    pytest.importorskip("transformers")
    from disagmoe_compile.models import hf

    known: dict[tuple[str, int], Captured] = {}

    def of(family: str, n_layers: int = 2) -> Captured:
        key = (family, n_layers)
        if key not in known:
            model, _ = hf.build(family, n_layers=n_layers)
            batch = language_batch()
            mark_batch(batch)
            graph, args = capture_model(model, batch)
            position = loss_position(graph.graph_module(*args))
            known[key] = Captured(
                graph, args, position, *loss_and_gradients(graph.graph_module, args, position)
            )
        return known[key]

    return of
