"""AF-Pipe in order: 1F1B interleaved over groups and the messages between them, in the slots of `plan/slots.py`.

The passes sorted by slot are a valid serial execution of the whole step. Each worker group takes its own stages out of it in that
order, so a blocking execution can never deadlock, ragged rounds, chunks and depths included.
"""

from __future__ import annotations

from collections.abc import Iterator

from disagmoe_compile.passes.schedule.order import Pass, checked_microbatches, place
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.slots import Slots
from disagmoe_compile.plan.topology import Topology


def in_order(
    topology: Topology,
    n_microbatches: int,
    *,
    split_weight_gradient: bool = True,
    interleave: int | None = None,
) -> Schedule:
    """Compute-only schedule of a training step. The first of p groups holds (L/p + 1) `interleave` - 1 activations of layers, and
    one of the head, however many micro-batches there are.

    `interleave`: micro-batches of a round; defaults to 4p, at most all. Raises ValueError on a size below 1.
    """
    checked_microbatches(n_microbatches, interleave)
    size = interleave or min(4 * topology.attention_groups, n_microbatches)
    passes = passes_by_slot(topology, n_microbatches, size)
    return place("af_pipe_in_order", topology, passes, split_weight_gradient)


def passes_by_slot(topology: Topology, n_microbatches: int, interleave: int) -> Iterator[Pass]:
    """Forward and backward passes of a training step, in the order of their slots."""
    groups = max(topology.attention_groups, topology.ffn_groups)
    slots = Slots(topology.n_boundaries, groups, interleave)
    passes: list[tuple[int, bool, int, int]] = []
    for stage in range(topology.n_stages):
        for i in range(n_microbatches):
            passes.append((slots.forward(stage, i), False, stage, i))
            passes.append((slots.backward(stage, i), True, -stage, i))
    for _, is_backward, stage, i in sorted(passes):
        yield not is_backward, abs(stage), i
