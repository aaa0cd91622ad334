"""The forward alone: evaluation, and any call without gradients."""

from __future__ import annotations

from disagmoe_compile.passes.schedule.order import checked_microbatches, default_interleave, forwards, place
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Topology


def forward_only(topology: Topology, n_microbatches: int, *, interleave: int | None = None) -> Schedule:
    """Compute-only schedule of forwards. `interleave` micro-batches go through the stages together; see `af_pipe`."""
    checked_microbatches(n_microbatches, interleave)
    size = interleave or default_interleave(topology, n_microbatches)
    passes = forwards(topology.n_stages, n_microbatches, size)
    return place("forward_only", topology, passes, split_weight_gradient=False)
