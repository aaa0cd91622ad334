"""Where the samples are in each output of a model, which outputs parts of a batch make up, and what gradients into them reach."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import LanguageModel, Sizes
from disagmoe_compile.passes.gradient_reach import reached_inputs
from disagmoe_compile.passes.probe import check_order_of_samples
from disagmoe_compile.testing.virtual import CapturedCall, capture_call

BATCH, LENGTH, HIDDEN = 4, 6, 16
OUTPUTS = ("first", "rows", "length_first", "rows_by_length", "mean", "scale", "pairs")


class Outspoken(LanguageModel):
    def __init__(self) -> None:
        super().__init__(Sizes(n_layers=2, hidden=HIDDEN, num_experts=4, expert_hidden=8), GatheredEinsum)
        self.unused_by_first = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        first_BSD = self.blocks[0](self.embed(input_ids))
        x_BSD = self.unused_by_first(self.blocks[1](first_BSD))
        by_length_SBD = x_BSD.transpose(0, 1)
        return (
            first_BSD,
            x_BSD.flatten(0, 1),
            by_length_SBD,
            by_length_SBD.reshape(-1, HIDDEN),
            x_BSD.mean((0, 1)),
            self.norm.weight.square(),
            x_BSD.mean(1) @ x_BSD.mean(1).t(),
        )


@cache
def call() -> CapturedCall:
    torch.manual_seed(0)
    return capture_call(Outspoken(), {"input_ids": torch.randint(3, 120, (BATCH, LENGTH))})


def test_the_samples_are_in_one_dimension_or_the_output_is_mixed_or_shared():
    found = {name: (o.batch_dim, o.is_mixed) for name, o in zip(OUTPUTS, call().partition.programs.outputs)}
    assert found == {
        "first": (0, False),
        "rows": (0, False),
        "length_first": (1, False),
        "rows_by_length": (0, False),
        "mean": (None, True),
        "scale": (None, False),
        "pairs": (None, True),
    }


def test_rows_that_do_not_follow_the_samples_are_refused_by_the_number_of_the_output():
    programs, captured = call().partition.programs, call().captured
    in_order = [OUTPUTS.index(name) for name in ("first", "rows", "length_first")]
    check_order_of_samples(programs, captured, in_order)
    with pytest.raises(UnsupportedModelError, match=f"output {OUTPUTS.index('rows_by_length')} of the model"):
        check_order_of_samples(programs, captured, [*in_order, OUTPUTS.index("rows_by_length")])


def names(*outputs: str) -> set[str]:
    programs, inputs = call().partition.programs, call().captured.inputs
    return {inputs[i].name for i in reached_inputs(programs, [OUTPUTS.index(name) for name in outputs])}


def test_gradients_reach_what_an_output_is_made_of_and_nothing_else():
    everything, first = names("rows"), names("first")
    assert {"embed.weight", "unused_by_first.weight", "blocks.1.moe.w1"} <= everything
    assert "embed.weight" in first and "blocks.0.moe.w1" in first
    assert not any(name.startswith(("blocks.1", "unused_by_first")) for name in first)
    assert names("scale") == {"norm.weight"}
    assert names() == set()
    assert names("first", "scale") == first | {"norm.weight"}
