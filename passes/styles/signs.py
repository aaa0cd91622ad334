"""Weights that are certainly not negative, from how they are computed: `combine > 0` then says who is routed."""

from __future__ import annotations

import operator

import torch
from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, value
from disagmoe_compile.passes.styles.ids import is_written, unmoved

_NOT_NEGATIVE = ("softmax", "sigmoid", "relu", "exp", "square", "abs", "softplus", "one_hot", "sqrt", "rsqrt")
_OF_PARTS = ("mul", "div", "truediv", "add", "maximum", "sum", "amax", "mean", "cumsum")
_PICKS = ("topk", "sort", "max", "min")


def is_not_negative(node: fx.Node) -> bool:
    """Whether every element is certainly zero or more (or NaN)."""
    source = unmoved(node)
    if not is_tensor(source) or is_written(source):
        return False
    if is_call(source, *_NOT_NEGATIVE) or value(source).dtype in (torch.bool, torch.uint8):
        return True
    if source.target is operator.getitem and source.args[1] == 0 and is_call(source.args[0], *_PICKS):
        return is_not_negative(source.args[0].args[0])  # type: ignore[union-attr, arg-type]
    if is_call(source, "getattr") and source.args[1] == "values" and is_call(source.args[0], *_PICKS):
        return is_not_negative(source.args[0].args[0])  # type: ignore[union-attr, arg-type]
    if is_call(source, "clamp", "clip", "clamp_min"):
        low = argument(source, 1, "min")
        return isinstance(low, int | float) and low >= 0
    if is_call(source, *_OF_PARTS) and not set(source.kwargs) - {"dim", "keepdim", "dtype"}:
        first, *rest = source.args
        parts = [first, *rest[:1]] if is_call(source, "mul", "div", "truediv", "add", "maximum") else [first]
        return all(
            is_not_negative(p) if is_tensor(p) else isinstance(p, int | float) and p >= 0 for p in parts
        )  # type: ignore[arg-type]
    return False
