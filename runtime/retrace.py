"""Dynamo sees global shapes, always: when it first traces, and at every later trace of a model whose
parameters are parts.

Two halves. `drop_parameter_guards` is called by the backend while Dynamo compiles: the guards that Dynamo
just took on the global shape of a parameter would fail at the next call, where the parameter is this rank's
part. What they protected is checked by `Binding.check` instead. `present_global_shapes` swaps, for the time
of any compilation in the process, every part for a hollow tensor of the global shape and parks its gradient.
Parameters without values (`pending.py`) are hollow for that time too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._guards import ChainedSource, Source, TracingContext

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime import pending
from disagmoe_compile.runtime.binding import HOLDERS, holder_of
from disagmoe_compile.runtime.hollow import hollow, is_hollow

_PARKED: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []


def drop_parameter_guards(sources: Collection[str]) -> int:
    """Discards the TENSOR_MATCH guards of the parameters whose Dynamo source names are given; returns how
    many.

    Call it from the backend, with the sources of all bound parameters of the graph
    (`node._dynamo_source.name`). Raises DisagMoEError outside of a compilation, or where a parameter has no
    such guard: Dynamo's way of guarding has changed.
    """
    context = TracingContext.try_get()
    if context is None:
        raise DisagMoEError(
            "parameter guards can only be dropped while Dynamo compiles: call it inside the backend"
        )
    guards = context.guards_context.dynamo_guards
    wanted = set(sources)
    found = [g for g in guards.inner if g.create_fn_name() == "TENSOR_MATCH" and g.name in wanted]
    missing = wanted - {g.name for g in found}
    if missing:
        raise DisagMoEError(
            f"Dynamo holds no guard for parameter {sorted(missing)[0]} (torch {torch.__version__}): parts of parameters would "
            "be recompiled at every call; use a torch version that disagmoe-compile supports"
        )
    for guard in found:
        guards.inner.discard(guard)
    return len(found)


def guard_model_identity(source: Source) -> None:
    """Makes Dynamo compile anew for another model of the same class; without parameter guards it would take the first one's code.

    `source`: Dynamo's source of any parameter; its root is the model, or what holds it. Call it from the backend.
    """
    while isinstance(source, ChainedSource):
        source = source.base
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def present_global_shapes() -> None:
    """Registers the swap with Dynamo, once however often called; call it from every backend call.

    Also makes Dynamo raise at its recompile limit, past which it would run the model eagerly on parts, silently wrong.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if _hollow_out not in callback_handler.start_callbacks:
        callback_handler.start_callbacks = _Lasting(_hollow_out, callback_handler.start_callbacks)
        callback_handler.end_callbacks = _Lasting(_fill_in, callback_handler.end_callbacks)


def require_global_shapes(parameters: Iterable[torch.Tensor]) -> None:
    """In the backend, before it looks at the graph. Raises DisagMoEError if this trace saw a part of a
    parameter.
    """
    for parameter in parameters:
        holder = holder_of(parameter)
        if holder is not None and holder.bound.is_resharded and not is_hollow(parameter):
            raise DisagMoEError(
                f"parameter {holder.bound.fqn} was traced with the shape of this rank's part, because Dynamo's compilation "
                "callbacks were removed after the first call: leave torch._dynamo.callback_handler alone"
            )


class _Lasting(list[Callable[[CallbackArgs], None]]):
    """Callbacks whose first outlives `torch._dynamo.reset()`, which clears them all: parts stay parts after
    it.
    """

    def __init__(
        self, first: Callable[[CallbackArgs], None], others: Iterable[Callable[[CallbackArgs], None]]
    ) -> None:
        super().__init__([first, *others])
        self._first = first

    def clear(self) -> None:
        self[:] = [self._first]


def _hollow_out(_: CallbackArgs) -> None:
    """Parks what it swaps as it goes, so that `_fill_in` restores everything even if this stops half-way."""
    for parameter, holder in list(HOLDERS.items()):
        if holder.bound.is_resharded and not is_hollow(parameter):
            _PARKED.append((parameter, parameter.data, parameter.grad))
            parameter.grad = None  # a gradient must have its parameter's shape
            whole = holder.bound.hollow
            if parameter.dtype != whole.dtype:  # converted: it must trace, for the call to say so
                whole = hollow(tuple(whole.shape), whole.stride(), parameter.dtype, whole.device)
            parameter.data = whole
    pending.hollow_out()


def _fill_in(_: CallbackArgs) -> None:
    pending.put_placeholders()
    while _PARKED:
        parameter, data, gradient = _PARKED.pop()
        parameter.data = data
        parameter.grad = gradient
