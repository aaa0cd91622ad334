"""A captured graph with what is known about it: what `capture.py` makes and the passes take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TraceId

from disagmoe_compile.passes.program import Dim, InputKind, StageInput


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast as it was around the call; it leaves no nodes in the graph but changes what its operations
    compute."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """`inputs[i]` describes placeholder i of the graph; `sources[i]` is its name in the user's frame.

    `batch_symbol` is None where the batch is 1. `training`: the graph was traced with gradients on.
    `assigned_buffers`: output -> input: Dynamo puts this output in the place of this buffer after the call.
    `trace_id`: which of Dynamo's compilations it is, for logs.
    """

    graph_module: fx.GraphModule
    example_inputs: tuple[Any, ...]
    inputs: tuple[StageInput, ...]
    sources: tuple[str, ...]
    batch_symbol: sympy.Symbol | None
    autocast: AutocastState
    training: bool
    assigned_buffers: Mapping[int, int] = field(default_factory=dict)
    trace_id: TraceId | None = None

    def sizes(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Value of every symbol, from the flat arguments of one call (sizes and tensors as the graph takes
        them)."""
        if len(args) != len(self.inputs):
            raise ValueError(f"the graph takes {len(self.inputs)} arguments, got {len(args)}")
        return symbol_values(self.inputs, args)

    def example_arguments(self) -> tuple[Any, ...]:
        """The flat arguments of the captured call, sizes as numbers: what the graph can be run on outside of the trace."""
        return tuple(_number(x) if isinstance(x, torch.SymInt) else x for x in self.example_inputs)

    def parameter_names(self) -> dict[int, str]:
        """Position of the argument -> fully qualified name, of the parameters that the graph reads."""
        return {i: one.name for i, one in enumerate(self.inputs) if one.kind is InputKind.PARAMETER}

    @property
    def batch_size(self) -> Dim:
        """Samples of the captured call: the symbol, or 1."""
        return 1 if self.batch_symbol is None else self.batch_symbol


def symbol_values(inputs: Sequence[StageInput], args: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Solves each dimension that is a plain symbol; raises ValueError where two arguments disagree."""
    found: dict[sympy.Symbol, int] = {}
    for stage_input, arg in zip(inputs, args):
        actual = tuple(arg.shape) if isinstance(arg, torch.Tensor) else (arg,)
        for dim, size in zip(stage_input.shape, actual):
            if isinstance(dim, sympy.Symbol) and found.setdefault(dim, _number(size)) != _number(size):
                raise ValueError(
                    f"`{stage_input.name}` has size {_number(size)} where another argument has {found[dim]}"
                )
    return found


def _number(size: int | torch.SymInt) -> int:
    """The captured value of a size. By hint: inside a trace, converting a live SymInt would specialise the
    graph to it.
    """
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
