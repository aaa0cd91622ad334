"""Rows as they travel between attention and FFN ranks, and back to what stages compute with.

In float16 a message carries one exponent beside its rows: they are scaled by a power of two so that the largest of them is just
below the type's range. The scaling is exact, so neither large activations overflow nor small gradients vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disagmoe_compile.plan.exchange import RowExchange

Spec = tuple[tuple[int, ...], torch.dtype]
_TOP = 15  # scaled rows stay below 2**15; float16 ends at 65504
_SMALLEST = -100  # 2 ** (_TOP - _SMALLEST) is still a float32


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows of `features` values, computed in `dtype`, sent in `wire`."""

    features: int
    dtype: torch.dtype
    wire: torch.dtype

    @staticmethod
    def of(features: int, dtype: torch.dtype, exchange: RowExchange) -> RowFormat:
        wire = exchange.wire_dtype(str(dtype).removeprefix("torch."))
        return RowFormat(features, dtype, getattr(torch, wire))

    @property
    def is_scaled(self) -> bool:
        return self.wire is torch.float16 and self.dtype is not torch.float16

    def specs(self, n_rows: int) -> tuple[Spec, ...]:
        exponent: tuple[Spec, ...] = (((1,), torch.int32),) if self.is_scaled else ()
        return (((n_rows, self.features), self.wire), *exponent)

    def encode(self, rows_RD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.is_scaled:
            return (rows_RD.to(self.wire),)
        exponent_1 = _exponent(rows_RD)
        return torch.ldexp(rows_RD, _TOP - exponent_1).to(self.wire), exponent_1

    def decode(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, D] in `dtype`, from the first tensors of a message."""
        rows_RD = tensors[0].to(self.dtype)
        return torch.ldexp(rows_RD, tensors[1] - _TOP) if self.is_scaled else rows_RD


def _exponent(rows_RD: torch.Tensor) -> torch.Tensor:
    """[1] int32 e with |rows| < 2**e. Rows that are not finite travel unscaled: infinity and NaN arrive as such."""
    largest = rows_RD.abs().amax() if rows_RD.numel() else rows_RD.new_zeros(())
    exponent = torch.frexp(largest).exponent.clamp(min=_SMALLEST)
    return torch.where(largest.isfinite(), exponent, _TOP).to(torch.int32).reshape(1)
