"""AF-Pipe: attention and FFN groups exchange micro-batches, forwards of one set running beside backwards of the set before."""

from __future__ import annotations

from disagmoe_compile.passes.schedule.order import (
    checked_microbatches,
    default_interleave,
    interleaved,
    place,
)
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Topology


def af_pipe(
    topology: Topology,
    n_microbatches: int,
    *,
    split_weight_gradient: bool = True,
    interleave: int | None = None,
) -> Schedule:
    """Compute-only schedule of a training step. At most 2 * `interleave` micro-batches are in flight, however many there are.

    `interleave` defaults to min(4p, half of the micro-batches), p the number of attention groups. Raises ValueError on a size
    below 1.
    """
    checked_microbatches(n_microbatches, interleave)
    size = interleave or default_interleave(topology, n_microbatches)
    passes = interleaved(topology.n_stages, n_microbatches, size)
    return place("af_pipe", topology, passes, split_weight_gradient)
