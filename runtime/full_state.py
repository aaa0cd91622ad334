"""The whole model in one place: what `torch.save` wants, from ranks that each hold a part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from disagmoe_compile.runtime.binding import Holder, as_bytes, holder_of, part_of

_TAG = 31  # of the messages that carry parts; one at a time, so one tag is enough


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state as plain tensors of the global shapes in CPU memory on rank 0; on other ranks an empty dict.

    All ranks must call it. `model` is the model or what torch.compile made of it; names are those of the plain model, so that
    `plain.load_state_dict(torch.load(file))` takes what rank 0 saves. A model that no call has spread over ranks is copied
    where it stands, on every rank. Each message waits at most the model's `timeout_s`.
    """
    module: nn.Module = getattr(model, "_orig_mod", model)
    state = module.state_dict()  # first: by its hooks a copy of a spread model gets to know that it is one
    parameters = dict(module.named_parameters(remove_duplicate=False))
    holders = {name: holder for name, p in parameters.items() if (holder := holder_of(p)) is not None}
    is_target = not holders or next(iter(holders.values())).bound.rank == 0
    found: dict[str, torch.Tensor] = {}
    whole: dict[int, torch.Tensor] = {}  # tied parameters travel once
    for name, value in state.items():
        holder = holders.get(name)
        if holder is not None:
            key = id(parameters[name])
            if key not in whole:
                whole[key] = _gather(parameters[name].detach(), holder)
            value = whole[key]
        elif is_target and isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", copy=True)
        if is_target:
            found[name] = value
    return found


def _gather(part: torch.Tensor, holder: Holder) -> torch.Tensor:
    """The whole parameter on rank 0; elsewhere an empty tensor."""
    bound = holder.bound
    senders = [rank for rank in sorted(bound.placement.ranges) if bound.placement.counts_on(rank)]
    if bound.rank != 0:
        if bound.rank in senders and bound.parameter.numel():
            dist.send(as_bytes(part.cpu()), 0, group=holder.group, tag=_TAG)
        return part.new_empty(0, device="cpu")
    result = torch.empty(bound.placement.global_shape, dtype=part.dtype)
    for rank in senders:
        target = part_of(result, bound.placement, rank)
        if rank == 0:
            target.copy_(part)
        elif target.numel():
            dist.recv(as_bytes(target), rank, group=holder.group, tag=_TAG)
    return result
