"""What the passes hand to the runtime: one small program per stage, with its interface spelled out.

A program is a template: its graph still has a symbolic batch (and length). `bind` gives shapes for one micro-batch size. All
positions are indices into tuples of this file, never node names.

Legend: T tokens of a micro-batch on one attention rank, P routed pairs (T * top_k), D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import sympy
import torch
from torch import fx

Dim: TypeAlias = int | sympy.Expr


class InputKind(StrEnum):
    """Where a stage's input comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"  # an argument of the model: a slice of it where it has the batch dimension
    SYMBOL = "symbol"  # a size that Dynamo lifted to a graph input
    COMBINED = "combined"  # the experts' output of the boundary before this stage
    CARRIED = "carried"  # handed on by the attention stage before (residual, shared experts' output)


@dataclass(frozen=True, slots=True)
class StageInput:
    """`position`: of the placeholder in the captured graph, or in `carried` of the attention stage before (CARRIED).

    `shape` may hold symbols; for SYMBOL it is `(expression,)`, the value of the size, and `dtype` is None.
    """

    kind: InputKind
    name: str
    position: int
    shape: tuple[Dim, ...]
    dtype: torch.dtype | None
    requires_grad: bool = False
    per_sample: bool = False


@dataclass(frozen=True, slots=True)
class StageOutput:
    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Output positions of what goes to the experts: tokens_TD, token_P (row of each pair), expert_P, weight_P."""

    tokens: int
    token_ids: int
    expert_ids: int
    weights: int


@dataclass(frozen=True, slots=True)
class BufferDelta:
    """What a stage adds to the buffer at `position` of the captured graph: of its samples alone, or, with `once`, of any call."""

    position: int
    once: bool


@dataclass(frozen=True, slots=True)
class AttentionProgram:
    """Attention part before boundary `boundary`; the head where `dispatch` is None.

    `module(*inputs)` returns a tuple as `outputs`. `carried`: output positions the next attention stage reads, in the order of
    its CARRIED positions. `model_outputs`: index in the model's flat outputs -> output position. `loss_numerators`: output
    positions, one per term of the loss (head only). `buffer_deltas`: output position -> the buffer that it adds to.
    """

    boundary: int
    module: fx.GraphModule
    inputs: tuple[StageInput, ...]
    outputs: tuple[StageOutput, ...]
    dispatch: Dispatch | None
    carried: tuple[int, ...]
    model_outputs: Mapping[int, int]
    loss_numerators: tuple[int, ...]
    layers: tuple[int, ...]
    uses_rng: bool
    buffer_deltas: Mapping[int, BufferDelta] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        return 2 * self.boundary

    @property
    def tensor_inputs(self) -> tuple[StageInput, ...]:
        """Inputs without the sizes, which are constants once a micro-batch size is bound."""
        return tuple(i for i in self.inputs if i.kind is not InputKind.SYMBOL)


@dataclass(frozen=True, slots=True)
class ExpertParam:
    """One parameter of the per-expert function, for all experts of a boundary.

    `inputs`: ONE parameter that holds the experts one after another in dim 0, or E separate ones in the order of the experts.
    `shape`: [E, ...], what the function sees of all experts together; a stacked parameter [E * H, D] may be seen as [E, H, D].
    """

    inputs: tuple[StageInput, ...]
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if len(self.inputs) not in (1, self.shape[0]):
            raise ValueError(f"{len(self.inputs)} parameters for {self.shape[0]} experts")

    @property
    def is_separate(self) -> bool:
        return len(self.inputs) > 1 or self.inputs[0].shape == self.shape[1:]

    @property
    def name(self) -> str:
        """Of the parameter, or of the first and last of the separate ones."""
        first, last = self.inputs[0].name, self.inputs[-1].name
        return f"{first} ... {last}" if len(self.inputs) > 1 else first

    @property
    def dtype(self) -> torch.dtype | None:
        return self.inputs[0].dtype

    @property
    def requires_grad(self) -> bool:
        """Whether any expert's is trained."""
        return any(one.requires_grad for one in self.inputs)


@dataclass(frozen=True, slots=True)
class ExpertsProgram:
    """The experts of boundary `boundary` as one function of an expert's rows.

    `function(rows_PD, weight_P, *params)` -> rows_PD, with each parameter being ONE expert's (`params[i].shape[1:]`); rows never
    interact.
    """

    boundary: int
    function: fx.GraphModule
    params: tuple[ExpertParam, ...]
    num_experts: int
    top_k: int
    in_features: int
    out_features: int
    token_dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    style: str
    layers: tuple[int, ...]

    @property
    def stage(self) -> int:
        return 2 * self.boundary + 1

    @property
    def param_inputs(self) -> tuple[StageInput, ...]:
        """Every parameter of every expert."""
        return tuple(one for param in self.params for one in param.inputs)


@dataclass(frozen=True, slots=True)
class LossProgram:
    """loss = sum over terms of coefficient * (sum over ranks and micro-batches of numerator) / denominator.

    `denominators(*inputs)` returns one number or 0-d tensor per term, from inputs of the WHOLE batch alone.
    """

    output_index: int
    dtype: torch.dtype
    coefficients: tuple[float, ...]
    denominators: fx.GraphModule
    inputs: tuple[StageInput, ...]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """One flat output of the captured graph. `stage` is None for None, plain numbers and new values of buffers.

    `batch_dim`: the dimension that holds the samples one after another, as many rows of it for each; None where there is none.
    `is_mixed`: made of several samples without such a dimension, so that parts of the batch do not make up the whole's.
    """

    index: int
    shape: tuple[Dim, ...]
    dtype: torch.dtype | None
    requires_grad: bool
    batch_dim: int | None
    is_mixed: bool
    stage: int | None
    constant: object = None


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """A buffer that grows by all its deltas at the end of a call. `output`: flat output of the model that is its new value, and
    takes the buffer's place unless `in_place`.
    """

    buffer: StageInput
    in_place: bool
    output: int | None


@dataclass(frozen=True, slots=True)
class ModelPrograms:
    """All of a captured model. `batch_symbol` is None where the batch is 1 (nothing to split)."""

    attention: tuple[AttentionProgram, ...]
    experts: tuple[ExpertsProgram, ...]
    loss: LossProgram | None
    outputs: tuple[ModelOutput, ...]
    batch_symbol: sympy.Symbol | None
    tied_head: bool
    buffer_updates: tuple[BufferUpdate, ...] = ()

    @property
    def n_boundaries(self) -> int:
        return len(self.experts)

    @property
    def trains(self) -> bool:
        """Whether there is anything to differentiate: a loss, or outputs that require a gradient."""
        return self.loss is not None or any(output.requires_grad for output in self.outputs)

    def needs_two_phases(self, gather_outputs: bool) -> bool:
        """Whether the script may send gradients into more than the one loss: into any output that it gets whole."""
        if self.loss is None:
            return True
        others = [o for o in self.outputs if o.index != self.loss.output_index and not o.is_mixed]
        return gather_outputs and any(output.requires_grad for output in others)


def bind(dims: tuple[Dim, ...], sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Concrete sizes. By expression, never by hint or value: hints go stale, and two sizes may be equal by chance."""
    bound = []
    for dim in dims:
        value = dim if isinstance(dim, int) else sympy.sympify(dim).subs(sizes)
        if not isinstance(value, int) and not value.is_Integer:
            raise ValueError(f"size {dim} is not fixed by {sizes}")
        bound.append(int(value))
    return tuple(bound)
