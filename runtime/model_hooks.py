"""What a model that is spread over ranks answers to a script that uses it without its compiled form.

An eager call would compute with this rank's parts, and pickling would save them as if they were the model: both raise. Copies
(`copy.deepcopy`, averaged weights) are parts as their model is, and get to know it: their `state_dict()` is global too. They are
not compiled again, and average the parts of a model only if they are parts themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.runtime.binding import HOLDERS, Binding, BoundParameter, Holder, holder_of


class ModelHook:
    """A hook that copies of its module share, and that cannot be pickled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DisagMoEError(
            "this model is spread over ranks, and pickling it would save the parts of this rank alone: save "
            "disagmoe_compile.full_state_dict(model), or model.state_dict() with torch.distributed.checkpoint"
        )


def refuse_eager_call(module: nn.Module, args: Any) -> None:
    """A forward pre-hook. Dynamo traces through it and leaves nothing of it."""
    if not torch.compiler.is_compiling():
        raise DisagMoEError(
            f"{type(module).__name__} was called eagerly, but its parameters are spread over ranks since the first call of its "
            "compiled form: call what torch.compile(model) returned, or use model.compile(), which compiles it in place "
            "(for generate() too); of a copy, load disagmoe_compile.full_state_dict(model) into a model that was never spread"
        )


_SPREAD: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # without their copies


def watch_calls(root: nn.Module) -> None:
    """From now on `root` is spread over ranks, and its copies are copies of such a model."""
    root.register_forward_pre_hook(refuse_eager_call)
    _SPREAD.add(root)


def refuse_copies(module: nn.Module) -> None:
    """Raises InputError where the module, or what it wraps, is a copy of a model that is spread over ranks."""
    for one in (module, *module.children()):
        if refuse_eager_call in one._forward_pre_hooks.values() and one not in _SPREAD:
            raise InputError(
                f"{type(module).__name__} is a copy of a model that is spread over ranks, and holds this rank's parts of it: "
                "compile and call the model itself, or load disagmoe_compile.full_state_dict(copy) into a model that was never "
                "spread"
            )


def refuse_averages_of_wholes() -> None:
    """From now on an AveragedModel that was made before its model was spread raises InputError when it is updated."""
    torch_s_own = AveragedModel.update_parameters
    if getattr(torch_s_own, "_refuses_wholes", False):
        return

    @wraps(torch_s_own)
    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        for ours, theirs in zip(average.module.parameters(), model.parameters()):
            holder = holder_of(theirs)
            if holder is not None and ours.shape != theirs.shape:
                raise InputError(
                    f"the AveragedModel has the whole of {holder.bound.fqn}, and the model is spread over ranks since: make it "
                    "after the first call of the compiled model, when it copies this rank's parts"
                )
        torch_s_own(average, model)

    update_parameters._refuses_wholes = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


class Family:
    """A bound model and its copies. `bound_of` knows the parameters of all of them."""

    def __init__(self, root: nn.Module, binding: Binding) -> None:
        self._root, self._binding = weakref.ref(root), binding
        self._by_name: dict[str, BoundParameter] = {}
        self._learn_names()

    def bound_of(self, module: nn.Module) -> dict[str, BoundParameter]:
        """By the module's own names: those in the graph need not be the same, and tied parameters have several."""
        self._learn_names()
        found = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            holder = holder_of(parameter) or self._adopt(name, parameter)
            if holder is not None and holder.group is self._binding.group:
                found[name] = holder.bound
        return found

    def _learn_names(self) -> None:
        """While the model lives: a later graph may have bound more of it."""
        root = self._root()
        if root is not None:
            for name, parameter in root.named_parameters(remove_duplicate=False):
                holder = holder_of(parameter)
                if holder is not None:
                    self._by_name[name] = holder.bound

    def _adopt(self, name: str, parameter: nn.Parameter) -> Holder | None:
        """Of a copy: the same part of the parameter of the same name."""
        origin = self._by_name.get(name)
        if origin is None or tuple(parameter.shape) != origin.local_shape:
            return None
        bound = replace(
            origin,
            reference=weakref.ref(parameter),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=parameter.requires_grad,
        )
        HOLDERS[parameter] = Holder(bound, self._binding.group, self._binding.history)
        return HOLDERS[parameter]  # type: ignore[no-any-return]
