"""The experts of a rank as ONE batched call: `torch.func.vmap` of the per-expert function over experts.

It takes whatever operators vmap takes, where the grouped form (`experts.py`) knows products, elementwise operators and reshapes.
The price is padding: every expert gets as many rows as the busiest one.

    rows_PD (sorted by expert)  ->  rows_RED  ->  vmap over E  ->  out_REN  ->  out_PN

Padding happens outside the compiled code, whose row count stays an ordinary symbolic size. It repeats a row of the same expert
rather than zeros: the padding holds no value that a real row does not have, so a tangent of zero gives a gradient of zero (a norm
of zeros would give NaN). An expert without rows runs on another's, and its gradients are set to zero.

Legend: P rows, R rows of the busiest expert, E experts of this rank, D hidden, N output size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot.compiled import AotStage, EagerStage, Saved
from disagmoe_compile.passes.aot.experts import (
    check_output,
    example_rows,
    one_line,
    reference_experts,
    same_values,
)
from disagmoe_compile.passes.aot.grouped_mm import runs
from disagmoe_compile.passes.program import ExpertsProgram

# The stage takes (rows, weights, offsets, expert of each row, *params); the batched function has no use for the third and fourth.
_ROW_INPUTS, _SKIPPED = 2, 2


class BatchedExperts(torch.nn.Module):
    """`forward(rows_RED, weight_RE, *params) -> (out_REN,)`; params stacked over this rank's experts."""

    def __init__(self, function: fx.GraphModule) -> None:
        super().__init__()
        self.function = function

    def forward(self, rows_RED: Tensor, weight_RE: Tensor, *params: Tensor) -> tuple[Tensor]:
        in_dims = (1, 1, *[0] * len(params))
        all_experts = torch.func.vmap(
            lambda *tensors: _first(self.function(*tensors)), in_dims=in_dims, out_dims=1
        )
        return (all_experts(rows_RED, weight_RE, *params),)


@dataclass(frozen=True, slots=True)
class Padding:
    """`source_RE`: the row of P in each place. `place_P`: the place of each row, in R * E. `idle_E`: experts without rows."""

    source_RE: Tensor
    place_P: Tensor
    idle_E: Tensor

    @staticmethod
    def of(offsets_E: Tensor) -> Padding:
        """For at least one row."""
        start_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]]).long()
        count_E = offsets_E.long() - start_E
        n_experts, most = offsets_E.shape[0], int(count_E.max())
        local_R = torch.arange(most, device=offsets_E.device)
        idle_E = count_E == 0
        first_E = start_E.masked_fill(idle_E, 0)
        is_row_RE = local_R[:, None] < count_E
        source_RE = torch.where(is_row_RE, start_E + local_R[:, None], first_E)
        place_P = is_row_RE.t().reshape(-1).nonzero().squeeze(1)  # expert by expert, as the rows are
        return Padding(source_RE, place_P % most * n_experts + place_P // most, idle_E)

    def pad(self, values_PX: Tensor) -> Tensor:
        return values_PX[self.source_RE]

    def pad_with_zeros(self, values_PX: Tensor) -> Tensor:
        flat = values_PX.new_zeros(self.source_RE.numel(), *values_PX.shape[1:])
        flat[self.place_P] = values_PX
        return flat.view(*self.source_RE.shape, *values_PX.shape[1:])

    def unpad(self, values_REX: Tensor) -> Tensor:
        return values_REX.flatten(0, 1)[self.place_P]


@dataclass(frozen=True, slots=True)
class PaddedStage:
    """A stage over rows_PD around one over rows_RED. Not for a call without rows."""

    stage: AotStage | EagerStage

    @property
    def tangents(self) -> tuple[int, ...]:
        return self.stage.tangents

    @property
    def gradient_inputs(self) -> tuple[int, ...]:
        return tuple(map(outer_position, self.stage.gradient_inputs))

    @property
    def weight_inputs(self) -> frozenset[int]:
        return frozenset(map(outer_position, self.stage.weight_inputs))

    @property
    def splits_weight_gradient(self) -> bool:
        return self.stage.splits_weight_gradient

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        rows_PD, weight_P, offsets_E, _, *params = inputs
        padding = Padding.of(offsets_E)
        outputs, saved = self.stage.forward([padding.pad(rows_PD), padding.pad(weight_P), *params])
        return [padding.unpad(out) for out in outputs], (padding, saved)

    def backward(self, saved: Saved, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        padding, inner = saved
        return _unpadded(padding, self.stage.backward(inner, _padded(padding, tangents)))

    def backward_input(self, saved: Saved, tangents: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Saved]:
        padding, inner = saved
        gradients, state = self.stage.backward_input(inner, _padded(padding, tangents))
        return _unpadded(padding, gradients), (padding, state)

    def backward_weight(self, saved: Saved) -> dict[int, Tensor]:
        padding, state = saved
        return _unpadded(padding, self.stage.backward_weight(state))


def outer_position(position: int) -> int:
    """Of a stage's input, from its position among those of the batched function."""
    return position if position < _ROW_INPUTS else position + _SKIPPED


def _padded(padding: Padding, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {i: padding.pad_with_zeros(tangent) for i, tangent in tangents.items()}


def _unpadded(padding: Padding, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Rows' gradients back in their order; parameters' without what experts without rows did."""
    found = {}
    for i, gradient in gradients.items():
        if i < _ROW_INPUTS:
            found[i] = padding.unpad(gradient)
        else:
            idle = padding.idle_E.view(-1, *[1] * (gradient.dim() - 1))
            found[outer_position(i)] = gradient.masked_fill(idle, 0)
    return found


def check_batched(program: ExpertsProgram) -> None:
    """Raise `UnsupportedModelError` unless rows are independent and the batched form equals the loop over experts."""
    where = f"experts of boundary {program.boundary}"
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch._C._DisableAutocast():
        rows_PD, weight_P, offsets_E, _, *params = example_rows(program)
        expected_PN = reference_experts(program, rows_PD, weight_P, offsets_E, *params)
        check_output(program, expected_PN, rows_PD.shape[0])
        for expert, start, end in runs(offsets_E):
            own = [p[expert] for p in params]
            alone = [
                program.function(rows_PD[i : i + 1], weight_P[i : i + 1], *own) for i in range(start, end)
            ]
            if not same_values(expected_PN[start:end], torch.cat([_first(out) for out in alone])):
                raise UnsupportedModelError(
                    f"{where}: an expert's rows give something else together than one by one, so rows are not independent"
                )
        padding = Padding.of(offsets_E)
        try:
            (out_REN,) = BatchedExperts(program.function)(
                padding.pad(rows_PD), padding.pad(weight_P), *params
            )
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UnsupportedModelError(
                f"{where}: torch.func.vmap cannot batch them: {one_line(error)}"
            ) from error
    if not same_values(padding.unpad(out_REN), expected_PN):
        raise UnsupportedModelError(
            f"{where}: a batch of experts computes something else than each expert alone"
        )


def _first(out: Tensor | Sequence[Tensor]) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out
