"""Optimizer state of global shape, loaded before the first call or from a whole checkpoint, becomes this
rank's part.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime.binding import BoundParameter, holder_of


def slice_optimizer_state(optimizer: torch.optim.Optimizer) -> int:
    """Cuts state tensors of the global shape down to the part; returns how many were cut.

    A tensor counts as laid out like its parameter if it has the same first dimension and as many dimensions
    (moments, and the factors of factored ones). State of a parameter that this rank does not hold is dropped.
    State that fits already, and scalars, are left alone. Raises DisagMoEError for a first dimension that is
    neither the whole's nor the part's.
    """
    cut = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            holder = holder_of(parameter)
            state = optimizer.state.get(parameter)
            if holder is None or not state:
                continue
            if not holder.bound.is_owned:
                cut += sum(isinstance(value, torch.Tensor) and value.numel() > 1 for value in state.values())
                del optimizer.state[parameter]
                continue
            for name, value in list(state.items()):
                part = _part(value, holder.bound, name)
                if part is not None:
                    state[name] = part
                    cut += 1
    return cut


def _part(value: object, bound: BoundParameter, name: str) -> torch.Tensor | None:
    """The part of one state tensor; None where it may stay as it is."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        local: torch.Tensor = value.to_local()
        return local
    whole, rows = bound.placement.global_shape, bound.placement.ranges[bound.rank]
    if value.dim() != len(whole) or rows is None or value.shape[0] == bound.local_shape[0]:
        return None
    if value.shape[0] != whole[0]:
        raise DisagMoEError(
            f"optimizer state {name} of {bound.fqn} has shape {tuple(value.shape)}, which fits neither the whole parameter "
            f"{whole} nor this rank's part {bound.local_shape}: load the state of a whole model, or of the same plan"
        )
    return value[rows[0] : rows[1]].clone()
