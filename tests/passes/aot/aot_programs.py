"""Hand-made stage programs, as the passes would extract them, and their eager oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from disagmoe_compile.passes.program import (
    AttentionProgram,
    Dispatch,
    ExpertsProgram,
    InputKind,
    StageInput,
    StageOutput,
)

BATCH, LENGTH, HIDDEN, HEADS, EXPERTS, TOP_K, INNER = 2, 6, 16, 2, 4, 2, 24
BATCH_SYMBOL = sympy.Symbol("s0")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def attention_stage(
    batch: int, x: Tensor, norm1: Tensor, qkv: Tensor, out: Tensor, norm2: Tensor, router: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """norm, attention, norm, top-k router; returns tokens, token_P, expert_P, weight_P and the residual."""
    q, k, v = F.linear(norm(x, norm1), qkv).view(batch, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, LENGTH, HIDDEN), out)
    tokens = norm(x, norm2).view(-1, HIDDEN)
    weights, experts = torch.topk(F.linear(tokens, router).softmax(-1), TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = torch.arange(batch * LENGTH * TOP_K).floor_divide(TOP_K)
    return tokens, rows, experts.reshape(-1), weights.reshape(-1), x


def attention_program(
    *,
    frozen: Sequence[str] = (),
    input_requires_grad: bool = True,
    boundary: int = 1,
    dtype: torch.dtype = torch.float32,
) -> AttentionProgram:
    module = fx.symbolic_trace(attention_stage)
    shapes = {
        "norm1": (HIDDEN,),
        "qkv": (3 * HIDDEN, HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "norm2": (HIDDEN,),
        "router": (EXPERTS, HIDDEN),
    }
    tokens = BATCH_SYMBOL * LENGTH
    inputs = (
        StageInput(InputKind.SYMBOL, "batch", 0, (BATCH_SYMBOL,), None),
        StageInput(
            InputKind.CARRIED,
            "x",
            0,
            (BATCH_SYMBOL, LENGTH, HIDDEN),
            dtype,
            requires_grad=input_requires_grad,
        ),
        *(
            StageInput(InputKind.PARAMETER, name, i, shape, dtype, requires_grad=name not in frozen)
            for i, (name, shape) in enumerate(shapes.items())
        ),
    )
    outputs = (
        StageOutput("tokens", (tokens, HIDDEN), dtype, True),
        StageOutput("rows", (tokens * TOP_K,), torch.int64, False),
        StageOutput("experts", (tokens * TOP_K,), torch.int64, False),
        StageOutput("weights", (tokens * TOP_K,), dtype, True),
        StageOutput("residual", (BATCH_SYMBOL, LENGTH, HIDDEN), dtype, True),
    )
    return AttentionProgram(
        boundary=boundary,
        module=module,
        inputs=inputs,
        outputs=outputs,
        dispatch=Dispatch(0, 1, 2, 3),
        carried=(4,),
        model_outputs={},
        loss_numerators=(),
        layers=(boundary,),
        uses_rng=False,
    )


def attention_inputs(program: AttentionProgram, batch: int = BATCH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {BATCH_SYMBOL: batch}
    return [
        torch.randn([int(sympy.sympify(d).subs(sizes)) for d in item.shape], generator=generator)
        .mul(0.5)
        .to(item.dtype)
        for item in program.tensor_inputs
    ]


def gated_mlp(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As Qwen3-MoE and Mixtral: parameters stored (out, in)."""
    gate, up = torch.matmul(rows, gate_up.transpose(-2, -1)).chunk(2, dim=-1)
    return torch.matmul(F.silu(gate) * up, down.transpose(-2, -1)) * weight.unsqueeze(-1)


def linear_mlp(
    rows: Tensor, weight: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """As a list of nn.Linear experts."""
    return F.linear(F.gelu(F.linear(rows, up, up_bias)), down, down_bias) * weight[:, None]


def gpt_oss_mlp(
    rows: Tensor, weight: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    """As GPT-OSS: interleaved gate and up, clamps, biases, parameters stored (in, out)."""
    both = rows @ gate_up + gate_up_bias
    gate, up = both[..., ::2], both[..., 1::2]
    gate = gate.clamp(max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    out = ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ down + down_bias
    return out * weight.unsqueeze(-1)


STYLES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "gated": (gated_mlp, ((2 * INNER, HIDDEN), (HIDDEN, INNER))),
    "linear": (linear_mlp, ((INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,))),
    "gpt_oss": (gpt_oss_mlp, ((HIDDEN, 2 * INNER), (2 * INNER,), (INNER, HIDDEN), (HIDDEN,))),
}


def experts_program(
    function: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    frozen: Sequence[int] = (),
    boundary: int = 0,
    dtype: torch.dtype = torch.float32,
    num_experts: int = EXPERTS,
) -> ExpertsProgram:
    return ExpertsProgram(
        boundary=boundary,
        function=fx.symbolic_trace(function),
        params=tuple(
            StageInput(
                InputKind.PARAMETER,
                f"experts.{i}",
                i,
                (num_experts, *shape),
                dtype,
                requires_grad=i not in frozen,
            )
            for i, shape in enumerate(shapes)
        ),
        num_experts=num_experts,
        top_k=TOP_K,
        in_features=HIDDEN,
        out_features=HIDDEN,
        token_dtype=dtype,
        weight_dtype=dtype,
        out_dtype=dtype,
        style="grouped_mm",
        layers=(boundary,),
    )


def expert_inputs(program: ExpertsProgram, counts: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Inputs of the compiled stage for `counts[e]` rows of expert e."""
    generator = torch.Generator().manual_seed(seed)
    n_rows = sum(counts)
    counts_E = torch.tensor(counts)
    params = [
        torch.randn((len(counts), *map(int, p.shape[1:])), generator=generator).mul(0.3).to(p.dtype)
        for p in program.params
    ]
    return [
        torch.randn(n_rows, program.in_features, generator=generator).to(program.token_dtype),
        torch.rand(n_rows, generator=generator).to(program.weight_dtype),
        counts_E.cumsum(0).to(torch.int32),
        torch.repeat_interleave(torch.arange(len(counts)), counts_E),
        *params,
    ]


def random_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def eager_step(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], requires_grad: Sequence[bool]
) -> tuple[list[Tensor], dict[int, Tensor], dict[int, Tensor]]:
    """(outputs, tangents, gradients) of plain autograd; tangents are random, for every output that requires a gradient."""
    leaves = [t.detach().clone().requires_grad_(r) for t, r in zip(inputs, requires_grad)]
    outputs = list(function(*leaves))
    tangents = {i: random_like(out, 100 + i) for i, out in enumerate(outputs) if out.requires_grad}
    at = [i for i, r in enumerate(requires_grad) if r]
    found = torch.autograd.grad(
        [outputs[i] for i in tangents], [leaves[i] for i in at], list(tangents.values()), allow_unused=True
    )
    return [o.detach() for o in outputs], tangents, {i: g for i, g in zip(at, found) if g is not None}


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Relative to the largest value; a NaN never passes."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max().clamp(min=1e-6), f"error {error:.3e}"


SIZES = {BATCH_SYMBOL: BATCH}
