"""Pairs sorted by expert: which ids are sorted, by which permutation, and that the rows of every expert are counted.

    perm = argsort(ids.flatten())       counts = histc(ids), bincount(ids), one_hot(ids).sum, zeros.scatter(1, ids, 1).sum(0)

Legend: T tokens, k experts a token, P = T * k pairs, E experts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.ids import are_below, are_distinct, is_written
from disagmoe_compile.passes.styles.rowwise import strip_casts, without_a_cast
from disagmoe_compile.passes.styles.zeros import is_zero

_FLATTENS = ("view", "reshape", "flatten", "ravel")


@dataclass(frozen=True, slots=True)
class Sorting:
    """`expert_ids` [P], `perm` [P] that sorts them, and the sorted ids [P] if the graph has them."""

    expert_ids: fx.Node
    perm: fx.Node
    sorted_ids: fx.Node | None


def sorting_behind_offsets(offsets: fx.Node) -> Sorting:
    """Raises NoMatch where group offsets are not those of sorted pairs."""
    counts = strip_casts(offsets)
    if not is_call(counts, "cumsum"):
        raise NoMatch(counts, "group offsets are not a cumulative sum of counts")
    return sorting_behind_counts(counts.args[0])  # type: ignore[arg-type]


def sorting_behind_counts(counts: fx.Node) -> Sorting:
    """Raises NoMatch where it is not certain that `counts` [E] are the numbers of pairs of sorted ids."""
    ids = _counted(strip_casts(counts))
    if ids.target is operator.getitem and is_call(ids.args[0], "sort"):
        ids = ids.args[0].args[0]  # type: ignore[union-attr, assignment]
    flat = [
        same
        for base in _unflattened(ids)
        for same in (base, *(user for user in base.users if is_call(user, *_FLATTENS)))
    ]
    for candidate in (node for node in flat if rank_of(node) == 1):
        for user in candidate.users:
            if is_call(user, "argsort", "sort") and user.kwargs.get("descending"):
                raise NoMatch(user, "it sorts the last expert first")
            if is_call(user, "argsort"):
                return Sorting(candidate, user, None)
            if is_call(user, "sort"):
                parts = {part.args[1]: part for part in user.users if part.target is operator.getitem}
                if 1 in parts:
                    return Sorting(candidate, parts[1], parts.get(0))
    raise NoMatch(ids, "the ids that are counted are not sorted")


def _counted(counts: fx.Node) -> fx.Node:
    """The ids whose number for every expert `counts` is."""
    if is_call(counts, "histc", "bincount"):
        if is_call(counts, "histc") and not _counts_every_expert(counts):
            raise NoMatch(counts, "it does not count the rows of each expert")
        return strip_casts(counts.args[0])  # type: ignore[arg-type]
    if is_call(counts, "sum") and is_tensor(counts.args[0]) and not argument(counts, 2, "keepdim", False):
        mask = strip_casts(counts.args[0])  # type: ignore[arg-type]
        dims = argument(counts, 1, "dim")
        listed = tuple(dims) if isinstance(dims, tuple | list) else (dims,)
        if is_call(mask, "one_hot") and listed == tuple(range((rank_of(mask) or 0) - 1)):
            return strip_casts(mask.args[0])  # type: ignore[arg-type]
        if is_call(mask, "scatter") and listed == (0,) and rank_of(mask) == 2:
            ids, number = argument(mask, 2, "index"), argument(mask, 3, "src", argument(mask, 3, "value"))
            if (
                argument(mask, 1, "dim") in (1, -1)
                and number == 1
                and is_zero(mask.args[0])
                and are_distinct(ids)
            ):
                return strip_casts(ids)
    raise NoMatch(
        counts,
        "it is not certain that it counts the rows of each expert (histc, bincount, a sum of one-hots)",
    )


def _counts_every_expert(histogram: fx.Node) -> bool:
    """`histc(ids, bins=E, min=0, max=E - 1)`: a bin for every expert. `max=E` counts an id E with the last expert."""
    bins, low, high = (
        argument(histogram, place, name, default)
        for place, name, default in ((1, "bins", 100), (2, "min", 0), (3, "max", 0))
    )
    if low != 0 or high not in (bins - 1, bins):
        return False
    return high == bins - 1 or are_below(histogram.args[0], bins)  # type: ignore[arg-type]


def _unflattened(ids: fx.Node) -> list[fx.Node]:
    """`ids`, then what it flattens, then that without each of its casts, which copy: what is written to meanwhile differs."""
    found = [ids]
    if is_call(ids, *_FLATTENS) and rank_of(ids) == 1 and is_tensor(ids.args[0]):
        found.append(ids.args[0])  # type: ignore[arg-type]
    while (before := without_a_cast(found[-1])) is not None and not is_written(before):
        found.append(before)
    return found
