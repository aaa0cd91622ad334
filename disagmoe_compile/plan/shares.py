"""Who takes how much of what: fair shares, contiguous and in order, that differ by at most one; the larger ones come first."""

from __future__ import annotations


def fair_share(total: int, parts: int, index: int) -> range:
    """Of 0..total-1, what part `index` of `parts` takes; empty for the last ones where there are more parts than things."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


def samples_of(batch_size: int, members: int, n_microbatches: int, member: int, microbatch: int) -> range:
    """Samples of a batch that member `member` of an attention group takes in a micro-batch.

    The members share the batch, then each its part over the micro-batches: samples of a member follow each other, and of all
    these sizes no two differ by more than one.
    """
    mine = fair_share(batch_size, members, member)
    part = fair_share(len(mine), n_microbatches, microbatch)
    return range(mine.start + part.start, mine.start + part.stop)
