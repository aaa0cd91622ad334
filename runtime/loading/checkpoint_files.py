"""A folder of safetensors files as one table of tensors, read by name and by rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.placement import Rows

INDEX = "model.safetensors.index.json"

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor on disk. `dtype`: None for a type that torch does not have."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """`entries` by the names on disk. Only headers have been read."""

    path: Path
    entries: Mapping[str, Entry]

    @property
    def digest(self) -> str:
        """Of names, shapes, types and sizes of files, whatever folder they are in: equal for copies of one checkpoint."""
        sizes = sorted((one.name, one.stat().st_size) for one in {e.file for e in self.entries.values()})
        table = sorted((name, e.file.name, e.shape, str(e.dtype)) for name, e in self.entries.items())
        return hashlib.sha256(repr((sizes, table)).encode()).hexdigest()


class Reader:
    """Reads tensors, whole or some rows of them. Files stay open (mapped) as long as it lives."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._open: dict[Path, Any] = {}

    def read(self, name: str, rows: Rows | None = None) -> torch.Tensor:
        """Raises InputError where the file has changed or cannot be read."""
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = _open(file)
            where = ... if rows is None else slice(*rows)
            mapped: torch.Tensor = self._open[file].get_slice(name)[where]
            return mapped.clone()  # of its own: what it is now is a view of the mapped file
        except Exception as error:  # safetensors has an error class of its own for each kind of damage
            raise InputError(f"cannot read tensor {name} of {file}: {error}") from error


def open_checkpoint(path: Path) -> CheckpointFiles:
    """The tensors of a folder with an index, of all safetensors files of a folder, or of one file. Raises InputError."""
    if path.is_file():
        return CheckpointFiles(path, _entries_of([path]))
    if not path.is_dir():
        raise InputError(
            f"no checkpoint at {path}: give a local folder with safetensors files (`hf download` fetches one), or a file"
        )
    index = path / INDEX
    if index.is_file():
        return CheckpointFiles(path, _entries_by_index(index))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"no safetensors file in {path}: other formats (.bin, .pt) cannot be read by parts")
    return CheckpointFiles(path, _entries_of(files))


def _entries_by_index(index: Path) -> dict[str, Entry]:
    try:
        listed: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    found = _entries_of(sorted({index.parent / name for name in listed.values()}))
    missing = next((name for name in listed if name not in found), None)
    if missing is not None:
        raise InputError(
            f"{index} lists tensor {missing}, but {listed[missing]} does not hold it: fetch the files again"
        )
    return {name: found[name] for name in listed}


def _entries_of(files: list[Path]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for file in files:
        try:
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                if name in found:
                    raise InputError(
                        f"tensor {name} is in {found[name].file.name} and in {file.name} of {file.parent}: keep one"
                    )
                header = opened.get_slice(name)
                found[name] = Entry(file, tuple(header.get_shape()), _DTYPES.get(header.get_dtype()))
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"cannot read {file}: {error}") from error
    return found


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            "reading safetensors files needs the package safetensors: pip install safetensors"
        ) from None
    return safe_open(str(file), framework="pt", device="cpu")
