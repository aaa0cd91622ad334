"""Compiled stages equal eager, forward and every gradient, whatever the compiler, the rows, and what needs gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import sympy
import torch
from aot_programs import (
    BATCH,
    BATCH_SYMBOL,
    HIDDEN,
    SIZES,
    STYLES,
    assert_same,
    attention_inputs,
    attention_program,
    eager_step,
    expert_inputs,
    experts_program,
)
from torch import Tensor, fx

from disagmoe_compile.errors import InputError, UnsupportedModelError
from disagmoe_compile.passes.aot import StageCache, compile_attention, compile_experts, reference_experts
from disagmoe_compile.passes.aot.compiled import RowsStage
from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    StageInput,
    StageOutput,
)
from disagmoe_compile.runtime.stages import CompiledStage

FAST = ("eager", "aot_eager")
COMPILERS = (*FAST, "inductor")


@pytest.fixture(scope="module")
def cache() -> StageCache:
    """One for the file, so that each class of stages is compiled once."""
    return StageCache()


def needs_grad(program: AttentionProgram) -> list[bool]:
    return [item.requires_grad for item in program.tensor_inputs]


def assert_stage_equals_eager(
    stage: CompiledStage,
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    tolerance: float = 1e-5,
) -> None:
    outputs, tangents, gradients = eager_step(function, inputs, needs)
    assert stage.tangents == tuple(tangents)
    ours, saved = stage.forward(inputs)
    for actual, expected in zip(ours, outputs, strict=True):
        assert_same(actual, expected, tolerance)
    found = stage.backward(saved, tangents)
    assert found.keys() == gradients.keys()
    for i, expected in gradients.items():
        assert_same(found[i], expected, tolerance)


def eager_attention(program: AttentionProgram, batch: int = BATCH) -> Callable[..., Sequence[Tensor]]:
    return lambda *tensors: program.module(batch, *tensors)


def eager_experts(program: ExpertsProgram) -> Callable[..., Sequence[Tensor]]:
    return lambda rows, weight, ends, _expert, *params: (
        reference_experts(program, rows, weight, ends, *params),
    )


def experts_needs(program: ExpertsProgram) -> list[bool]:
    return [True, True, False, False, *(p.requires_grad for p in program.params)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_attention_equals_eager(compiler: str, cache: StageCache) -> None:
    program = attention_program()
    stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=cache)
    assert stage.tangents == (
        0,
        3,
        4,
    )  # tokens, pair weights, residual; row and expert numbers have no gradient
    assert stage.weight_inputs == {1, 2, 3, 4, 5}
    assert_stage_equals_eager(stage, eager_attention(program), attention_inputs(program), needs_grad(program))


@pytest.mark.parametrize(
    ("compiler", "style"),
    [
        *((compiler, style) for compiler in FAST for style in STYLES),
        ("inductor", "gpt_oss"),
        pytest.param("inductor", "gated", marks=pytest.mark.slow),
        pytest.param("inductor", "linear", marks=pytest.mark.slow),
    ],
)
def test_experts_equal_the_loop_for_any_number_of_rows(compiler: str, style: str, cache: StageCache) -> None:
    program = experts_program(*STYLES[style])
    stage = compile_experts(program, 4, compiler=compiler, training=True, cache=cache)
    compiled = cache.stats.compiled
    for counts in ([0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 5, 0], [3, 0, 4, 2], [17, 40, 8, 1]):
        inputs = expert_inputs(program, counts)
        assert_stage_equals_eager(stage, eager_experts(program), inputs, experts_needs(program))
    assert cache.stats.compiled == compiled


@pytest.mark.parametrize("compiler", COMPILERS)
def test_weight_gradient_apart_is_bitwise_the_whole_backward(compiler: str, cache: StageCache) -> None:
    program, experts = attention_program(), experts_program(*STYLES["gpt_oss"])
    for stage, inputs in (
        (
            compile_attention(program, SIZES, compiler=compiler, training=True, cache=cache),
            attention_inputs(program),
        ),
        (
            compile_experts(experts, 4, compiler=compiler, training=True, cache=cache),
            expert_inputs(experts, [3, 0, 4, 2]),
        ),
    ):
        outputs, saved = stage.forward(inputs)
        tangents = {i: torch.ones_like(outputs[i]) for i in stage.tangents}
        whole = stage.backward(saved, tangents)
        of_inputs, state = stage.backward_input(saved, tangents)
        of_weights = stage.backward_weight(state)
        assert stage.splits_weight_gradient == (compiler != "eager")
        early = of_inputs.keys() & stage.weight_inputs
        assert (
            (of_weights.keys() <= stage.weight_inputs and not early)
            if stage.splits_weight_gradient
            else not of_weights
        )
        assert of_inputs and (of_weights or early)
        apart = {**of_inputs, **of_weights}
        assert apart.keys() == whole.keys()
        assert all(torch.equal(apart[i], whole[i]) for i in whole)


def test_one_backward_graph_is_bitwise_the_split_one() -> None:
    program = attention_program()
    inputs = attention_inputs(program)
    found = []
    for split in (True, False):
        stage = compile_attention(
            program,
            SIZES,
            compiler="aot_eager",
            training=True,
            split_weight_gradient=split,
            cache=StageCache(),
        )
        assert stage.splits_weight_gradient == split
        outputs, saved = stage.forward(inputs)
        found.append(stage.backward(saved, {i: torch.ones_like(outputs[i]) for i in stage.tangents}))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][i], found[1][i]) for i in found[0])


@pytest.mark.parametrize("split", [True, False])
def test_input_gradient_does_not_run_weight_products(split: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    program = experts_program(*STYLES["gated"])
    stage = compile_experts(
        program, 4, compiler="aot_eager", training=True, split_weight_gradient=split, cache=StageCache()
    )
    outputs, saved = stage.forward(expert_inputs(program, [2, 1, 1, 3]))
    calls: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record():
        _, state = stage.backward_input(saved, {0: torch.ones_like(outputs[0])})
    early = sum("grouped_mm_weight_grad" in call for call in calls)
    with Record():
        stage.backward_weight(state)
    late = sum("grouped_mm_weight_grad" in call for call in calls) - early
    assert (early, late) == ((0, 2) if split else (2, 0))


@pytest.mark.parametrize("compiler", FAST)
def test_frozen_parameters_get_no_gradient(compiler: str) -> None:
    program = attention_program(frozen=("qkv", "norm2"))
    stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=StageCache())
    assert_stage_equals_eager(stage, eager_attention(program), attention_inputs(program), needs_grad(program))
    experts = experts_program(*STYLES["linear"], frozen=(0, 3))
    stage = compile_experts(experts, 4, compiler=compiler, training=True, cache=StageCache())
    for counts in ([3, 0, 4, 2], [0, 0, 0, 0]):
        inputs = expert_inputs(experts, counts)
        assert_stage_equals_eager(stage, eager_experts(experts), inputs, experts_needs(experts))


@pytest.mark.parametrize("compiler", FAST)
def test_first_stage_has_nothing_to_split(compiler: str) -> None:
    program = attention_program(input_requires_grad=False)
    stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=StageCache())
    assert not stage.splits_weight_gradient
    assert_stage_equals_eager(stage, eager_attention(program), attention_inputs(program), needs_grad(program))
    outputs, saved = stage.forward(attention_inputs(program))
    of_inputs, state = stage.backward_input(saved, {i: torch.ones_like(outputs[i]) for i in stage.tangents})
    assert of_inputs.keys() == stage.weight_inputs and stage.backward_weight(state) == {}


@pytest.mark.parametrize("compiler", [*FAST, pytest.param("inductor", marks=pytest.mark.slow)])
def test_inference_saves_nothing(compiler: str, cache: StageCache) -> None:
    experts = experts_program(*STYLES["gpt_oss"])
    stage = compile_experts(experts, 4, compiler=compiler, training=False, cache=cache)
    assert stage.tangents == ()
    for counts in ([3, 0, 4, 2], [0, 1, 0, 0], [0, 0, 0, 0]):
        inputs = expert_inputs(experts, counts)
        (out,), saved = stage.forward(inputs)
        assert_same(out, reference_experts(experts, *inputs[:3], *inputs[4:]))
        assert not isinstance(saved, list) or saved == []


@pytest.mark.parametrize("compiler", FAST)
def test_nothing_that_needs_a_gradient_is_inference(compiler: str) -> None:
    program = attention_program(frozen=("norm1", "qkv", "out", "norm2", "router"), input_requires_grad=False)
    stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=StageCache())
    outputs, saved = stage.forward(attention_inputs(program))
    assert stage.tangents == () and stage.backward(saved, {}) == {}
    assert not any(out.requires_grad for out in outputs)


@pytest.mark.parametrize("compiler", FAST)
def test_bf16_equals_eager(compiler: str) -> None:
    experts = experts_program(*STYLES["gpt_oss"], dtype=torch.bfloat16)
    stage = compile_experts(experts, 4, compiler=compiler, training=True, cache=StageCache())
    inputs = expert_inputs(experts, [3, 0, 4, 2])
    assert_stage_equals_eager(stage, eager_experts(experts), inputs, experts_needs(experts), 2e-2)
    program = attention_program(dtype=torch.bfloat16)
    stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=StageCache())
    assert_stage_equals_eager(
        stage, eager_attention(program), attention_inputs(program), needs_grad(program), 2e-2
    )


@pytest.mark.parametrize("compiler", FAST)
def test_autocast_at_the_call_is_traced_in(compiler: str) -> None:
    program = attention_program()
    inputs = attention_inputs(program)
    cache = StageCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=cache)
    plain = compile_attention(program, SIZES, compiler=compiler, training=True, cache=cache)
    assert cache.stats.compiled == 2

    def autocast(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return eager_attention(program)(*tensors)  # type: ignore[no-any-return]

    assert_stage_equals_eager(stage, autocast, inputs, needs_grad(program), 2e-2)
    exact = plain.forward(inputs)[0][4]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # no effect on what is compiled
        assert torch.equal(plain.forward(inputs)[0][4], exact)
        assert not torch.equal(stage.forward(inputs)[0][4], exact)


@pytest.mark.parametrize("compiler", FAST)
def test_autocast_does_not_touch_experts(compiler: str) -> None:
    experts = experts_program(*STYLES["linear"])
    inputs = expert_inputs(experts, [3, 0, 4, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage = compile_experts(experts, 4, compiler=compiler, training=True, cache=StageCache())
        (out,), _ = stage.forward(inputs)
    assert_same(out, reference_experts(experts, *inputs[:3], *inputs[4:]))


@pytest.mark.parametrize("compiler", FAST)
def test_other_sizes_are_another_stage(compiler: str) -> None:
    program = attention_program()
    cache = StageCache()
    for batch in (1, 3):
        sizes = {BATCH_SYMBOL: batch}
        stage = compile_attention(program, sizes, compiler=compiler, training=True, cache=cache)
        inputs = attention_inputs(program, batch)
        assert_stage_equals_eager(stage, eager_attention(program, batch), inputs, needs_grad(program))
    assert cache.stats.compiled == 2


def small_program(function: Callable[..., tuple[Tensor, ...]], n_outputs: int) -> AttentionProgram:
    """Two inputs (3, HIDDEN) that need gradients; the second is a parameter."""
    kinds = (InputKind.CARRIED, InputKind.PARAMETER)
    return replace(
        attention_program(),
        module=fx.symbolic_trace(function),
        inputs=tuple(StageInput(k, k, 0, (3, HIDDEN), torch.float32, requires_grad=True) for k in kinds),
        outputs=tuple(StageOutput(f"out{i}", (3, HIDDEN), torch.float32, True) for i in range(n_outputs)),
        dispatch=None,
        carried=(),
    )


def hands_on_its_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x, x.view(3, HIDDEN), x * w


def returns_one_value_twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    return y, y, y.view(HIDDEN, 3)


def returns_a_transposed_value(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ((x * w).t(), x + w)


@pytest.mark.parametrize("compiler", FAST)
@pytest.mark.parametrize(
    "function", [hands_on_its_input, returns_one_value_twice, returns_a_transposed_value]
)
def test_outputs_that_alias_keep_their_gradients(
    compiler: str, function: Callable[..., tuple[Tensor, ...]]
) -> None:
    program = small_program(function, 3)
    stage = compile_attention(program, {}, compiler=compiler, training=True, cache=StageCache())
    inputs = [torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)]
    assert_stage_equals_eager(stage, function, inputs, [True, True])
    assert all(out.is_contiguous() for out in stage.forward(inputs)[0])


@pytest.mark.parametrize("compiler", FAST)
def test_strided_inputs_and_tangents_are_fine(compiler: str) -> None:
    program = small_program(lambda x, w: ((x * w).sin(),), 1)
    stage = compile_attention(program, {}, compiler=compiler, training=True, cache=StageCache())
    x, w, tangent = (torch.randn(HIDDEN, 3).t() for _ in range(3))
    (out,), saved = stage.forward([x, w])
    assert_same(out, (x * w).sin())
    assert_same(stage.backward(saved, {0: tangent})[0], tangent * (x * w).cos() * w)


def writes_to_its_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x + w.detach().add_(1),)


def test_writing_to_an_input_is_an_error() -> None:
    program = small_program(writes_to_its_input, 1)
    program = replace(
        program, inputs=tuple(replace(i, requires_grad=n == 0) for n, i in enumerate(program.inputs))
    )
    with pytest.raises(UnsupportedModelError, match="attention stage 2 writes to its input"):
        compile_attention(program, {}, compiler="aot_eager", training=True, cache=StageCache())


def test_more_rows_than_the_code_was_made_for_is_an_error() -> None:
    program = experts_program(*STYLES["gated"])
    stage = compile_experts(program, 2, compiler="aot_eager", training=False, cache=StageCache())
    assert isinstance(stage, RowsStage) and stage.row_limit is None
    with pytest.raises(
        UnsupportedModelError, match="5 rows for the experts of one rank; compiled code holds up to 4"
    ):
        replace(stage, row_limit=4).forward(expert_inputs(program, [2, 3]))


def test_unused_parameter_has_no_gradient() -> None:
    program = small_program(lambda x, w: (x.sin(),), 1)
    stage = compile_attention(program, {}, compiler="aot_eager", training=True, cache=StageCache())
    _, saved = stage.forward([torch.ones(3, HIDDEN), torch.ones(3, HIDDEN)])
    assert stage.backward(saved, {0: torch.ones(3, HIDDEN)}).keys() == {0}


def test_missing_tangent_is_named() -> None:
    stage = compile_attention(
        attention_program(), SIZES, compiler="aot_eager", training=True, cache=StageCache()
    )
    _, saved = stage.forward(attention_inputs(attention_program()))
    with pytest.raises(ValueError, match=r"outputs \[0, 3, 4\]; missing \[0, 4\]"):
        stage.backward(saved, {3: torch.ones(24)})


def test_unknown_compiler_is_named() -> None:
    with pytest.raises(
        InputError, match="stage_compiler='tvm' is unknown; valid are inductor, aot_eager, eager"
    ):
        compile_attention(attention_program(), SIZES, compiler="tvm", training=True, cache=StageCache())


def test_unbound_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not fixed"):
        compile_attention(
            attention_program(),
            {sympy.Symbol("other"): 2},
            compiler="aot_eager",
            training=True,
            cache=StageCache(),
        )


@pytest.mark.parametrize("compiler", FAST)
def test_compiling_where_gradients_are_off_still_trains(compiler: str) -> None:
    program = attention_program()
    with torch.no_grad():  # as inside autograd.Function.forward
        stage = compile_attention(program, SIZES, compiler=compiler, training=True, cache=StageCache())
    assert_stage_equals_eager(stage, eager_attention(program), attention_inputs(program), needs_grad(program))


def test_compiling_inside_a_dynamo_backend() -> None:
    program = attention_program()
    stages: list[CompiledStage] = []

    def backend(graph: fx.GraphModule, _examples: list[object]) -> Callable[..., object]:
        stages.append(
            compile_attention(program, SIZES, compiler="aot_eager", training=True, cache=StageCache())
        )
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert_stage_equals_eager(
        stages[0], eager_attention(program), attention_inputs(program), needs_grad(program)
    )


def test_comparison_would_see_a_wrong_gradient() -> None:
    program = experts_program(*STYLES["gated"])
    stage = compile_experts(program, 4, compiler="aot_eager", training=True, cache=StageCache())

    def corrupted(
        rows: Tensor, weight: Tensor, ends: Tensor, expert: Tensor, *params: Tensor
    ) -> Sequence[Tensor]:
        return eager_experts(program)(rows, weight.detach() * 1.0 + 0.0 * weight, ends, expert, *params)

    with pytest.raises(AssertionError, match="error"):
        assert_stage_equals_eager(
            stage, corrupted, expert_inputs(program, [3, 0, 4, 2]), experts_needs(program)
        )
