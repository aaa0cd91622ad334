"""Warnings point at the line that called the compiled model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from disagmoe_compile.runtime.user_warning import warn_at_call


def warning_backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    warn_at_call("while compiling")

    def run(*arguments: Any) -> Any:
        warn_at_call("while running")
        return gm(*arguments)

    return run


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def compiled_module() -> Callable[..., Any]:
    return torch.compile(Layer(), backend=warning_backend)


def compiled_in_place() -> Callable[..., Any]:
    model = Layer()
    model.compile(backend=warning_backend)
    return model


def compiled_function() -> Callable[..., Any]:
    return torch.compile(lambda x: x + 1, backend=warning_backend)


@pytest.mark.parametrize("make", [compiled_module, compiled_in_place, compiled_function])
def test_the_line_of_the_call_is_named(make: Callable[[], Callable[..., Any]]) -> None:
    torch._dynamo.reset()
    call = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(torch.ones(1, 2))
    here = test_the_line_of_the_call_is_named.__code__
    found = {str(one.message): (one.filename, one.lineno) for one in caught if "while" in str(one.message)}
    assert found.keys() == {"while compiling", "while running"}
    assert set(found.values()) == {(here.co_filename, here.co_firstlineno + 6)}


def test_outside_a_compiled_call_it_is_the_caller() -> None:
    with pytest.warns(UserWarning, match="alone") as caught:
        warn_at_call("alone")
    assert caught[0].filename == __file__
