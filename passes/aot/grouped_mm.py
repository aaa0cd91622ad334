"""Operators over rows that are sorted by expert, each with a deterministic backward.

Every expert owns one contiguous run of rows; `offsets_E` (int32) holds the inclusive end of each run, so expert e owns rows
`offsets[e-1]:offsets[e]`. Runs may be empty. The gradient of the rows and the gradient of the weights are separate operators:
a stage can send its input gradient before it computes its weight gradient.

Legend: P rows, E experts of this rank, K and N the inner and outer size of a product, X any trailing shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# What torch._grouped_mm accepts: rows of every operand start at multiples of this many bytes.
_KERNEL_ALIGNMENT_BYTES = 16


def runs(offsets_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert, empty runs included. Copies the offsets to the host."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        yield expert, start, end
        start = end


def _kernel_accepts(*operands: Tensor) -> bool:
    """Whether the fused CUDA kernel takes these operands: bf16, one unit stride each, 16-byte rows."""
    for operand in operands:
        if operand.device.type != "cuda" or operand.dtype != torch.bfloat16 or operand.numel() == 0:
            return False
        strides = operand.stride()
        if 1 not in strides[-2:]:
            return False
        if any(s != 1 and s * operand.element_size() % _KERNEL_ALIGNMENT_BYTES for s in strides):
            return False
        if operand.data_ptr() % _KERNEL_ALIGNMENT_BYTES:
            return False
    return True


@torch.library.custom_op("disagmoe::grouped_mm", mutates_args=())
def grouped_mm(x_PK: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """out[p] = x[p] @ weight[expert of row p]; rows past the last run give zeros. `weight` may be a transposed view."""
    if _kernel_accepts(x_PK, weight_EKN):
        return torch._grouped_mm(x_PK, weight_EKN, offs=offsets_E)
    out_PN = x_PK.new_empty(x_PK.shape[0], weight_EKN.shape[2])
    end = 0
    for expert, start, end in runs(offsets_E):
        if end > start:
            torch.mm(x_PK[start:end], weight_EKN[expert], out=out_PN[start:end])
    out_PN[end:].zero_()
    return out_PN


@grouped_mm.register_fake
def _(x_PK: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_PK.new_empty(x_PK.shape[0], weight_EKN.shape[2])


@torch.library.custom_op("disagmoe::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(x_PK: Tensor, dy_PN: Tensor, offsets_E: Tensor) -> Tensor:
    """dw[e] = x[rows of e].T @ dy[rows of e]; zeros for an expert without rows."""
    if _kernel_accepts(x_PK.t(), dy_PN):
        dw_EKN = torch._grouped_mm(x_PK.t(), dy_PN, offs=offsets_E)
        counts_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
        return dw_EKN.masked_fill_(
            (counts_E == 0)[:, None, None], 0
        )  # the kernel need not write what has no rows
    dw_EKN = x_PK.new_empty(offsets_E.shape[0], x_PK.shape[1], dy_PN.shape[1])
    for expert, start, end in runs(offsets_E):
        if end > start:
            torch.mm(x_PK[start:end].t(), dy_PN[start:end], out=dw_EKN[expert])
        else:
            dw_EKN[expert].zero_()
    return dw_EKN


@grouped_mm_weight_grad.register_fake
def _(x_PK: Tensor, dy_PN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_PK.new_empty(offsets_E.shape[0], x_PK.shape[1], dy_PN.shape[1])


def _save_grouped_mm(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, dy_PN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_PK, weight_EKN, offsets_E = ctx.saved_tensors
    dx_PK = dw_EKN = None
    if ctx.needs_input_grad[0]:
        dx_PK = grouped_mm(dy_PN, weight_EKN.transpose(1, 2), offsets_E)
    if ctx.needs_input_grad[1]:
        # The gradient gets the layout of the parameter it flows back to, so that accumulating it is a plain addition.
        if weight_EKN.stride(1) == 1 and weight_EKN.stride(2) != 1:
            dw_EKN = grouped_mm_weight_grad(dy_PN, x_PK, offsets_E).transpose(1, 2)
        else:
            dw_EKN = grouped_mm_weight_grad(x_PK, dy_PN, offsets_E)
    return dx_PK, dw_EKN, None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_grouped_mm)


@torch.library.custom_op("disagmoe::segment_sum", mutates_args=())
def segment_sum(values_PX: Tensor, offsets_E: Tensor) -> Tensor:
    """out[e] = sum of the rows of expert e, in row order; zeros for an expert without rows."""
    out_EX = values_PX.new_empty(offsets_E.shape[0], *values_PX.shape[1:])
    for expert, start, end in runs(offsets_E):
        if end > start:
            torch.sum(values_PX[start:end], 0, out=out_EX[expert])
        else:
            out_EX[expert].zero_()
    return out_EX


@segment_sum.register_fake
def _(values_PX: Tensor, offsets_E: Tensor) -> Tensor:
    return values_PX.new_empty(offsets_E.shape[0], *values_PX.shape[1:])


class _ExpandToRows(torch.autograd.Function):
    """A plain gather, so that a compiler can fuse it, with a backward that adds in a fixed order (unlike `index_add_`)."""

    @staticmethod
    def forward(ctx: Any, values_EX: Tensor, offsets_E: Tensor, expert_P: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_E)
        return values_EX.index_select(0, expert_P)

    @staticmethod
    def backward(ctx: Any, grad_PX: Tensor) -> tuple[Tensor, None, None]:
        (offsets_E,) = ctx.saved_tensors
        return segment_sum(grad_PX.contiguous(), offsets_E), None, None


def expand_to_rows(values_EX: Tensor, offsets_E: Tensor, expert_P: Tensor) -> Tensor:
    """out[p] = values[expert of row p]. Rows must be sorted by expert, as `offsets_E` says."""
    return _ExpandToRows.apply(values_EX, offsets_E, expert_P)
