"""A stage that keeps only its inputs: its forward runs again when its backward starts, on the same inputs and with the same code.

The numbers are bit for bit those of the stage itself. What the forward adds to buffers, hands on or counts is taken from its
first run alone; the worker gives the second run the random numbers of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime.stages import CompiledStage, Saved, times_written


@dataclass(frozen=True, slots=True)
class _Kept:
    """Inputs of a forward, and how often each had been written to by then."""

    inputs: tuple[Tensor, ...]
    versions: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RecomputedStage:
    """Between I and W it holds what `stage` holds there: nothing runs a third time."""

    stage: CompiledStage

    @property
    def tangents(self) -> tuple[int, ...]:
        return self.stage.tangents

    @property
    def gradient_inputs(self) -> tuple[int, ...]:
        return self.stage.gradient_inputs

    @property
    def weight_inputs(self) -> frozenset[int]:
        return self.stage.weight_inputs

    @property
    def splits_weight_gradient(self) -> bool:
        return self.stage.splits_weight_gradient

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        outputs, _ = self.stage.forward(inputs)
        return outputs, _Kept(tuple(inputs), tuple(map(times_written, inputs)))

    def backward(self, saved: Saved, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return self.stage.backward(self._again(saved), tangents)

    def backward_input(self, saved: Saved, tangents: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Saved]:
        return self.stage.backward_input(self._again(saved), tangents)

    def backward_weight(self, saved: Saved) -> dict[int, Tensor]:
        return self.stage.backward_weight(saved)

    def _again(self, kept: _Kept) -> Saved:
        """Raises DisagMoEError where an input is no longer what the first run read."""
        for position, (one, version) in enumerate(zip(kept.inputs, kept.versions, strict=True)):
            if times_written(one) != version:
                raise DisagMoEError(
                    f"input {position} {tuple(one.shape)} of a recomputed stage was written to between its forward and its "
                    'backward, so a second forward would see other values: use recompute="none", or write to it after backward()'
                )
        return self.stage.forward(kept.inputs)[1]
