"""Bytes of activations that a worker holds for backwards, counted after every forward and backward of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from disagmoe_compile.runtime.worker import Worker


class SavedBytes:
    """`peak[rank]`: the most that a rank held at once, parameters and the call's own arguments aside. An `edit_workers`."""

    def __init__(self) -> None:
        self.peak: dict[int, int] = {}

    def __call__(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            for name in ("forward", "backward", "backward_weight"):
                setattr(worker, name, self._counting(worker, getattr(worker, name)))

    def _counting(self, worker: Worker, run: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> None:
            run(*args, **kwargs)
            held = held_bytes(worker)
            self.peak[worker.rank] = max(self.peak.get(worker.rank, 0), held)

        return counted


def held_bytes(worker: Worker) -> int:
    given = [*worker.step.parameters.values(), *worker.step.arguments]
    own = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in _tensors([worker._saved, worker._weight_work])
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
