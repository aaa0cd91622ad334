"""The tiny model of the training scripts, its batches, and its plainest optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from disagmoe_compile.models import styles

Options = Mapping[str, Any]
Errors = Mapping[str, float]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

BATCH, LENGTH, VOCAB = (
    12,
    6,
    32,
)  # 12 divides among the attention ranks and micro-batches of every world of the tests


SMALL = {"n_layers": 2, "hidden": 16, "expert_hidden": 12, "vocab": VOCAB}


def tiny() -> nn.Module:
    return styles.build("gathered_einsum", num_experts=6, **SMALL)


def make_batch(seed: int, batch_size: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    """Samples have between one and all of their labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    labels = ids.clone()
    for sample in range(batch_size):
        labels[sample, : sample % (length - 1)] = -100
    return {"input_ids": ids, "labels": labels}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# A large eps keeps AdamW from turning gradients near zero, whose sign is rounding, into full steps.
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
