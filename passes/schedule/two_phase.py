"""Two phases: every forward, then, whenever the script calls `backward()`, every backward. For losses that the script computes.

The phases are lowered each by itself: no message, wait or buffer of one reaches into the other, so the second may run later or
never.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.passes.schedule.order import (
    backwards,
    checked_microbatches,
    default_interleave,
    forwards,
    place,
)
from disagmoe_compile.plan.ir import Schedule, Transfer
from disagmoe_compile.plan.topology import Topology

NAME = "two_phase"


def two_phase(
    topology: Topology,
    n_microbatches: int,
    transfers: Sequence[Transfer],
    *,
    owned_stages: Collection[int],
    split_weight_gradient: bool = True,
) -> Schedule:
    """The lowered schedule; `plan.phases` takes it apart again. Activations of all micro-batches are held in between.

    Raises ValueError on a size below 1, and what `lower` raises.
    """
    checked_microbatches(n_microbatches, None)
    size = default_interleave(topology, n_microbatches)
    first = place(NAME, topology, forwards(topology.n_stages, n_microbatches, size), False)
    second = place(NAME, topology, backwards(topology.n_stages, n_microbatches, size), split_weight_gradient)
    lowered = [
        lower(first, topology, transfers, owned_stages=()),
        lower(second, topology, transfers, owned_stages=owned_stages),
    ]
    actions = {group: (*lowered[0].of(group), *lowered[1].of(group)) for group in topology.groups}
    return Schedule(NAME, lowered=True, actions=actions)
