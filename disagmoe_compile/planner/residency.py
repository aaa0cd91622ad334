"""How many activations a worker group holds at once, as the AF-Pipe schedule really runs (`passes/schedule/order.py`).

Micro-batches travel in sets of q, and forwards of one set run beside backwards of the set before:

    phase s of a round:   B(2B - s, 0)  F(s, 0)   B(2B - s, 1)  F(s, 1)   ...   (q of each; stages 0 .. 2B, the head is 2B)

At the start of phase s a group holds q activations of each of its stages t < s (new set) and of each t <= 2B - s (old set). In
the phase it gains q of stage s, if that is its own; where 2B - s is its own too, a backward frees one before each that is made.
With q = 4p that is 4L + 4p (micro-batch, layer) activations, one more than the in-order AF-Pipe of the paper holds.
Tests hold these numbers equal to those counted on generated schedules.
"""

from __future__ import annotations

from collections.abc import Sequence


def peak_resident(weights: Sequence[float], in_flight: int) -> float:
    """Most of `weights` held at once; entry s is what one micro-batch keeps at stage s, 0 where the group does not run it.

    In the unit of `weights`: with ones a count, with bytes bytes. For at least 2 * `in_flight` micro-batches; fewer hold less.
    """
    last = len(weights) - 1
    held = in_flight * sum(weights)  # all of the old set
    peak = held
    for s, gained in enumerate(weights):
        held += in_flight * (gained - weights[last - s])
        peak = max(peak, held)
    return peak


def group_of_boundary(boundary: int, n_boundaries: int, groups: int, *, tied_head: bool) -> int:
    """Boundary b on group b mod p; the head (b = `n_boundaries`) on group 0 where it shares the embedding. As `plan/topology`."""
    return 0 if tied_head and boundary == n_boundaries else boundary % groups
