"""`torch.compile(model, backend="disagmoe")`: from Dynamo's graph to a running rank.

    entry.py          the backend function: capture -> passes -> plan -> bind
    costs.py          FLOPs and bytes of a captured model
    planning.py       topology, micro-batches, Plan
    bound_model.py    a user's model on this rank: groups and owned parameters
    stage_binding.py  programs bound to a micro-batch size and compiled
    graph_session.py  all of it joined into the Session that the compiled model calls

`disagmoe` is loaded on first use: the other modules serve tests and tools that never compile through torch.compile.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "disagmoe":
        from disagmoe_compile.backend.entry import disagmoe

        return disagmoe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
