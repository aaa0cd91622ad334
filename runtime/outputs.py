"""The model's outputs besides the loss: put together on every rank from those of the ranks that have the samples, or, where they
are not, loud when touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class Output:
    """One flat output of the graph. `stage` makes it; None: it is `constant`.

    `batch_dim`: the dimension that holds the samples, as many rows for each; None: every micro-batch makes the same.
    `missing`: why it is not put together, for the error of who touches it; None: it is.
    """

    index: int
    dtype: torch.dtype | None
    stage: int | None
    constant: object
    requires_grad: bool
    batch_dim: int | None
    missing: str | None

    @property
    def is_gathered(self) -> bool:
        return self.stage is not None and self.missing is None


def part_shape(output: Output, shape: tuple[int, ...], plan: Plan, member: int) -> tuple[int, ...] | None:
    """What member `member` of the attention group has of an output of `shape`; None: nothing that is needed."""
    samples = plan.share_of(member)
    if output.batch_dim is None:
        return shape if 0 in samples else None
    if not samples:
        return None
    rows = shape[output.batch_dim] // plan.workload.global_batch_size
    return (*shape[: output.batch_dim], len(samples) * rows, *shape[output.batch_dim + 1 :])


def own_part(output: Output, worker: AttentionWorker) -> torch.Tensor:
    """This rank's part, its micro-batches together."""
    pieces = worker.outputs[output.index]
    if output.batch_dim is None:
        return pieces[0].detach()
    return torch.cat([pieces[microbatch].detach() for microbatch in sorted(pieces)], output.batch_dim)


def put_together(output: Output, parts: list[torch.Tensor]) -> torch.Tensor:
    """The output of the whole batch from the members' parts: their samples follow each other. A tensor of its own."""
    return parts[0].clone() if output.batch_dim is None else torch.cat(parts, output.batch_dim)


def gather(
    output: Output,
    shape: tuple[int, ...],
    plan: Plan,
    worker: Worker,
    broadcast: Callable[[torch.Tensor, int], object],
) -> torch.Tensor:
    """Collective. `broadcast(tensor, rank)` fills every rank's tensor with that of `rank`."""
    assert output.stage is not None and output.dtype is not None
    parts = []
    for member, rank in enumerate(plan.topology.ranks_of_stage(output.stage)):
        size = part_shape(output, shape, plan, member)
        if size is None:
            continue
        if rank == worker.rank:
            assert isinstance(worker, AttentionWorker)
            part = own_part(output, worker).to(output.dtype).contiguous()
            assert tuple(part.shape) == size, (
                f"output {output.index} has shape {tuple(part.shape)}, not {size}"
            )
        else:
            part = torch.empty(size, dtype=output.dtype, device=worker.device)
        broadcast(part, rank)
        parts.append(part)
    return put_together(output, parts)


class UnmaterialisedOutput(torch.Tensor):
    """Has shape and dtype of an output that no rank holds whole. Any use of its values raises InputError, saying `why`."""

    index: int
    why: str

    @staticmethod
    def __new__(
        cls, index: int, shape: tuple[int, ...], dtype: torch.dtype, why: str
    ) -> UnmaterialisedOutput:
        one = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        one.index, one.why = index, why
        return one

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnmaterialisedOutput(output {self.index}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __str__ = __repr__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = next(a for a in args if isinstance(a, cls))
        raise InputError(f"output {one.index} of the model (shape {tuple(one.shape)}) {one.why}")
