"""Every call of a compiled model, seen from outside: what Dynamo does without asking the backend must not go unnoticed.

    torch.compile's wrapper ──enter──> Dynamo traces, or skips the frame, or runs what it has ──exit──> the caller
                              here                                                              here

Dynamo answers a break inside a loop by running the model's frame eagerly, without a word and without the backend; several ranks
would each train a copy of their own. So under several ranks a break is an error at once, as with `fullgraph=True`, and so is a
call that no session of ours answered (`torch.compiler.set_stance("force_eager")`, for one).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.utils import _get_error_on_graph_break, _set_error_on_graph_break
from torch.nn.parallel import DistributedDataParallel

from disagmoe_compile.early_batch import innermost
from disagmoe_compile.errors import CaptureError, InputError
from disagmoe_compile.graph_breaks import as_capture_error, one_graph
from disagmoe_compile.runtime.model_hooks import refuse_copies
from disagmoe_compile.runtime.process_group import several_ranks
from disagmoe_compile.runtime.session import Session


class WatchedCall(AbstractContextManager[None]):
    """Around one call of a compiled model. Raises CaptureError, one line, where it was not captured whole, InputError where
    it is a copy of a model that is spread over ranks, on the meta device, wrapped in DistributedDataParallel, or traced more
    often than torch allows.
    """

    def __enter__(self) -> None:
        self._several_ranks, self._answered = several_ranks(), Session.answered
        if self._several_ranks:
            called = _called()
            if called is not None:
                refuse_copies(called)
            self._before = _get_error_on_graph_break()
            _set_error_on_graph_break(True)
            self._config = one_graph()
            self._config.__enter__()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """torch calls it in a `finally`, and does not pass the exception on its way."""
        if self._several_ranks:
            self._config.__exit__(None, None, None)
            _set_error_on_graph_break(self._before)
        error = sys.exc_info()[1]
        refused = _unfit(error) or as_capture_error(error) or _without_values(error)
        if refused is not None:
            raise refused from error
        if error is None and self._several_ranks and Session.answered == self._answered:
            raise CaptureError(
                "torch.compile ran the model eagerly, without asking the disagmoe backend, so that every rank would train a "
                "copy of its own; see torch.compile(fullgraph=True) for the reason"
            )


def _unfit(error: BaseException | None) -> InputError | None:
    """For errors whose own text names a symptom in torch's words: what is wrong with the model that was called."""
    if isinstance(error, FailOnRecompileLimitHit):
        return InputError(
            f"torch.compile traced this code {torch._dynamo.config.recompile_limit} times, each time for a value or a module "
            "that it had not met, and that is its limit: pass what changes as a tensor, call torch._dynamo.reset() before "
            "another model, or raise torch._dynamo.config.recompile_limit"
        )
    model = _called() if isinstance(error, TorchDynamoException) else None
    if isinstance(model, DistributedDataParallel):
        return InputError(
            "the compiled model is wrapped in DistributedDataParallel: compile the model itself, its gradients are those of the "
            "whole batch on every rank that holds them"
        )
    return None


def _without_values(error: BaseException | None) -> InputError | None:
    """Dynamo names the first operation that meets a meta tensor and a real one; the user wants to know where values come from."""
    model = _called() if isinstance(error, TorchDynamoException) else None
    name = next((name for name, p in model.named_parameters() if p.is_meta), None) if model else None
    if name is None:
        return None
    return InputError(
        f"parameter {name} is on the meta device and has no values: before the first call, on every rank, "
        "disagmoe_compile.load_safetensors(model, folder) or disagmoe_compile.init_weights(model)"
    )


def _called() -> nn.Module | None:
    """The module that the call on its way is of."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, OptimizedModule):
            module: nn.Module = model._orig_mod
            return module
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:  # of `model.compile()`
            return model
        frame = frame.f_back
    return None


def watch_calls_of(backend: Callable[..., Any], check_options: Callable[[Any], object]) -> None:
    """Dynamo enters a backend's `backend_ctx_ctor()` around each call, but looks for it on wrappers that hide it; this lets it
    through, for every backend alike. It looks when `torch.compile` is called, so there `check_options` meets the options too.
    """

    def constructor(wrapper: Any) -> Any:
        found = innermost(wrapper)
        if found is backend:
            check_options(_options_of(wrapper))
        return getattr(found, "backend_ctx_ctor", contextlib.nullcontext)

    backend.backend_ctx_ctor = WatchedCall  # type: ignore[attr-defined]
    WrapBackendDebug.backend_ctx_ctor = property(constructor)  # type: ignore[attr-defined]


def _options_of(wrapper: Any) -> Any:
    """What `torch.compile` was given, from its own wrapper; None where it was not called."""
    inner = getattr(wrapper, "_torchdynamo_orig_backend", None)
    return getattr(inner, "kwargs", {}).get("options")
