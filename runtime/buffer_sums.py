"""Sums of what a call adds to buffers: over micro-batches on a rank, then over ranks, applied once at the end of the call.

Whole numbers are summed as int64 and the rest as float64, so the order of the parts leaves no trace in a buffer of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from disagmoe_compile.runtime.stages import BufferDelta


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """Argument `position` of the call grows by the sum of its deltas. `output`: flat output of the graph that is its new value;
    a new tensor takes the buffer's place unless `in_place`.
    """

    position: int
    in_place: bool
    output: int | None


class BufferSums:
    """Of one rank and one call: position of the buffer -> sum so far, in the buffer's shape."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def add(
        self,
        deltas: Mapping[int, BufferDelta],
        outputs: Sequence[torch.Tensor],
        arguments: Sequence[object],
        *,
        is_first: bool,
    ) -> None:
        """`is_first`: of all micro-batches of all replicas, the one that counts what is the same in each."""
        for position, delta in deltas.items():
            if is_first or not delta.once:
                buffer = arguments[delta.position]
                assert isinstance(buffer, torch.Tensor)
                total = self.sums.setdefault(delta.position, zero_sum(buffer))
                total += outputs[position].detach()


def zero_sum(buffer: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if buffer.is_floating_point() else torch.int64
    return torch.zeros(buffer.shape, dtype=dtype, device=buffer.device)


def apply_updates(
    updates: Sequence[BufferUpdate],
    arguments: Sequence[object],
    sums: Mapping[int, torch.Tensor],
    all_reduce: Callable[[torch.Tensor], object],
) -> dict[int, torch.Tensor]:
    """Collective. New values by output index, of the buffers whose new value is an output of the graph."""
    buffers: list[torch.Tensor] = [arguments[update.position] for update in updates]  # type: ignore[misc]
    totals = [sums.get(u.position, zero_sum(buffer)) for u, buffer in zip(updates, buffers, strict=True)]
    for dtype in (torch.int64, torch.float64):
        _reduce_together([total for total in totals if total.dtype == dtype], all_reduce)
    new: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for update, buffer, total in zip(updates, buffers, totals, strict=True):
            target = buffer if update.in_place else buffer.clone()
            target.add_(total)
            if update.output is not None:
                new[update.output] = target
    return new


def _reduce_together(totals: Iterable[torch.Tensor], all_reduce: Callable[[torch.Tensor], object]) -> None:
    """One message for all of them; each becomes its sum over the ranks."""
    totals = list(totals)
    if totals:
        flat = torch.cat([total.reshape(-1) for total in totals])
        all_reduce(flat)
        for total, part in zip(totals, flat.split([t.numel() for t in totals]), strict=True):
            total.copy_(part.view(total.shape))
