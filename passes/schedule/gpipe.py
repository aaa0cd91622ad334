"""GPipe: every forward, then every backward. Simple, and the memory of all micro-batches at once."""

from __future__ import annotations

from disagmoe_compile.passes.schedule.order import checked_microbatches, interleaved, place
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Topology


def gpipe(topology: Topology, n_microbatches: int, *, split_weight_gradient: bool = True) -> Schedule:
    """Compute-only schedule of a training step: AF-Pipe's order with all micro-batches in one group, so nothing interleaves."""
    checked_microbatches(n_microbatches, None)
    passes = interleaved(topology.n_stages, n_microbatches, n_microbatches)
    return place("gpipe", topology, passes, split_weight_gradient)
