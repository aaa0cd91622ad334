"""Bytes of activations that a worker holds for backwards, counted after every forward and backward of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakSet

import torch

from disagmoe_compile.runtime.worker import Worker


class _Kept:
    """What autograd keeps of one operation, for as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class SavedBytes:
    """`peak[rank]`: the most that a rank held at once, parameters and the call's own arguments aside; `peak_waiting` of backwards
    that have not begun, without what lies between I and W. An `edit_workers`."""

    def __init__(self) -> None:
        self.peak: dict[int, int] = {}
        self.peak_waiting: dict[int, int] = {}
        self._by_autograd: dict[tuple[int, int, int], WeakSet[_Kept]] = {}  # (rank, stage, micro-batch)

    def __call__(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            for name in ("forward", "backward", "backward_weight"):
                setattr(worker, name, self._counting(worker, getattr(worker, name)))

    def _counting(self, worker: Worker, run: Any) -> Any:
        def counted(stage: int, microbatch: int, **kwargs: Any) -> None:
            kept = self._by_autograd.setdefault((worker.rank, stage, microbatch), WeakSet())

            def keep(tensor: torch.Tensor) -> _Kept:
                one = _Kept(tensor)
                kept.add(one)
                return one

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor):
                run(stage, microbatch, **kwargs)
            waiting = [worker._saved, self._of_autograd(worker, worker._saved)]
            begun = [worker._weight_work, self._of_autograd(worker, worker._weight_work)]
            for peak, held in ((self.peak, [*waiting, *begun]), (self.peak_waiting, waiting)):
                peak[worker.rank] = max(peak.get(worker.rank, 0), bytes_of(held, worker))

        return counted

    def _of_autograd(self, worker: Worker, stages: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
        return [one.tensor for key in stages for one in self._by_autograd.get((worker.rank, *key), ())]


def bytes_of(held: Any, worker: Worker) -> int:
    given = [*worker.step.parameters.values(), *worker.step.arguments]
    own = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(held)
    }
    return sum(nbytes for key, nbytes in storages.items() if key not in own)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
