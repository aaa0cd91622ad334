"""Initialisation module by module equals initialisation of the whole, holds one module at a time, and leaves nothing out."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from disagmoe_compile.errors import DisagMoEError, UnsupportedModelError
from disagmoe_compile.models.hf import build
from disagmoe_compile.runtime.loading.load import init_weights
from disagmoe_compile.runtime.loading.module_init import InitialValues
from disagmoe_compile.runtime.pending import PENDING, fill, withhold


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "ernie4_5_moe"])
def test_a_transformers_model_gets_the_values_that_it_would_give_itself(family: str) -> None:
    """ernie4_5_moe is tied: its head is initialised too, and then dropped for the embedding."""
    model, config = build(family)
    with torch.device("meta"):
        ours, whole = type(model)(config), type(model)(config)
    torch.manual_seed(3)
    init_weights(ours)
    torch.manual_seed(3)
    whole.to_empty(device="cpu").init_weights()
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), whole.buffers(), strict=True))


def stack(n: int = 3, tied: bool = False) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))
    if tied:
        layers[-1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_those_of_a_model_that_resets_itself(tied: bool) -> None:
    expected = stack(tied=tied)
    torch.manual_seed(5)
    expected.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    model = stack(tied=tied)
    torch.manual_seed(5)
    values = InitialValues(weakref.ref(model), None, torch.get_rng_state())
    withhold(model, values)
    torch.rand(3)  # what the generator does meanwhile does not matter
    found = values.read({"0.weight": (2, 4), "1.bias": None})
    assert torch.equal(found["0.weight"], expected[0].weight[2:4])
    assert torch.equal(found["1.bias"], expected[1].bias)


def test_one_module_has_storage_at_a_time() -> None:
    held: list[int] = []
    model = stack(4)

    def init(module: nn.Module) -> None:
        held.append(sum(p.untyped_storage().nbytes() > 8 for p in model.parameters()))
        for parameter in module.parameters(recurse=False):
            parameter.fill_(1.0)

    init_weights(model, init=init)
    assert held == [2, 2, 2, 2, 0]


def test_until_then_reading_shows_and_writing_raises() -> None:
    with torch.device("meta"):
        model = stack(1)
    parameter = model[0].weight
    withhold(model, InitialValues(weakref.ref(model), None, torch.get_rng_state()))
    assert model[0].weight is parameter and parameter.device.type == "cpu"
    assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        parameter.data.normal_()
    with pytest.raises(RuntimeError, match=r"state_dict\(\) before the first call"):
        model.state_dict()
    parameter.data.zero_()  # torch lets a number be written to an expanded tensor
    with pytest.raises(DisagMoEError, match="written to before it had values"):
        fill(model)
    fill(model)
    assert parameter.isfinite().all() and parameter not in PENDING
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


class Custom(nn.Module):
    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        if resets:
            self.reset_parameters = lambda: self.scale.fill_(1.0)


class Meddling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)
        self.inner.weight.fill_(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Custom, "parameter shift of the model gets no value from the initialisation of Custom"),
        (lambda: Custom(resets=False), r"Custom has no reset_parameters\(\); pass init="),
        (Meddling, r"the model \(Meddling\) cannot be initialised alone: a parameter was written to before"),
    ],
)
def test_what_a_module_does_not_initialise_itself_is_named(make, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        init_weights(make())


def test_a_meta_tensor_that_is_no_buffer_is_named() -> None:
    with torch.device("meta"):
        model = stack(1)
        model[0].table = torch.ones(3)
    with pytest.raises(UnsupportedModelError, match="table of 0 is on the meta device"):
        init_weights(model)
