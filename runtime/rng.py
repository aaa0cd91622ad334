"""Random numbers that do not depend on how the work is spread, and that leave the user's generators in step
on all ranks.

Each call draws one seed from the global CPU generator, which advances it by the same amount on every rank.
Everything random inside a stage runs under a generator of its own, seeded from (call seed, micro-batch,
stage, slice): recomputing a stage gives the same numbers, and neither order nor rank decides them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEED_BITS = 63


def draw_call_seed() -> int:
    """A seed from torch's global CPU generator; equal on all ranks whose generators are, so compare it with
    the batch.
    """
    return int(torch.randint(0, 2**_SEED_BITS - 1, (), dtype=torch.int64))


def derive_seed(call_seed: int, microbatch: int, stage: int, rank_slice: int) -> int:
    """An independent 63-bit seed per (micro-batch, stage, slice of the batch) of one call."""
    key = f"{call_seed}/{microbatch}/{stage}/{rank_slice}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> (64 - _SEED_BITS)


@contextmanager
def private_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of the CPU and of `device` start from `seed`; afterwards they are as they
    were.
    """
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.device(device):
                getattr(torch, device.type).manual_seed(seed)
        yield
