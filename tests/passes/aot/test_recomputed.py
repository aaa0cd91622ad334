"""A stage that keeps only its inputs refuses to run again on inputs that have changed."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.passes.aot import RecomputedStage


class Squaring:
    """x -> x * x, by hand; keeps x."""

    tangents = gradient_inputs = (0,)
    weight_inputs: frozenset[int] = frozenset()
    splits_weight_gradient = False

    def forward(self, inputs):
        return [inputs[0] * inputs[0]], inputs[0].clone()

    def backward(self, saved, tangents):
        return {0: 2 * saved * tangents[0]}

    def backward_input(self, saved, tangents):
        return self.backward(saved, tangents), {}

    def backward_weight(self, saved):
        return saved


def test_a_second_forward_gives_the_gradients_of_the_first():
    stage, x = RecomputedStage(Squaring()), torch.tensor([3.0])
    (y,), saved = stage.forward([x])
    assert y == 9.0
    assert stage.backward(saved, {0: torch.ones(1)})[0] == 6.0
    assert stage.backward_input(saved, {0: torch.ones(1)})[0][0] == 6.0


def test_an_input_written_to_after_the_forward_is_an_error_and_not_another_gradient():
    stage, x = RecomputedStage(Squaring()), torch.tensor([3.0])
    _, saved = stage.forward([x])
    x.add_(1.0)
    with pytest.raises(DisagMoEError, match=r"input 0 \(1,\) of a recomputed stage was written to between"):
        stage.backward(saved, {0: torch.ones(1)})
