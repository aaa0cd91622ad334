"""What the executor knows of a stage: a compiled function, where its inputs come from, and where its outputs go.

The runtime never reads FX metadata. The backend binds the passes' programs to one micro-batch size and hands over these.
Compilers of stages live in `passes/aot`. All positions index a stage's tensor inputs or its outputs.

Expert stages take `(rows_PD, weight_P, offsets_E, expert_P, *params)`: rows sorted by local expert, `offsets_E` int32 inclusive
row ends per local expert, `expert_P` int64 the local expert of each row, and each parameter of the rank's experts as
[E_local, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from disagmoe_compile.plan.exchange import AS_COMPUTED, RowExchange
from disagmoe_compile.runtime.row_format import RowFormat

Saved = Any  # tensors (and sizes) a stage keeps for its backward; opaque to the executor


def times_written(tensor: torch.Tensor) -> int | None:
    """How often it was written to in place so far; None where torch does not count (inference), or nothing can be written."""
    return None if tensor.is_inference() or not tensor.numel() else tensor._version


class CompiledStage(Protocol):
    """Forward and backward of one stage for one micro-batch shape.

    `tangents`: outputs whose gradient backward needs. `gradient_inputs`: inputs that backward makes a gradient of.
    `weight_inputs`: inputs that are parameters. `splits_weight_gradient`: whether `backward_input` + `backward_weight` do less
    before the input gradient is out than `backward` does.
    """

    @property
    def tangents(self) -> tuple[int, ...]: ...

    @property
    def gradient_inputs(self) -> tuple[int, ...]: ...

    @property
    def weight_inputs(self) -> frozenset[int]: ...

    @property
    def splits_weight_gradient(self) -> bool: ...

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Saved]: ...

    def backward(self, saved: Saved, tangents: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradient of every input that requires one, by position."""
        ...

    def backward_input(
        self, saved: Saved, tangents: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], Saved]:
        """Gradients of the non-parameter inputs, and what `backward_weight` needs. A stage that does not split hands out all
        gradients here: held until W they would take as much as the parameters, for each micro-batch in between.
        """
        ...

    def backward_weight(self, saved: Saved) -> dict[int, torch.Tensor]:
        """Gradients of the parameters, unless `backward_input` had them."""
        ...


class SourceKind(StrEnum):
    PARAMETER = "parameter"  # `name` is its fqn
    REPLICATED = "replicated"  # argument `position` of the call as it is: a buffer, or an input without the batch dimension
    SAMPLES = "samples"  # this rank's samples of this micro-batch of argument `position`
    COMBINED = "combined"  # the experts' output of the boundary before, viewed as `shape`
    CARRIED = "carried"  # value `position` that the attention stage before hands on


@dataclass(frozen=True, slots=True)
class Source:
    kind: SourceKind
    name: str
    position: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """A value that an attention stage hands on past the experts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Boundary:
    """Sizes of one MoE boundary, of one micro-batch on one attention rank, known to all ranks."""

    n_tokens: int
    num_experts: int
    n_pairs: int
    in_features: int
    out_features: int
    token_dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    carried: tuple[CarriedValue, ...]
    exchange: RowExchange = AS_COMPUTED

    @property
    def token_rows(self) -> RowFormat:
        """Of what goes into the experts, and of its gradient."""
        return RowFormat.of(self.in_features, self.token_dtype, self.exchange)

    @property
    def combined_rows(self) -> RowFormat:
        """Of what comes out of the experts, and of its gradient."""
        return RowFormat.of(self.out_features, self.out_dtype, self.exchange)


@dataclass(frozen=True, slots=True)
class DispatchOutputs:
    """Output positions of tokens_TD, token_P, expert_P, weight_P."""

    tokens: int
    token_ids: int
    expert_ids: int
    weights: int


@dataclass(frozen=True, slots=True)
class BufferDelta:
    """To the buffer that is argument `position` of the call. `once`: the same in every micro-batch and on every replica."""

    position: int
    once: bool


@dataclass(frozen=True, slots=True)
class AttentionStage:
    """`outputs`: (shape, dtype) of each. `carried`: outputs that go on to the next attention stage.

    `model_outputs`: index among the model's outputs -> output position. `loss_numerators`: one output a loss term.
    `buffer_deltas`: output position -> which buffer it adds to.
    """

    index: int
    compiled: CompiledStage
    sources: tuple[Source, ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    dispatch: DispatchOutputs | None
    carried: tuple[int, ...]
    model_outputs: Mapping[int, int]
    loss_numerators: tuple[int, ...]
    uses_rng: bool
    buffer_deltas: Mapping[int, BufferDelta]


@dataclass(frozen=True, slots=True)
class SizedStages:
    """An attention rank's stages by index, and all boundaries, for micro-batches of one size."""

    stages: Mapping[int, AttentionStage]
    boundaries: Sequence[Boundary]


@dataclass(frozen=True, slots=True)
class ExpertParam:
    """One parameter of this rank's experts: a part of a stacked one, or, where `is_separate`, one of each expert.

    `shape` is [E_local, ...]. `trained`: those of `fqns` that want a gradient.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    is_separate: bool
    trained: frozenset[str]

    def together(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As the compiled stage takes it; separate parameters are copied."""
        tensors = [parameters[fqn] for fqn in self.fqns]
        return torch.stack(tensors) if self.is_separate else tensors[0].reshape(self.shape)

    def apart(
        self, gradient: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter, as views."""
        parts = gradient.unbind() if self.is_separate else (gradient.reshape(parameters[self.fqns[0]].shape),)
        return {fqn: part for fqn, part in zip(self.fqns, parts, strict=True) if fqn in self.trained}


@dataclass(frozen=True, slots=True)
class ExpertStage:
    """`params`: in the order of the compiled stage's inputs 4, 5, ..."""

    index: int
    compiled: CompiledStage
    params: tuple[ExpertParam, ...]
    experts: range
