"""Real text as byte tokens: by default the `.py` files of the running Python's standard library.

One token a byte (ids 0..255), files in sorted order, so that every rank and every rerun reads the same
batches.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from disagmoe_compile.errors import InputError

BYTE_VOCABULARY = 256
_CORPUS_BYTES = 8 << 20  # enough for tens of thousands of sequences; the rest of the library is not read


def batches(
    path: str | Path | None, batch_size: int, seq_length: int, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches `{"input_ids", "labels"}`, both int64 [batch_size, seq_length] and equal (the model
    shifts).

    Each sequence starts at a position drawn from a private generator with that seed. `path` is a file or a
    folder (its `.py`, `.txt` and `.md` files); None means the standard library. Raises InputError where it
    holds less than one sequence.
    """
    text = corpus(path)
    if len(text) < seq_length:
        where = f"{path} holds" if path is not None else "the standard library holds"
        raise InputError(f"data: {where} {len(text)} bytes, less than one sequence of {seq_length}")
    return _draw(text, batch_size, seq_length, seed)


def _draw(
    text: torch.Tensor, batch_size: int, seq_length: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    offsets_S = torch.arange(seq_length)
    while True:
        starts_B = torch.randint(0, len(text) - seq_length + 1, (batch_size,), generator=generator)
        ids_BS = text[starts_B[:, None] + offsets_S].long()
        yield {"input_ids": ids_BS, "labels": ids_BS.clone()}


def corpus(path: str | Path | None) -> torch.Tensor:
    """The text as uint8 [bytes], at most 8 MiB of it. Raises InputError where there is nothing to read."""
    files = _files(Path(path)) if path is not None else _standard_library()
    text = bytearray()
    for file in files:
        if len(text) >= _CORPUS_BYTES:
            break
        try:
            text += file.read_bytes()
        except OSError as error:
            raise InputError(f"data: cannot read {file}: {error.strerror}") from error
    if not text:
        raise InputError(f"data: {path or 'the standard library'} is empty")
    return torch.frombuffer(text[:_CORPUS_BYTES], dtype=torch.uint8)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    if not files:
        raise InputError(
            f"data: this Python has no .py files in {root}; name some text with --data FILE_OR_DIR"
        )
    return files


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"data: no such file or folder: {path}")
    files = sorted(f for f in path.rglob("*") if f.suffix in (".py", ".txt", ".md") and f.is_file())
    if not files:
        raise InputError(f"data: {path} holds no .py, .txt or .md file")
    return files
