"""Parameters that have a shape but no values yet: models that are larger than what one rank may hold.

    model on the meta device ──withhold──> placeholders ──first call──> traced hollow ──bind──> each rank reads its own part

`withhold` keeps the Parameter objects, which an optimizer may hold already. Until the first call they are views of one NaN:
reading them harms nothing and shows, and what is written to them is noticed. Where the values come from (`loading/`) is asked at
the first call, when the plan has said which rank owns what.

`PENDING` is to such Parameters what `binding.HOLDERS` is to bound ones; a Parameter leaves it when it is given its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from disagmoe_compile.errors import DisagMoEError, UnsupportedModelError
from disagmoe_compile.runtime.hollow import hollow, is_hollow
from disagmoe_compile.runtime.placement import Rows


class Values(Protocol):
    """Where the values of a model's parameters come from."""

    @property
    def identity(self) -> str:
        """The same text on ranks that would get the same values."""
        ...

    def read(self, wanted: Mapping[str, Rows | None]) -> dict[str, torch.Tensor]:
        """Rows of dimension 0 (None: all) of the parameters named, on the CPU, in tensors of their own."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """`stride`: of the parameter once it has values."""

    name: str
    values: Values
    stride: tuple[int, ...]


PENDING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # nn.Parameter -> Pending

_NOTHING: dict[torch.dtype, torch.Tensor] = {}  # the NaN that all placeholders of a type are views of


def pending_of(parameter: torch.Tensor) -> Pending | None:
    """Where a Parameter will get its values from; None if it has them."""
    pending: Pending | None = PENDING.get(parameter)
    return pending


def withhold(module: nn.Module, values: Values) -> None:
    """Frees the storage of every parameter of `module`; on the meta device it moves to the CPU, the same object.

    Raises UnsupportedModelError for a kind of Parameter that cannot move, or that has no NaN.
    """
    for name, parameter in module.named_parameters():
        if not parameter.dtype.is_floating_point or parameter.device.type not in ("cpu", "meta"):
            raise UnsupportedModelError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}: only floats on the CPU or the meta "
                "device can wait for their values"
            )
        stride = parameter.stride()
        if parameter.is_meta:
            _to_cpu(name, parameter)
        else:
            parameter.data = _placeholder(parameter)
        PENDING[parameter] = Pending(name, values, stride)
    module.register_state_dict_pre_hook(_refuse_state_dict)


def values_for(wanted: Iterable[tuple[nn.Parameter, Rows | None]]) -> dict[int, torch.Tensor]:
    """Rows of pending Parameters, by the Parameter's id; to be given to it."""
    by_source: dict[int, tuple[Values, dict[str, Rows | None], dict[str, nn.Parameter]]] = {}
    for parameter, rows in wanted:
        pending: Pending = PENDING[parameter]
        _, asked, named = by_source.setdefault(id(pending.values), (pending.values, {}, {}))
        asked[pending.name], named[pending.name] = rows, parameter
    hollow_ones = [parameter for parameter in PENDING if is_hollow(parameter)]
    put_placeholders()  # reading may run code of the model's author, which must not meet tensors without storage
    check_unwritten()
    found = {
        id(named[name]): value.to(named[name].dtype)
        for values, asked, named in by_source.values()
        for name, value in values.read(asked).items()
    }
    for parameter in hollow_ones:
        _make_hollow(parameter, PENDING[parameter])
    return found


def check_unwritten() -> None:
    """Raises DisagMoEError if something was written to a parameter that has no values: it would be lost."""
    for nothing in _NOTHING.values():
        if not nothing.isnan():
            nothing.fill_(float("nan"))
            raise DisagMoEError(
                "a parameter was written to before it had values, which is lost: write after the first call"
            )


def give(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """The Parameter's value, or this rank's part of it: from now on it has one."""
    PENDING.pop(parameter, None)
    parameter.data = value


def fill(module: nn.Module) -> None:
    """Gives every parameter of `module` that still waits for its values all of them."""
    waiting = [parameter for parameter in module.parameters() if parameter in PENDING]
    values = values_for((parameter, None) for parameter in waiting)
    for parameter in waiting:
        give(parameter, values[id(parameter)])


def hollow_out() -> None:
    """While Dynamo traces, pending parameters have the strides that they will have, and no storage."""
    for parameter, pending in list(PENDING.items()):
        if not is_hollow(parameter):
            _make_hollow(parameter, pending)


def put_placeholders() -> None:
    """After a trace, for those that it did not bind."""
    for parameter in list(PENDING):
        parameter.data = _placeholder(parameter)


def _make_hollow(parameter: nn.Parameter, pending: Pending) -> None:
    parameter.data = hollow(tuple(parameter.shape), pending.stride, parameter.dtype, parameter.device)


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.dtype not in _NOTHING:
        _NOTHING[parameter.dtype] = torch.full((), float("nan"), dtype=parameter.dtype)
    return _NOTHING[parameter.dtype].expand(parameter.shape)


def _to_cpu(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter:
        raise UnsupportedModelError(
            f"parameter {name} on the meta device is a {type(parameter).__name__}, not an nn.Parameter, and cannot be moved: "
            "build the model on the CPU"
        )
    moved = nn.Parameter(_placeholder(parameter), requires_grad=parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, moved)
    except RuntimeError as error:  # torch swaps only what nothing refers to weakly
        raise UnsupportedModelError(
            f"parameter {name} on the meta device cannot be given values any more: a call of the model or a hook refers to "
            "it: call load_safetensors or init_weights right after building the model"
        ) from error


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    waiting = next((name for name, p in module.named_parameters() if p in PENDING), None)
    if waiting is not None:
        raise DisagMoEError(
            f"state_dict() before the first call of the compiled model: parameter {waiting} has no values yet; call it first"
        )
