"""The same dumps through torch's structured trace: `TORCH_TRACE=DIR python script.py`, then `tlparse DIR/*.log`.

Artifacts are made only where a trace is being written, and stand beside Dynamo's of the same compilation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch._logging
from torch import fx
from torch._guards import CompileContext, TraceId, compile_context
from torch._logging._internal import trace_log

from disagmoe_compile.inspect.dump import header_of, render
from disagmoe_compile.inspect.schedule_grid import schedule_text
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.serialize import to_dict


def trace_wanted() -> bool:
    """Whether a structured trace is being written to a directory: torch has a handler without one until its first message."""
    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def structured_trace(captured: CapturedGraph) -> StructuredTrace | None:
    """Where what is made of this graph is to be shown, or None where no trace is being written."""
    return StructuredTrace(captured.trace_id) if trace_wanted() else None


@dataclass(frozen=True, slots=True)
class StructuredTrace:
    """Observer of a pass manager, and more: each call writes artifacts called `disagmoe_...`.

    `trace_id` is the compilation they belong to: some are made after it has ended.
    """

    trace_id: TraceId | None

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        """`disagmoe_NN_pass`: the same Python that a dump holds."""
        self.graph(f"{index:02d}_{pass_name}", graph_module, header_of(index, pass_name, report))

    def graph(self, name: str, graph_module: fx.GraphModule, header: Iterable[str]) -> None:
        self._artifact(name, "string", lambda: render(graph_module, header))

    def plan(self, plan: Plan) -> None:
        """`disagmoe_plan`, as a plan file holds it, and `disagmoe_schedule`: ranks against time."""
        schedule = plan.training or plan.forward_only
        self.document("plan", to_dict(plan))
        self._artifact("schedule", "string", lambda: schedule_text(plan, schedule))

    def document(self, name: str, document: Mapping[str, Any]) -> None:
        self._artifact(name, "json", lambda: json.dumps(document))

    def _artifact(self, name: str, encoding: str, payload: Callable[[], str]) -> None:
        with compile_context(_context(self.trace_id)):
            torch._logging.trace_structured(
                "artifact",
                metadata_fn=lambda: {"name": f"disagmoe_{name}", "encoding": encoding},
                payload_fn=payload,
            )


def _context(trace_id: TraceId | None) -> CompileContext | None:
    if trace_id is None:
        return None
    context = CompileContext(trace_id.compile_id)
    context.attempt = trace_id.attempt
    return context
