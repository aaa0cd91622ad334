"""The one way a graph changes a buffer once its updates were recognised (`buffer_updates.py`).

    add_to_buffer(buffer, *deltas, in_place=..., once=...)

stands behind everything else, so whatever reads the buffer sees it as it was before the call. What runs here is one process.
Over micro-batches and ranks each delta of several samples is summed; one that is `once` is the same for every batch, and counts
once a call.
"""

from __future__ import annotations

import torch


def add_to_buffer(
    buffer: torch.Tensor, *deltas: torch.Tensor, in_place: bool, once: tuple[bool, ...]
) -> torch.Tensor:
    """The buffer's new value: the buffer itself where the model writes in place, else a new tensor for the buffer's place."""
    assert len(deltas) == len(once), "one delta, one flag"
    with torch.no_grad():
        total = buffer if in_place else buffer.clone()
        for delta in deltas:
            total.add_(delta)
    return total
