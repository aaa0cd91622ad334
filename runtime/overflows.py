"""An overflow on one rank is known to all, so that every rank's GradScaler skips the step, or none does.

torch.amp.GradScaler looks at the gradients of its own rank alone, and decides before `optimizer.step()`, where no hook of an
optimizer could mend it. A rank may also have no gradient of an optimizer at all (its parameters live elsewhere), which
GradScaler takes for a mistake. So the one place where it looks for overflows asks the other ranks too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.amp import GradScaler

from disagmoe_compile.runtime.agreement import gather_numbers
from disagmoe_compile.runtime.binding import holder_of

Overflows = dict[torch.device, torch.Tensor]  # by device of the gradients; 1.0 where one is not finite
_Unscale = Callable[[GradScaler, torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], Overflows]


def share_overflows() -> None:
    """From now on every GradScaler of the process does, for optimizers that hold bound parameters; once however often called."""
    if not hasattr(GradScaler._unscale_grads_, "__wrapped__"):
        GradScaler._unscale_grads_ = _of_all_ranks(GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _of_all_ranks(unscale: _Unscale) -> _Unscale:
    @functools.wraps(unscale)
    def unscale_grads(
        self: GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Overflows:
        found = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        holder = next(filter(None, map(holder_of, parameters)), None)
        if holder is None:
            return found
        mine = max((float(one) for one in found.values()), default=0.0)
        everyone = gather_numbers("the unscaling of a GradScaler", (mine, len(found)), holder.group)
        if everyone[:, 0].any():
            return {
                device: torch.ones_like(found_inf, device=device) for device in found or [found_inf.device]
            }
        if everyone[:, 1].any() and not found:  # the optimizer's gradients are all on other ranks
            return {found_inf.device: torch.zeros_like(found_inf)}
        return found

    return unscale_grads
