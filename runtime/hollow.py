"""Tensors with a shape and no storage: what Dynamo may look at where a rank must not hold the whole."""

from __future__ import annotations

import torch


def hollow(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Reading it is undefined."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and device without storage. Reading it is undefined."""
    return hollow(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
