"""The batched form of experts equals the loop, forward and gradient, and stands in where the grouped one has no form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from aot_programs import (
    HIDDEN,
    STYLES,
    assert_same,
    eager_step,
    expert_inputs,
    experts_program,
)
from torch import Tensor

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot import StageCache, compile_experts, compilers, reference_experts
from disagmoe_compile.passes.aot.batched import Padding, check_batched
from disagmoe_compile.passes.program import ExpertsProgram
from disagmoe_compile.runtime.stages import CompiledStage

COUNTS = ([0, 0, 0, 0], [0, 1, 0, 0], [3, 0, 4, 2], [1, 1, 1, 1], [17, 40, 8, 0])
SQUARE = (HIDDEN, HIDDEN)


@pytest.fixture
def empty_disk_cache() -> Iterator[None]:
    """Inductor's, so that a test does not depend on what earlier runs left there."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def parameter_first(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(w, rows.t()).t() * weight[:, None]


def matrix_of_each_head(rows: Tensor, weight: Tensor, w_HKN: Tensor) -> Tensor:
    heads_PHK = rows.view(rows.shape[0], 2, HIDDEN // 2)
    return torch.einsum("phk,hkn->phn", heads_PHK, w_HKN).flatten(1) * weight[:, None]


def normed_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(w, (rows / rows.norm(dim=-1, keepdim=True)).t()).t() * weight[:, None]


def nothing_grouped(name: str) -> tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]:
    return {
        "parameter first": (parameter_first, (SQUARE,)),
        "matrix of each head": (matrix_of_each_head, ((2, HIDDEN // 2, HIDDEN // 2),)),
        "normed rows": (normed_rows, (SQUARE,)),
    }[name]


def assert_equals_loop(stage: CompiledStage, program: ExpertsProgram, counts: list[int]) -> None:
    inputs = expert_inputs(program, counts)
    needs = [True, True, False, False, *(p.requires_grad for p in program.params)]
    outputs, tangents, expected = eager_step(
        lambda rows, weight, ends, _expert, *params: (
            reference_experts(program, rows, weight, ends, *params),
        ),
        inputs,
        needs,
    )
    assert stage.tangents == tuple(tangents)
    (out,), saved = stage.forward(inputs)
    assert_same(out, outputs[0])
    found = stage.backward(saved, tangents)
    assert found.keys() == expected.keys()
    of_inputs, state = stage.backward_input(saved, tangents)
    of_weights = stage.backward_weight(state)
    assert of_weights.keys() <= stage.weight_inputs and {0, 1} <= of_inputs.keys()
    assert not of_weights.keys() & of_inputs.keys()
    for i, gradient in expected.items():
        assert_same(found[i], gradient)
        assert_same({**of_inputs, **of_weights}[i], gradient)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("style", STYLES)
def test_batched_experts_equal_the_loop_for_any_number_of_rows(
    empty_disk_cache: None, compiler: str, style: str
) -> None:
    program = experts_program(*STYLES[style])
    stage = compile_experts(program, 4, compiler=compiler, training=True, lowering="vmap", cache=StageCache())
    for counts in COUNTS:
        assert_equals_loop(stage, program, counts)


def compiled_sum_over_rows() -> tuple[CompiledStage, ExpertsProgram]:
    """The gradient of the parameter is a sum over rows."""

    def scaled(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
        return rows * w * weight[:, None]

    program = experts_program(scaled, ((HIDDEN,),))
    how = {"compiler": "inductor", "training": True, "lowering": "vmap", "split_weight_gradient": False}
    return compile_experts(program, 4, cache=StageCache(), **how), program  # type: ignore[arg-type]


def test_code_for_sums_over_rows_is_right_for_few_of_them_and_for_many(empty_disk_cache: None) -> None:
    """While tracing there are 8191; from 4097 on Inductor has other code, which it must not choose."""
    stage, program = compiled_sum_over_rows()
    for counts in (*COUNTS, [9000, 17, 5000, 0]):
        assert_equals_loop(stage, program, counts)


def test_what_code_assumes_of_sizes_is_known_where_it_comes_from_the_disk_cache(
    empty_disk_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "SHAPE_SETTINGS", {})  # Inductor assumes more than 4096 rows
    before = compilers.fx_graph_cache_hits()
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"the traced graph assumes s\d+ .* fails for 2 rows"):
            compiled_sum_over_rows()
    assert compilers.fx_graph_cache_hits() > before


@pytest.mark.parametrize("name", ["parameter first", "matrix of each head", "normed rows"])
def test_experts_without_a_grouped_form_are_batched(name: str) -> None:
    program = experts_program(*nothing_grouped(name))
    with pytest.raises(UnsupportedModelError, match="experts of boundary 0"):
        compile_experts(
            program, 4, compiler="eager", training=True, lowering="grouped_mm", cache=StageCache()
        )
    stage = compile_experts(program, 4, compiler="aot_eager", training=True, cache=StageCache())
    for counts in COUNTS:
        assert_equals_loop(stage, program, counts)


def test_a_lowering_is_part_of_the_key() -> None:
    cache, program = StageCache(), experts_program(*STYLES["gated"])
    for lowering in ("grouped_mm", "vmap"):
        compile_experts(program, 4, compiler="eager", training=True, lowering=lowering, cache=cache)
    assert (cache.stats.compiled, cache.stats.reused) == (2, 0)


def previous_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return rows.cumsum(0) @ w * weight[:, None]


def mean_over_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return (rows - rows.mean(0)) @ w * weight[:, None]


def scaled_by_row_count(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return rows @ w * (weight[:, None] / rows.shape[0])


@pytest.mark.parametrize("function", [previous_rows, mean_over_rows, scaled_by_row_count])
def test_rows_that_depend_on_one_another_are_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="rows are not independent"):
        check_batched(experts_program(function, (SQUARE,)))


def random_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return F.dropout(rows @ w, 0.5) * weight[:, None]


def test_where_neither_form_is_right_both_reasons_are_given() -> None:
    program = experts_program(random_rows, (SQUARE,))
    with pytest.raises(
        UnsupportedModelError, match=r"dropout \(dropout\) .* Not batched with vmap either: .*"
    ):
        compile_experts(program, 4, compiler="eager", training=True, cache=StageCache())


def test_padding_repeats_rows_of_the_same_expert() -> None:
    padding = Padding.of(torch.tensor([2, 2, 5], dtype=torch.int32))
    assert padding.source_RE.tolist() == [[0, 0, 2], [1, 0, 3], [0, 0, 4]]
    assert padding.idle_E.tolist() == [False, True, False]
    rows = torch.arange(5.0)[:, None]
    assert torch.equal(padding.unpad(padding.pad(rows)), rows)
    assert padding.pad_with_zeros(rows + 1).squeeze(-1).tolist() == [[1, 0, 3], [2, 0, 4], [0, 0, 5]]


def test_the_gradient_of_an_expert_without_rows_is_zero_even_where_its_function_overflows() -> None:
    def reciprocal(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
        return (rows / w) * weight[:, None]

    program = experts_program(reciprocal, ((HIDDEN,),))
    stage = compile_experts(
        program, 2, compiler="aot_eager", training=True, lowering="vmap", cache=StageCache()
    )
    inputs = expert_inputs(program, [3, 0])
    inputs[4][1] = 0  # the expert without rows divides by zero
    outputs, saved = stage.forward(inputs)
    gradients = stage.backward(saved, {0: torch.ones_like(outputs[0])})
    assert torch.equal(gradients[4][1], torch.zeros(HIDDEN))
    assert gradients[4].isfinite().all()
