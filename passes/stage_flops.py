"""FLOPs of a captured model's stages, counted on their graphs by torch's flop counter, which here knows causal attention too.

torch (2.13) counts no `_scaled_dot_product_flash_attention_for_cpu`, and others with their masked half. `flop_counter` counts all
fused attention ops, forward 2 matmuls over the (query, key) pairs that the op is told of, backward 5 (it recomputes the scores);
of a causal one the half that is not masked. What a mask tensor hides is unknown, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils.flop_counter import FlopCounterMode

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.metadata import describe, is_tensor, value
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    StageInput,
    bind,
)

Sizes = Mapping[sympy.Symbol, int]


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_CORE_FORMULAS)


def core_flops(counter: FlopCounterMode) -> float:
    """The part of what was counted that fused attention ops do."""
    counts = counter.get_flop_counts().get("Global", {})
    return sum(flops for op, flops in counts.items() if op in _CORE_PACKETS)


def _core_formula(op: OpOverload) -> Callable[..., float]:
    """Of one fused attention op, whose arguments are found by the names in its schema."""
    names = [argument.name for argument in op._schema.arguments]
    matmuls = 2.5 if any(name.startswith("grad_out") for name in names) else 1.0

    def flops(*args: Any, out_val: object = None, **kwargs: Any) -> float:
        given = {**dict(zip(names, args)), **kwargs}
        *leading, queries, query_dim = given["query"].shape
        keys, value_dim = given["key"].shape[-2], given["value"].shape[-1]
        pairs = queries * (queries + 1) / 2 if given.get("is_causal") and queries == keys else queries * keys
        return 2 * matmuls * math.prod(leading) * pairs * (query_dim + value_dim)

    flops._get_raw = True  # type: ignore[attr-defined]  # the counter hands over tensors, not shapes
    return flops


_CORES = [
    f"_scaled_dot_product_{kernel}{direction}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
    for direction in ("", "_backward")
]
_CORE_PACKETS = frozenset(getattr(torch.ops.aten, name) for name in _CORES)
_CORE_FORMULAS = {packet: _core_formula(packet.default) for packet in _CORE_PACKETS}


@contextmanager
def fake_tensors(module: Callable[..., object]) -> Iterator[None]:
    """To run `module` on fake tensors, also of sizes that only data tells. A stage that fails inside a `no_grad` block does not
    leave the process in it.

    Raises UnsupportedModelError naming what has such a size, where `module` needs the number.
    """
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), FakeTensorMode(shape_env=ShapeEnv()):
            yield
    except Exception as error:
        nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
        sized_by_data = next((n for n in nodes if is_tensor(n) and free_unbacked_symbols(value(n))), None)
        if sized_by_data is None:
            raise
        raise UnsupportedModelError(
            f"{describe(sized_by_data)} has a size that depends on the values of a tensor, and what is made of it cannot be "
            "planned; keep the sizes fixed: mask or pad with torch.where instead of selecting"
        ) from error


def tokens_of(program: AttentionProgram, sizes: Sizes) -> int:
    """T: rows of the tensor that this stage dispatches."""
    assert program.dispatch is not None
    return bind(program.outputs[program.dispatch.tokens].shape, sizes)[0]


def attention_flops(program: AttentionProgram, sizes: Sizes) -> int:
    with fake_tensors(program.module), flop_counter() as counter:
        program.module(*(example(one, sizes) for one in program.inputs))
    return round(counter.get_total_flops())


def expert_flops(program: ExpertsProgram, n_tokens: int) -> int:
    """Every routed pair passes through one expert, whichever it is."""
    with fake_tensors(program.function), flop_counter() as counter:
        rows_PD = torch.empty(n_tokens * program.top_k, program.in_features, dtype=program.token_dtype)
        weight_P = torch.empty(n_tokens * program.top_k, dtype=program.weight_dtype)
        params = (torch.empty(bind(p.shape, {})[1:], dtype=p.dtype) for p in program.params)
        program.function(rows_PD, weight_P, *params)
    return round(counter.get_total_flops())


def example(one: StageInput, sizes: Sizes) -> torch.Tensor | int:
    shape = bind(one.shape, sizes)
    return shape[0] if one.kind is InputKind.SYMBOL else torch.empty(shape, dtype=one.dtype)
