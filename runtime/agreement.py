"""What all ranks must hold in common, compared before it can do harm. A difference raises on every rank,
never on one alone.

All functions here are collective over the control group (CPU tensors).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DivergenceError

_DIGEST_BYTES = 32
_NONE = -1


def agree(name: str, value: bytes | str, group: dist.ProcessGroup, advice: str = "") -> None:
    """Raises DivergenceError on all ranks unless `value` is the same on all.

    `name` says what is compared and `advice` what to do: "rank 2 differs from rank 0 in {name}: {advice}".
    Only a digest of 32 bytes travels.
    """
    digests = gather_digests(value, group)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        ranks = f"rank {different[0]} differs" if len(different) == 1 else f"ranks {different} differ"
        raise DivergenceError(f"{ranks} from rank 0 in {name}" + (f": {advice}" if advice else ""))


def gather_digests(value: bytes | str, group: dist.ProcessGroup) -> list[bytes]:
    """SHA-256 of every rank's value, in rank order."""
    data = value.encode() if isinstance(value, str) else value
    mine = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
    everyone = torch.empty(dist.get_world_size(group) * _DIGEST_BYTES, dtype=torch.uint8)
    dist.all_gather_single(everyone, mine, group=group)
    return [bytes(part.tolist()) for part in everyone.split(_DIGEST_BYTES)]


def batch_digest(tensors: Iterable[object]) -> bytes:
    """SHA-256 over dtype, shape and every byte of the tensors, and over other values by their repr.

    All bytes count, because the batch is small beside the work on it and a sample would miss what it skips.
    Tensors on a device are copied to the host, so call it once a step. Values are tagged and length-prefixed:
    nothing runs into its neighbour.
    """
    digest = hashlib.sha256()
    for value in tensors:
        if isinstance(value, torch.Tensor):
            header = f"tensor {value.dtype} {tuple(value.shape)}"
            body = memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            header, body = f"value {type(value).__name__}", memoryview(repr(value).encode())
        digest.update(f"{header} {len(body)};".encode())
        digest.update(body)
    return digest.digest()


def broadcast_text(text: str | None, group: dist.ProcessGroup) -> str:
    """Rank 0's text on every rank; the others pass None.

    Raises DivergenceError on all ranks where rank 0 has none: it failed to make what the others wait for.
    """
    data = b"" if text is None else text.encode()
    is_source = dist.get_rank(group) == 0
    size = torch.tensor([_NONE if text is None else len(data)])
    source = dist.get_global_rank(group, 0)
    dist.broadcast(size, source, group=group)
    length = int(size)
    if length == _NONE:
        raise DivergenceError(
            "rank 0 had nothing to send where the other ranks wait for its text; see rank 0's error"
        )
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_source and data else None
    buffer = torch.empty(length, dtype=torch.uint8) if payload is None else payload
    if length:
        dist.broadcast(buffer, source, group=group)
    return bytes(buffer.tolist()).decode()


def gather_numbers(numbers: Sequence[float], group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's numbers, float64 [ranks, len(numbers)]."""
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    everyone = torch.empty(dist.get_world_size(group) * len(numbers), dtype=torch.float64)
    dist.all_gather_single(everyone, mine, group=group)
    return everyone.view(-1, len(numbers))
