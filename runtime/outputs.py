"""The model's outputs besides the loss while training: not materialised, and loud when touched."""

from __future__ import annotations

from typing import Any

import torch

from disagmoe_compile.errors import InputError


class UnmaterialisedOutput(torch.Tensor):
    """Has shape and dtype of an output that no rank holds whole. Any use of its values raises InputError."""

    index: int

    @staticmethod
    def __new__(cls, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> UnmaterialisedOutput:
        one = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        one.index = index
        return one

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnmaterialisedOutput(output {self.index}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __str__ = __repr__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = next(a for a in args if isinstance(a, cls))
        raise InputError(
            f"output {one.index} of the model (shape {tuple(one.shape)}) is spread over ranks and was not gathered while "
            f'training; pass options={{"gather_outputs": True}} to torch.compile to have it on every rank'
        )
