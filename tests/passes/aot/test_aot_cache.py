"""Equal stages compile once; what changes the code changes the key; keys agree between processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aot_programs import BATCH_SYMBOL, SIZES, STYLES, attention_program, experts_program
from torch import fx

from disagmoe_compile.passes.aot import (
    CompileStats,
    StageCache,
    attention_key,
    compile_attention,
    compile_experts,
    experts_key,
)
from disagmoe_compile.passes.program import AttentionProgram, ExpertsProgram

AOT = {"compiler": "aot_eager", "training": True}


def test_equal_layers_compile_once() -> None:
    cache = StageCache()
    first = compile_attention(attention_program(boundary=1), SIZES, cache=cache, **AOT)
    second = compile_attention(attention_program(boundary=2), SIZES, cache=cache, **AOT)
    experts = [
        compile_experts(experts_program(*STYLES["gated"], boundary=b), 4, cache=cache, **AOT)
        for b in range(3)
    ]
    assert first is second and experts[0] is experts[1] is experts[2]
    assert cache.stats == CompileStats(compiled=2, reused=3, fx_graph_cache_hits=0)


def with_constant(value: float) -> AttentionProgram:
    module = torch.nn.Module()
    module.register_buffer("scale", torch.full((3,), value))
    graph = fx.Graph()
    graph.output((graph.create_node("get_attr", "scale"),))
    return replace(attention_program(), module=fx.GraphModule(module, graph))


@pytest.mark.parametrize(
    "key",
    [
        lambda: attention_key(attention_program(), {BATCH_SYMBOL: 3}, **AOT),
        lambda: attention_key(attention_program(), SIZES, compiler="eager", training=True),
        lambda: attention_key(attention_program(), SIZES, compiler="aot_eager", training=False),
        lambda: attention_key(attention_program(), SIZES, split_weight_gradient=False, **AOT),
        lambda: attention_key(attention_program(frozen=("qkv",)), SIZES, **AOT),
        lambda: attention_key(attention_program(dtype=torch.bfloat16), SIZES, **AOT),
        lambda: attention_key(
            replace(attention_program(), module=fx.symbolic_trace(lambda *a: a)), SIZES, **AOT
        ),
    ],
)
def test_what_changes_attention_code_changes_the_key(key: Callable[[], str]) -> None:
    assert key() != attention_key(attention_program(), SIZES, **AOT)


@pytest.mark.parametrize(
    ("program", "n_local"),
    [
        (experts_program(*STYLES["gated"]), 2),
        (experts_program(*STYLES["gated"], frozen=(1,)), 4),
        (experts_program(*STYLES["gated"], dtype=torch.bfloat16), 4),
        (experts_program(STYLES["gated"][0], ((32, 16), (16, 16))), 4),
        (experts_program(*STYLES["linear"]), 4),
    ],
)
def test_what_changes_expert_code_changes_the_key(program: ExpertsProgram, n_local: int) -> None:
    assert experts_key(program, n_local, **AOT) != experts_key(experts_program(*STYLES["gated"]), 4, **AOT)


def test_constants_are_part_of_the_key() -> None:
    assert attention_key(with_constant(1.0), SIZES, **AOT) == attention_key(with_constant(1.0), SIZES, **AOT)
    assert attention_key(with_constant(1.0), SIZES, **AOT) != attention_key(with_constant(2.0), SIZES, **AOT)


def test_gradients_do_not_matter_for_inference() -> None:
    keys = {
        attention_key(attention_program(frozen=frozen), SIZES, compiler="aot_eager", training=False)
        for frozen in ((), ("qkv",))
    }
    assert len(keys) == 1


def test_autocast_is_part_of_attention_keys_only() -> None:
    attention, experts = attention_program(), experts_program(*STYLES["gated"])
    off = attention_key(attention, SIZES, **AOT), experts_key(experts, 4, **AOT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bf16 = attention_key(attention, SIZES, **AOT), experts_key(experts, 4, **AOT)
    with torch.autocast("cpu", dtype=torch.float16):
        fp16 = attention_key(attention, SIZES, **AOT)
    assert len({off[0], bf16[0], fp16}) == 3
    assert off[1] == bf16[1]


def test_keys_agree_between_processes() -> None:
    script = (
        "from aot_programs import *; from disagmoe_compile.passes.aot import *\n"
        "o = dict(compiler='aot_eager', training=True)\n"
        "import sys; sys.stdout.write(attention_key(attention_program(), SIZES, **o) + ' ' "
        "+ experts_key(experts_program(*STYLES['linear']), 4, **o))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    expected = [
        attention_key(attention_program(), SIZES, **AOT),
        experts_key(experts_program(*STYLES["linear"]), 4, **AOT),
    ]
    assert done.stdout.split() == expected
