"""m2n_send and m2n_recv: where values leave one stage's ranks for another's, as calls in the top-level graph.

In one process they are the identity, so the graph runs anywhere and gradients flow back through the same
nodes; which Transfer a node is stands in its `meta["transfer"]`. Ranks never call these: they execute the
lowered schedule.
"""

from __future__ import annotations

import torch


def m2n_send(*tensors: torch.Tensor, transfer: str) -> tuple[torch.Tensor, ...]:
    """Hands `tensors` to the transfer of that name. Returns what the matching m2n_recv takes."""
    return tensors


def m2n_recv(sent: tuple[torch.Tensor, ...], transfer: str) -> tuple[torch.Tensor, ...]:
    """What arrives: the sent tensors, in order."""
    return sent
