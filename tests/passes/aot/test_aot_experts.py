"""One expert's function becomes one stage over all experts' rows, or an error that names the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from aot_programs import (
    EXPERTS,
    HIDDEN,
    INNER,
    STYLES,
    assert_same,
    eager_step,
    expert_inputs,
    experts_program,
)
from torch import Tensor

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aot.experts import GroupedExperts, check_row_independence, reference_experts

SQUARE = (HIDDEN, HIDDEN)


def grouped_equals_reference(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
    program = experts_program(function, shapes)
    check_row_independence(program)
    inputs = expert_inputs(program, [3, 0, 2, 1])
    needs = [t.is_floating_point() for t in inputs]
    ours = eager_step(GroupedExperts(program.function, 0), inputs, needs)
    plain = eager_step(lambda r, w, o, _e, *p: (reference_experts(program, r, w, o, *p),), inputs, needs)
    assert_same(ours[0][0], plain[0][0])
    assert ours[2].keys() == plain[2].keys()
    for i in plain[2]:
        assert_same(ours[2][i], plain[2][i])


@pytest.mark.parametrize("style", STYLES)
def test_style_equals_the_loop_over_experts(style: str) -> None:
    grouped_equals_reference(*STYLES[style])


def scaled_rows(rows: Tensor, weight: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return (rows * scale) @ w * weight[:, None]


def scalar_parameter(rows: Tensor, weight: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return (rows * scale) @ w * weight[:, None]


def parameter_arithmetic(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return rows @ (a.t() + b).softmax(-1) * weight[:, None]


def chunked_parameter(rows: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 0)
    return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down) * weight[:, None]


def middle_dimension(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return (rows.view(-1, 2, HIDDEN // 2) @ w).flatten(1) * weight[:, None]


def sized_by_a_parameter(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return (rows @ w).view(rows.shape[0], w.shape[1]) * weight[:, None]


def addmm_bias(rows: Tensor, weight: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(bias, rows, w) * weight[:, None]


def weight_before_the_expert(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return F.relu((rows * weight[:, None]) @ w)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (scaled_rows, ((HIDDEN,), SQUARE)),
        (scalar_parameter, ((), SQUARE)),
        (parameter_arithmetic, (SQUARE, SQUARE)),
        (chunked_parameter, ((2 * INNER, HIDDEN), (HIDDEN, INNER))),
        (middle_dimension, ((HIDDEN // 2, HIDDEN // 2),)),
        (sized_by_a_parameter, (SQUARE,)),
        (addmm_bias, ((HIDDEN,), SQUARE)),
        (weight_before_the_expert, (SQUARE,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_form_equals_the_loop_over_experts(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    grouped_equals_reference(function, shapes)


def mean_over_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return (rows - rows.mean(0)) @ w * weight[:, None]


def softmax_over_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return (rows @ w).softmax(0) * weight[:, None]


def scaled_by_row_count(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return rows @ w * (weight[:, None] / rows.shape[0])


def previous_row(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return rows.cumsum(0) @ w * weight[:, None]


def parameter_first(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(w, rows.t()).t() * weight[:, None]


def joined_with_a_parameter(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return torch.cat([rows, w]).narrow(0, 0, rows.shape[0]) * weight[:, None]


def random_rows(rows: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return F.dropout(rows @ w, 0.5) * weight[:, None]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (mean_over_rows, "mean"),
        (softmax_over_rows, "softmax"),
        (scaled_by_row_count, "truediv"),
        (previous_row, "cumsum"),
        (parameter_first, "t"),
        (joined_with_a_parameter, "cat"),
        (random_rows, "dropout"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_operator_without_a_grouped_form_is_named(function: Callable[..., Tensor], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"experts of boundary 0: {named} \("):
        check_row_independence(experts_program(function, (SQUARE,)))


def test_wrong_output_shape_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match=rf"expected \(5, {HIDDEN}\)"):
        check_row_independence(experts_program(lambda r, w, p: r @ p * w[:, None], ((HIDDEN, 3),)))


def test_check_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    check_row_independence(experts_program(*STYLES["gpt_oss"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_local_expert() -> None:
    program = experts_program(*STYLES["gpt_oss"], num_experts=EXPERTS)
    inputs = expert_inputs(program, [4])
    (ours,) = GroupedExperts(program.function, 0)(*inputs)
    assert_same(ours, reference_experts(program, *inputs[:3], *inputs[4:]))
