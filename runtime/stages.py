"""What the executor asks of a compiled stage. It never reads FX metadata; compilers of stages live in `passes/aot`.

Attention: inputs are the program's `tensor_inputs` in order. Experts: `(rows_PD, weight_P, offsets_E, expert_P, *params)` with
rows sorted by local expert, `offsets_E` int32 inclusive row ends per local expert, `expert_P` int64 the local expert of each
row, and the rank's slice of each stacked parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

Saved = Any  # tensors (and sizes) a stage keeps for its backward; opaque to the executor


class CompiledStage(Protocol):
    """Forward and backward of one stage for one micro-batch shape. Positions index its inputs and outputs.

    `tangents`: outputs whose gradient backward needs. `weight_inputs`: inputs that are parameters. `splits_weight_gradient`:
    whether `backward_input` + `backward_weight` do less before the input gradient is out than `backward` does.
    """

    tangents: tuple[int, ...]
    weight_inputs: frozenset[int]
    splits_weight_gradient: bool

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Saved]: ...

    def backward(self, saved: Saved, tangents: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradient of every input that requires one, by position."""
        ...

    def backward_input(self, saved: Saved, tangents: Mapping[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], Saved]:
        """Gradients of the non-parameter inputs, and what `backward_weight` needs."""
        ...

    def backward_weight(self, saved: Saved) -> dict[int, torch.Tensor]:
        """Gradients of the parameters."""
        ...
