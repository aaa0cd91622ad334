"""A system whose workers are all alike, on a cluster of two kinds of nodes: the best of what it can do there.

    equal shares    one copy on all GPUs. Its all-to-alls keep them in step: each part lasts as long as on the kind slower at it
    by speed        the same, with batch and experts shared out by speed of matmuls, or some of the way there (`BY_SPEED`): the
                    faster kind computes, sends and holds more (`MixedCluster.in_step`)
    one kind alone  one copy on either kind; the other idles, and is charged for
    side by side    a copy on each kind with sizes of its own, as uneven data-parallel replicas, the batch shared out by speed

In the system's favour: shares by speed need no whole number of experts or sequences. Side by side is an upper bound: it leaves
out the sums of gradients between the two copies, and adds their speeds as if both ended at once. Against it: with shares by speed
what every GPU holds whole, as dense weights, is taken to grow with the share as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster, mean_flops
from disagmoe_compile.simulator.results import Result
from disagmoe_compile.simulator.timeline import Share

BY_SPEED = (1.0, 0.75, 0.5, 0.25)
"""How far from equal shares to those in proportion to speed, until one fits: the faster kind may have no memory for its share."""
EQUAL_SHARES = "all in step, equal shares"
"""Where all GPUs do the same, at the pace of the slower kind."""

Place = TypeVar("Place", bound=AnyCluster)
Search = Callable[[Cluster, int, Result | None], Result]
"""On equal nodes, with at most so many sequences a step: the best sizes, or the result to beat where none is better. Raises
InputError where there are none.
"""


def best_placed(cluster: MixedCluster, sequences: int, search: Search) -> Result:
    """The fastest that fits in memory; `placement` in its options says which it is. Nodes that are all equal are one cluster.

    Raises InputError where there are no sizes for any.
    """

    def search_there(nodes: Cluster, beat: Result | None) -> Result:
        return search(nodes, sequences, beat)

    equal = (cluster.in_step(), EQUAL_SHARES)
    if cluster.is_one_kind:
        return fastest_place(cluster, [equal], search_there)
    found: Result | None = None
    try:
        copies = [search(kind, n, None) for kind, n in zip(cluster.kinds, _shares(cluster, sequences))]
        found = side_by_side(cluster, copies)
    except InputError:  # one kind alone does not do, as for sizes that are pinned for all GPUs
        pass
    for part in BY_SPEED:
        place = (cluster.in_step(part), f"all in step, shares {part:.0%} by speed")
        try:
            better = fastest_place(cluster, [place], search_there, found)
        except InputError:  # as for any other share
            break
        is_new, found = better is not found, better
        if is_new and found.fits:
            break
    alone = [(kind, f"{kind.nodes} x {kind.name} alone") for kind in cluster.kinds]
    return fastest_place(cluster, [equal, *alone], search_there, found)


def fastest_place(
    cluster: MixedCluster,
    places: Sequence[tuple[Place, str]],
    search: Callable[[Place, Result | None], Result],
    found: Result | None = None,
) -> Result:
    """The best of a search on each of the places, charged for all GPUs of the cluster, or `found` where none is better.

    Raises InputError where no place has sizes and there is nothing to beat.
    """
    refused: list[InputError] = []
    for on, placement in places:
        try:
            better = search(on, found)
        except InputError as error:
            refused.append(error)
            continue
        if better is not found:
            found = _charged(better, cluster, on, placement)
    if found is None:
        raise refused[0]
    return found


def side_by_side(cluster: MixedCluster, copies: Sequence[Result]) -> Result:
    """One step of a copy on each kind of nodes, in the kinds' order, as if both ended at once; see the module docstring.

    What is critical, and the timeline, are those of the copy that computes longer; memory is the fuller worker's.
    """
    tokens = sum(copy.tokens for copy in copies)
    step = tokens / sum(copy.tokens / copy.step_s for copy in copies)
    even = [_lasting(copy, step) for copy in copies]
    return replace(
        max(even, key=lambda copy: float(copy.critical.busy)),
        tokens=tokens,
        gpus=cluster.gpus,
        exposed_s=sum(copy.exposed_s * copy.gpus for copy in even) / cluster.gpus,
        bound=max((copy.bound for copy in even), key=lambda bound: bound.seconds),
        mfu=sum(copy.mfu * _peak(kind) for copy, kind in zip(copies, cluster.kinds)) / _peak(cluster),
        activation_bytes={"worker": max(copy.activation_bytes["worker"] for copy in copies)},
        peak_bytes={"worker": max(copy.peak_bytes["worker"] for copy in copies)},
        fits=all(copy.fits for copy in copies),
        options={
            "placement": "side by side",
            "copies": [
                {"cluster": kind.name, "gpus": copy.gpus, "tokens": copy.tokens, **copy.options}
                for copy, kind in zip(copies, cluster.kinds)
            ],
        },
    )


def _lasting(copy: Result, step: float) -> Result:
    """At the same speed with a share of the batch that takes `step` seconds."""
    share, bound, scale = copy.critical, copy.bound, step / copy.step_s
    return replace(
        copy,
        step_s=step,
        exposed_s=copy.exposed_s * scale,
        critical=Share(share.busy * scale, share.exposed * scale, share.bubble * scale),
        bound=replace(bound, seconds=bound.seconds * scale, critical_path=bound.critical_path * scale),
    )


def _charged(result: Result, cluster: MixedCluster, on: AnyCluster, placement: str) -> Result:
    """A result of some nodes, or of all at the slower kind's pace, charged for all GPUs of the cluster."""
    return replace(
        result,
        gpus=cluster.gpus,
        mfu=result.mfu * _peak(on) / _peak(cluster),
        options={"placement": placement, **result.options},
    )


def _shares(cluster: MixedCluster, sequences: int) -> tuple[int, int]:
    """Of the batch, at least one sequence each."""
    one, other = (_peak(kind) * kind.efficiencies.gemm.value for kind in cluster.kinds)
    first = max(1, min(round(sequences * one / (one + other)), sequences - 1))
    return first, max(1, sequences - first)


def _peak(cluster: AnyCluster) -> float:
    return mean_flops(cluster) * cluster.gpus
