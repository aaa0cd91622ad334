"""Compiled stages: what `runtime.stages.CompiledStage` asks for, on top of graphs or of eager autograd.

All of them hold code and positions only, never tensors of a stage: equal layers share one object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot.compilers import BoxedGraph
from disagmoe_compile.passes.aot.joint import BackwardInput
from disagmoe_compile.runtime.stages import CompiledStage

Saved = Any


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """`run(values)` -> gradients of the inputs `gradients` (None: not a gradient), then values for a later graph."""

    run: BoxedGraph
    sources: tuple[BackwardInput, ...]
    gradients: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AotStage:
    """A stage out of AOTAutograd graphs.

    Either `whole` is set, or `first` and `second`: then the input gradient is out before the weight gradient starts, and the
    sources of `second` are positions in the state that `first` leaves behind.
    """

    n_outputs: int
    forward_graph: BoxedGraph
    tangents: tuple[int, ...]
    gradient_inputs: tuple[int, ...]
    weight_inputs: frozenset[int]
    whole: BackwardGraph | None = None
    first: BackwardGraph | None = None
    second: BackwardGraph | None = None

    @property
    def splits_weight_gradient(self) -> bool:
        return self.second is not None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        with torch.no_grad(), torch._C._DisableAutocast():
            results = self.forward_graph([_contiguous(tensor) for tensor in inputs])
        return list(results[: self.n_outputs]), list(results[self.n_outputs :])

    def backward(self, saved: Saved, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if self.second is not None:
            gradients, state = self.backward_input(saved, tangents)
            return {**gradients, **self.backward_weight(state)}
        if self.whole is None:
            return {}
        gradients, _ = _run(self.whole, saved, self._checked(tangents))
        return gradients

    def backward_input(self, saved: Saved, tangents: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Saved]:
        if self.first is None or self.second is None:
            return self.backward(saved, tangents), None
        checked = self._checked(tangents)
        gradients, boundary = _run(self.first, saved, checked)
        state = [_value(source, saved, checked) for source in self.second.sources]
        return gradients, state + boundary

    def backward_weight(self, saved: Saved) -> dict[int, Tensor]:
        if self.second is None:
            return {}
        with torch.no_grad(), torch._C._DisableAutocast():
            results = self.second.run(list(saved))
        return _gradients(self.second.gradients, results)

    def _checked(self, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        missing = [i for i in self.tangents if i not in tangents]
        if missing:
            raise ValueError(
                f"backward needs the gradients of outputs {list(self.tangents)}; missing {missing}"
            )
        return {i: _contiguous(tangents[i]) for i in self.tangents}


def _contiguous(value: Tensor) -> Tensor:
    """Graphs are traced with contiguous inputs, and Inductor's code relies on it."""
    return value if value.is_contiguous() else value.contiguous()


def _value(source: BackwardInput, saved: Sequence[Any], tangents: Mapping[int, Tensor]) -> Any:
    return tangents[source.index] if source.is_tangent else saved[source.index]


def _gradients(positions: Sequence[int | None], results: Sequence[Any]) -> dict[int, Tensor]:
    return {i: g for i, g in zip(positions, results) if i is not None and g is not None}


def _run(
    graph: BackwardGraph, saved: Sequence[Any], tangents: Mapping[int, Tensor]
) -> tuple[dict[int, Tensor], list[Any]]:
    with torch.no_grad(), torch._C._DisableAutocast():
        results = graph.run([_value(source, saved, tangents) for source in graph.sources])
    n = len(graph.gradients)
    return _gradients(graph.gradients, results[:n]), list(results[n:])


