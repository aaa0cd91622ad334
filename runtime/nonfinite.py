"""A gradient that overflowed on one rank is known to all, so that a GradScaler skips the step on all ranks or
on none.

torch.amp.GradScaler looks at the gradients of its own rank and then decides whether to call `step()` at all,
which no hook of an optimizer can mend. So it must find the overflow in its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from disagmoe_compile.runtime.agreement import gather_numbers


def has_nonfinite(gradients: Sequence[torch.Tensor]) -> bool:
    """One read of the gradients, one synchronisation with their device."""
    if not gradients:
        return False
    largest = torch.stack([n.double() for n in torch._foreach_norm(list(gradients), float("inf"))])
    return not bool(torch.isfinite(largest).all())


def spread_nonfinite(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Collective. Returns the ranks whose gradients are not finite; if any, the first gradient of each other
    rank gets an inf.

    Call it at the end of backward when the loss is scaled (the incoming gradient is not 1), and only then:
    without a scaler a non-finite gradient would go to its own parameter alone, as in one process.
    """
    mine = has_nonfinite(gradients)
    ranks = tuple(
        rank for rank, flag in enumerate(gather_numbers((float(mine),), group)[:, 0].tolist()) if flag
    )
    if ranks and not mine:
        for gradient in gradients[:1]:
            gradient[(0,) * gradient.dim()] = float("inf")
    return ranks
