"""What all ranks must hold in common, compared before it can do harm. A difference raises on every rank,
never on one alone.

All functions here are collective over the control group (CPU tensors). What a script reaches by itself (a call of the model,
`backward()`, `step()`, clipping) meets in records of one size that say where the rank is: gloo would end a process that gets a
message of another size, and ranks at different places must be told so.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DivergenceError
from disagmoe_compile.runtime.failure import default_store, describe_failure

_PLACE_BYTES = 64
_BODY_BYTES = 64
_DIGEST_BYTES = 16
_NONE = -1


def agree(place: str, values: Mapping[str, bytes | str], group: dist.ProcessGroup, advice: str = "") -> None:
    """Raises DivergenceError on all ranks unless each value is the same on all.

    `place`: where in the script the rank is. A name of `values` says what is compared, and `advice` what to do: "rank 2 differs
    from rank 0 in {name}: {advice}". At most four values; only a digest of 16 bytes of each travels.
    """
    mine = b"".join(_digest(value) for value in values.values())
    bodies = _meet(place, mine, group)
    for position, name in enumerate(values):
        part = slice(position * _DIGEST_BYTES, (position + 1) * _DIGEST_BYTES)
        different = [rank for rank, body in enumerate(bodies) if body[part] != bodies[0][part]]
        if different:
            raise DivergenceError(
                f"{_ranks(different, 'differs', 'differ')} from rank 0 in {name}"
                + (f": {advice}" if advice else "")
            )


def gather_numbers(place: str, numbers: Sequence[float], group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's numbers, float64 [ranks, len(numbers)]; at most eight. `place`: where in the script the rank is."""
    layout = f"<{len(numbers)}d"
    bodies = _meet(place, struct.pack(layout, *numbers), group)
    return torch.tensor([struct.unpack_from(layout, body) for body in bodies], dtype=torch.float64)


def _meet(place: str, body: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's body, in rank order, padded. Raises DivergenceError on all ranks where ranks are at different places, and
    PeerError where one does not come."""
    assert len(place.encode()) <= _PLACE_BYTES and len(body) <= _BODY_BYTES, place
    record = bytearray(place.encode().ljust(_PLACE_BYTES) + body.ljust(_BODY_BYTES, b"\0"))
    everyone = torch.empty(dist.get_world_size(group) * len(record), dtype=torch.uint8)
    try:
        dist.all_gather_single(everyone, torch.frombuffer(record, dtype=torch.uint8), group=group)
    except RuntimeError as error:
        raise describe_failure(error, dist.get_rank(), place, [], default_store()) from error
    records = [bytes(part.tolist()) for part in everyone.split(len(record))]
    places = [one[:_PLACE_BYTES].decode().rstrip() for one in records]
    elsewhere = [rank for rank, other in enumerate(places) if other != places[0]]
    if elsewhere:
        raise DivergenceError(
            f"{_ranks(elsewhere, 'is', 'are')} at {places[elsewhere[0]]} where rank 0 is at {places[0]}: under torchrun every "
            "rank must call the model, backward() and its optimizers in the same order, and none may skip one"
        )
    return [one[_PLACE_BYTES:] for one in records]


def _digest(value: bytes | str) -> bytes:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).digest()[:_DIGEST_BYTES]


def _ranks(ranks: Sequence[int], one: str, several: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {list(ranks)} {several}"


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
