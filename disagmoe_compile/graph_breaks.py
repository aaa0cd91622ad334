"""A model on several ranks must be one graph: where torch.compile broke it, and what to do about it."""

from __future__ import annotations

import linecache
import sys
from typing import Any

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import graph_break_reasons

from disagmoe_compile.errors import CaptureError


def check_graph_break(graph_module: fx.GraphModule) -> None:
    """Raises CaptureError if this graph is a part of the model only. Call it before anything is sharded."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        raise _error(reason)


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
                raise _error(graph_break_reasons[-1])
            raise CaptureError(
                f"torch.compile traced {type(root).__name__}, a part of {type(owner).__name__}, instead of the whole model; "
                "see torch.compile(fullgraph=True) for the reason"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _error(reason: Any) -> CaptureError:
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
    text = str(reason.reason).strip()
    why = text.splitlines()[0] if text else "no reason given"
    return CaptureError(f"torch.compile broke the model's graph at {where}: {why}. {_advice(text, where)}")


def _advice(reason: str, where: str) -> str:
    if _loops_over_hit_experts(reason, where):
        return (
            "This experts implementation loops over the experts that were hit, which cannot be traced; "
            'choose one that can: model.set_experts_implementation("grouped_mm")'
        )
    return (
        "A model on several ranks must be one graph; move that line out of the compiled module "
        "(torch.compile(fullgraph=True) lists every break)"
    )


def _loops_over_hit_experts(reason: str, where: str) -> bool:
    is_data_dependent = any(
        word in reason.lower()
        for word in ("data dependent", "data-dependent", "dynamic shape", "nonzero", "u0")
    )
    filename, _, line = where.rpartition(":")
    return (
        is_data_dependent
        and "transformers" in filename
        and _mentions_expert(filename, int(line) if line.isdigit() else 0)
    )


def _mentions_expert(filename: str, line: int) -> bool:
    return any("expert" in linecache.getline(filename, n) for n in range(max(line - 3, 1), line + 4))