@dataclass(frozen=True, slots=True)
class EagerStage:
    """Runs the program operator by operator under autograd: no tracing, no compile time, the plainest thing to debug.

    `requires_grad` says which inputs need a gradient. `autocast` is the state the program runs under, as (device type,
    enabled, dtype) of each device. Autograd computes all gradients at once, so nothing is gained by a separate W.
    """

    module: Callable[..., Any]
    requires_grad: tuple[bool, ...]
    tangents: tuple[int, ...]
    gradient_inputs: tuple[int, ...]
    weight_inputs: frozenset[int]
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    splits_weight_gradient: bool = field(default=False, init=False)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        trains = any(self.requires_grad)
        with torch.set_grad_enabled(trains), _autocast(self.autocast):
            entered = [self._enter(position, tensor) for position, tensor in enumerate(inputs)]
            outputs = list(self.module(*entered))
        return [out.detach().contiguous() for out in outputs], self._graph(
            entered, outputs
        ) if trains else None

    def _enter(self, position: int, tensor: Tensor) -> Tensor:
        if not self.requires_grad[position]:
            return tensor.detach()
        if position in self.weight_inputs:
            return tensor.detach().requires_grad_()
        entered: Tensor = _Entry.apply(torch.empty(0, requires_grad=True), tensor)  # type: ignore[no-untyped-call]
        return entered

    def _graph(self, entered: Sequence[Tensor], outputs: Sequence[Tensor]) -> _EagerGraph:
        return _EagerGraph(
            {i: get_gradient_edge(entered[i]) for i, needed in enumerate(self.requires_grad) if needed},
            {i: get_gradient_edge(outputs[i]) for i in self.tangents},
        )

    def backward(self, saved: Saved, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if not self.tangents or saved is None:
            return {}
        gradients = torch.autograd.grad(
            list(saved.outputs.values()),
            list(saved.inputs.values()),
            [tangents[i] for i in saved.outputs],
            retain_graph=True,  # the graph goes when the executor drops `saved`
            allow_unused=True,
        )
        return _gradients(list(saved.inputs), gradients)

    def backward_input(self, saved: Saved, tangents: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Saved]:
        return self.backward(saved, tangents), None

    def backward_weight(self, saved: Saved) -> dict[int, Tensor]:
        return {}


@dataclass(frozen=True, slots=True)
class _EagerGraph:
    """Where gradients go in and come out, by position. Edges hold no values: of a forward lives what its operations save."""

    inputs: Mapping[int, GradientEdge]
    outputs: Mapping[int, GradientEdge]


class _Entry(torch.autograd.Function):
    """An activation at the start of a stage's graph. A leaf would be kept by the graph, whether an operation saves it or not."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, activation: Tensor) -> Tensor:
        return activation.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


@contextlib.contextmanager
def _autocast(states: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """The given state of each device type, whatever the caller's is."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in states:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """The gradient of an input in a call without rows; dim 0 is 0 where the input itself has rows."""

    input: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _NoRows:
    """Saved by a call without rows."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class RowsStage:
    """A stage whose number of rows changes from call to call, none included.

    Without rows nothing runs: the output is empty and every gradient is zero, of the right shape. `row_limit`: the most rows
    the code is right for.
    """

    stage: CompiledStage
    out_features: int
    out_dtype: torch.dtype
    zero_gradients: tuple[ZeroGradient, ...]
    row_limit: int | None = None

    @property
    def tangents(self) -> tuple[int, ...]:
        return self.stage.tangents

    @property
    def gradient_inputs(self) -> tuple[int, ...]:
        return tuple(zero.input for zero in self.zero_gradients)

    @property
    def weight_inputs(self) -> frozenset[int]:
        return self.stage.weight_inputs

    @property
    def splits_weight_gradient(self) -> bool:
        return self.stage.splits_weight_gradient

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        rows = inputs[0]
        if rows.shape[0] == 0:
            return [rows.new_empty((0, self.out_features), dtype=self.out_dtype)], _NoRows(rows.device)
        if self.row_limit is not None and rows.shape[0] > self.row_limit:
            raise UnsupportedModelError(
                f"{rows.shape[0]} rows for the experts of one rank; compiled code holds up to {self.row_limit}: "
                f"use more micro-batches"
            )
        return self.stage.forward(inputs)

    def backward(self, saved: Saved, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if isinstance(saved, _NoRows):
            return self._zeros(saved, of_parameters=False) | self._zeros(saved, of_parameters=True)
        return self.stage.backward(saved, tangents)

    def backward_input(self, saved: Saved, tangents: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Saved]:
        if isinstance(saved, _NoRows):
            return self._zeros(saved, of_parameters=False), saved
        return self.stage.backward_input(saved, tangents)

    def backward_weight(self, saved: Saved) -> dict[int, Tensor]:
        if isinstance(saved, _NoRows):
            return self._zeros(saved, of_parameters=True)
        return self.stage.backward_weight(saved)

    def _zeros(self, saved: _NoRows, *, of_parameters: bool) -> dict[int, Tensor]:
        return {
            zero.input: torch.zeros(zero.shape, dtype=zero.dtype, device=saved.device)
            for zero in self.zero_gradients
            if (zero.input in self.weight_inputs) == of_parameters
        }
