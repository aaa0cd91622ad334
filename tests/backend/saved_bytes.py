"""Bytes of activations that a worker holds for backwards, counted after every forward, second forward and backward of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch.autograd.graph import GradientEdge, Node

from disagmoe_compile.passes.aot import RecomputedStage
from disagmoe_compile.runtime.worker import Worker


class _Kept:
    """What autograd keeps of one operation, for as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class SavedBytes:
    """`peak[rank]`: the most that a rank held at once, parameters and the call's own arguments aside. An `edit_workers`."""

    def __init__(self) -> None:
        self.peak: dict[int, int] = {}
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

            def again(recomputed: RecomputedStage, inputs: Any) -> Any:
                made = run_again(recomputed, inputs)
                self._note(worker, inputs, made, [one.tensor for one in kept])
                return made

            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one.tensor),
                mock.patch.object(RecomputedStage, "_again", again),
            ):
                run(stage, microbatch, **kwargs)
            self._note(worker)

        run_again = RecomputedStage._again
        return counted

    def _note(self, worker: Worker, *at_work: Any) -> None:
        held: list[Any] = list(at_work)
        for waiting in (worker._saved, worker._weight_work):
            held += [waiting, self._of_autograd(worker, waiting)]
        self.peak[worker.rank] = max(self.peak.get(worker.rank, 0), bytes_of(held, worker))

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
    elif isinstance(value, GradientEdge):
        yield from _leaves(value.node)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


def _leaves(root: Node) -> Iterator[torch.Tensor]:
    """What a graph holds beside what its operations save."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions if following is not None]
            if hasattr(node, "variable"):
                yield node.variable
