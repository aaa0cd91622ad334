"""The same dumps through torch's structured trace: `TORCH_TRACE=DIR python script.py`, then `tlparse DIR`.

Artifacts are made only where a trace is being written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch._logging
from torch import fx
from torch._logging._internal import trace_log

from disagmoe_compile.inspect.dump import render
from disagmoe_compile.passes.base import PassReport


def trace_wanted() -> bool:
    """Whether a structured trace is being written to a directory: torch has a handler without one until its first message."""
    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def trace_pass(index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
    """Observer of a pass manager: the artifact `disagmoe_NN_pass`, the same Python that a dump holds."""
    _artifact(
        f"disagmoe_{index:02d}_{pass_name}",
        "string",
        lambda: render(graph_module, [f"Pass {index:02d} {pass_name}: {report}"]),
    )


def trace_document(name: str, document: Mapping[str, Any]) -> None:
    """A JSON document, a plan for one, as the artifact `disagmoe_NAME`."""
    _artifact(f"disagmoe_{name}", "json", lambda: json.dumps(document))


def _artifact(name: str, encoding: str, payload: Any) -> None:
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload
    )
