"""What a captured model costs: FLOPs counted on its graph by torch's flop counter, and bytes of one exchange.

Counts are of the stages' forward for the whole global batch; the planner needs ratios, and backward is the same multiple of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)

Sizes = Mapping[sympy.Symbol, int]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Forward FLOPs of all attention stages and of all expert stages, and the bytes of one dispatch without de-duplication
    (tokens * top_k * hidden size * bytes, PAPER section 2: V), each averaged over the boundaries.
    """

    attention_flops: float
    ffn_flops: float
    exchange_bytes: float


def count_costs(programs: ModelPrograms, sizes: Sizes) -> ModelCosts:
    """`sizes` binds the batch to the number of samples that is counted."""
    n = programs.n_boundaries
    attention = sum(attention_flops(program, sizes) for program in programs.attention)
    ffn = sum(expert_flops(e, tokens_of(a, sizes)) for a, e in zip(programs.attention, programs.experts))
    exchanged = sum(
        tokens_of(a, sizes) * e.top_k * e.in_features * e.token_dtype.itemsize
        for a, e in zip(programs.attention, programs.experts)
    )
    return ModelCosts(attention / n, ffn / n, exchanged / n)


def tokens_of(program: AttentionProgram, sizes: Sizes) -> int:
    """T: rows of the tensor that this stage dispatches."""
    assert program.dispatch is not None
    return bind(program.outputs[program.dispatch.tokens].shape, sizes)[0]


def attention_flops(program: AttentionProgram, sizes: Sizes) -> int:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        program.module(*(_example(one, sizes) for one in program.inputs))
    return counter.get_total_flops()


def expert_flops(program: ExpertsProgram, n_tokens: int) -> int:
    """Every routed pair passes through one expert, whichever it is."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        rows_PD = torch.empty(n_tokens * program.top_k, program.in_features, dtype=program.token_dtype)
        weight_P = torch.empty(n_tokens * program.top_k, dtype=program.weight_dtype)
        params = (torch.empty(bind(p.shape, {})[1:], dtype=p.dtype) for p in program.params)
        program.function(rows_PD, weight_P, *params)
    return counter.get_total_flops()


def activation_bytes(program: AttentionProgram, sizes: Sizes) -> int:
    """Bytes of a stage's outputs: a lower bound of what it keeps for its backward."""
    return sum(math.prod(bind(o.shape, sizes)) * o.dtype.itemsize for o in program.outputs)


def _example(one: StageInput, sizes: Sizes) -> torch.Tensor | int:
    shape = bind(one.shape, sizes)
    return shape[0] if one.kind is InputKind.SYMBOL else torch.empty(shape, dtype=one.dtype)
