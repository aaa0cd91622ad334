"""How each parameter is made of tensors on disk, and the reading of some rows of it.

Most are one tensor of the same name. Hugging Face stacks experts that lie on disk one by one (`hf_names.py`); of these a rank
reads its own experts only, wherever the conversion leaves the experts apart until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.loading.checkpoint_files import CheckpointFiles, Reader
from disagmoe_compile.runtime.placement import Rows

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Convert = Callable[[Mapping[str, Sequence[torch.Tensor]]], torch.Tensor]


class Recipe(Protocol):
    """`keys`: the names on disk. `shape`, `dtype`: of what it makes."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    def read(self, reader: Reader, rows: Rows | None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies on disk."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, reader: Reader, rows: Rows | None) -> torch.Tensor:
        return reader.read(self.key, rows)


@dataclass(frozen=True, slots=True)
class Converted:
    """Made of several tensors by `convert`, which takes them by `sources` (any label -> names on disk, in order).

    `is_stack`: row i of the result is made of the i-th tensor of every source alone.
    """

    sources: Mapping[str, tuple[str, ...]]
    convert: Convert
    is_stack: bool
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.sources.values() for key in keys)

    def read(self, reader: Reader, rows: Rows | None) -> torch.Tensor:
        part = slice(*(rows or (None,)))
        if self.is_stack:
            return self.convert({s: [reader.read(k) for k in keys[part]] for s, keys in self.sources.items()})
        whole = self.convert({s: [reader.read(k) for k in keys] for s, keys in self.sources.items()})
        return whole if rows is None else whole[part].clone()


@dataclass(frozen=True, slots=True)
class CheckpointValues:
    """`recipes`: by the parameter's name; several for a tied one that lies on disk more than once."""

    files: CheckpointFiles
    recipes: Mapping[str, tuple[Recipe, ...]]

    @property
    def identity(self) -> str:
        return f"safetensors {self.files.digest}"

    def read(self, wanted: Mapping[str, Rows | None]) -> dict[str, torch.Tensor]:
        """Raises InputError for damaged files, and for copies of a tied parameter that are not equal."""
        reader = Reader(self.files.entries)
        return {name: self._read(name, rows, reader) for name, rows in wanted.items()}

    def _read(self, name: str, rows: Rows | None, reader: Reader) -> torch.Tensor:
        first, *others = self.recipes[name]
        value = first.read(reader, rows)
        for other in others:
            if not torch.equal(other.read(reader, rows), value):
                raise InputError(
                    f"{', '.join(first.keys)} and {', '.join(other.keys)} are one tied parameter, but {self.files.path} "
                    "holds different values for them: build the model untied (tie_word_embeddings=False)"
                )
        return value


def check_recipe(name: str, recipe: Recipe, target: torch.Tensor, path: object) -> None:
    """Raises InputError where what is on disk has another shape than `target`, or a type that cannot become its type."""
    source = recipe.keys[0] if len(recipe.keys) == 1 else f"{recipe.keys[0]} ... {recipe.keys[-1]}"
    if recipe.shape != tuple(target.shape):
        raise InputError(
            f"{name} has shape {tuple(target.shape)} in the model and {recipe.shape} in {path} ({source}): "
            "build the model with the checkpoint's config"
        )
    if recipe.dtype != target.dtype and not (recipe.dtype in _FLOATS and target.dtype in _FLOATS):
        raise InputError(
            f"{name} is {target.dtype} in the model and {recipe.dtype or 'of a type unknown to torch'} in {path} ({source}): "
            "quantised checkpoints cannot be trained; convert it to bfloat16 first"
        )
