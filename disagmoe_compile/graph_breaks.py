"""A model on several ranks must be one graph: where torch.compile broke it, and the change that mends it.

Most breaks of MoE code are loops whose length depends on the routing. Each has a form that traces, and the error names it.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from traceback import FrameSummary
from typing import Any

import torch
import torch._dynamo.config
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.utils import graph_break_reasons
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from disagmoe_compile.errors import CaptureError

_TORCH = os.path.dirname(torch.__file__)
_DATA_DEPENDENT = ("data-dependent", "data dependent", "dynamic shape operator", "tensor.item()", "tolist")
# transformers adds the last two
_LOG_METHODS = ("debug", "info", "warning", "error", "critical", "log", "warning_once", "info_once")
_EVERY_EXPERT = (
    "loop over all experts, `for e in range(num_experts)`: torch.where(ids == e) of an expert without tokens is empty, which is "
    "allowed"
)
_NO_IF = "remove the `if`: torch.where(ids == e) of an expert without tokens is empty, which is allowed"
_NO_LIST = (
    "count with F.one_hot(ids, num_experts).sum(0) (torch does not know how many counts bincount returns), pass "
    "torch.cumsum(counts, 0) as the offsets of torch._grouped_mm, or loop over all experts with torch.where(ids == e)"
)
_FIXED_SIZES = "keep the sizes fixed: mask or pad with torch.where instead of selecting, and compute what the line would skip"


def one_graph() -> AbstractContextManager[None]:
    """Around a call of a compiled model: Dynamo does not break its graph for sizes that depend on the data (the passes see to
    them), nor for messages to a logger (which are left out).

    A float stays a constant of the graph: a second model with another scale, or another value of an argument, is traced again.
    Dynamo's way would make it an input, a number that the passes can neither count with nor divide a loss by.
    """
    loggers = {getattr(logging.Logger, name) for name in _LOG_METHODS if hasattr(logging.Logger, name)}
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        specialize_float=True,
        ignore_logging_functions=torch._dynamo.config.ignore_logging_functions | loggers,
    )
    return patch


def check_graph_break(graph_module: fx.GraphModule) -> None:
    """Raises CaptureError if this graph is a part of the model only. Call it before anything is sharded."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        raise _error(*_described(reason.user_stack, reason.reason))


def check_whole_model(root: nn.Module) -> None:
    """Raises CaptureError if `root`, whose frame Dynamo compiles, was called by another module of the compiled model.

    A break inside a loop makes Dynamo skip the model's own frame and compile only what it calls: graphs that look whole. Then the
    stack holds frames of other modules between us and torch.compile's wrapper.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, OptimizedModule):
            return
        if isinstance(owner, nn.Module) and owner is not root:
            if graph_break_reasons:
                last = graph_break_reasons[-1]
                raise _error(*_described(last.user_stack, last.reason))
            raise CaptureError(
                f"torch.compile traced {type(root).__name__}, a part of {type(owner).__name__}, instead of the whole model; "
                "see torch.compile(fullgraph=True) for the reason"
            )
        frame = frame.f_back  # type: ignore[assignment]


def as_capture_error(error: BaseException | None) -> CaptureError | None:
    """What Dynamo raises where it may not break the graph, in one line; None for errors of another kind."""
    found = where_and_why(error)
    return None if found is None else _error(*found)


def where_and_why(error: BaseException | None) -> tuple[str, str] | None:
    """(`file:line`, what stopped Dynamo there and the change that mends it); None for errors of another kind."""
    if not isinstance(error, Unsupported | UserError | GuardOnDataDependentSymNode):
        return None
    return _described(getattr(error, "real_stack", None) or (), str(error))


def _error(where: str, why: str) -> CaptureError:
    return CaptureError(f"torch.compile broke the model's graph at {where}: {why}")


def _described(stack: Sequence[FrameSummary], reason: Any) -> tuple[str, str]:
    frame = next((f for f in reversed(stack) if not f.filename.startswith(_TORCH)), None)
    where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
    if frame is not None and "context manager" in str(reason) and "`lock`" in str(reason):
        return where, (
            f"`{(frame.line or '').strip()}` sets the model up at its first call; make that call before the compiled one: "
            "with torch.no_grad(): model(...)"
        )
    if frame is None or not any(word in str(reason).lower() for word in _DATA_DEPENDENT):
        why = next(iter(str(reason).strip().splitlines()), "no reason given").rstrip(".")
        return where, (
            f"{why}. A model on several ranks must be one graph; move that line out of the compiled module "
            "(torch.compile(fullgraph=True) lists every break)"
        )
    if _mentions_expert(frame) and _has_implementations(frame):
        return where, (
            "this experts implementation loops over the experts that were hit, which cannot be traced; "
            'choose one that can: model.set_experts_implementation("grouped_mm")'
        )
    line = (frame.line or "").strip()
    change = _change(line) if _is_of_experts(frame) else _FIXED_SIZES
    return where, f"`{line}` depends on the values of a tensor, which cannot be traced; {change}"


def _change(line: str) -> str:
    """The change for a line whose control flow or sizes depend on the routing."""
    if line.startswith(("for ", "while ")) or "nonzero" in line or "unique" in line:
        return _EVERY_EXPERT
    if line.startswith(("if ", "elif ", "assert ")):
        return _NO_IF
    return _NO_LIST


def _is_of_experts(frame: FrameSummary) -> bool:
    """Whether the line is of code that routes: its neighbourhood or its own module knows a top-k, or names experts."""
    line = frame.lineno or 0
    near = "".join(linecache.getline(frame.filename, n) for n in range(max(line - 20, 1), line + 5)).lower()
    return any(word in near for word in ("expert", "topk", "top_k", "rout"))


def _has_implementations(frame: FrameSummary) -> bool:
    """Whether the file's experts are of transformers' exchangeable kind."""
    return any("use_experts_implementation" in line for line in linecache.getlines(frame.filename))


def _mentions_expert(frame: FrameSummary) -> bool:
    line = frame.lineno or 0
    return any("expert" in linecache.getline(frame.filename, n) for n in range(max(line - 3, 1), line + 4))
