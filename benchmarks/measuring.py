"""What the benchmarks share: a captured model, CPU seconds, and tables that go into a page as they are.

CPU seconds of this process and of the processes it waited for (the C++ compiler), not wall clock: on a busy machine the first
are near what an idle one needs, the second are anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from disagmoe_compile.capture import CapturedGraph, capture
from disagmoe_compile.early_batch import mark_batch
from disagmoe_compile.models import hf, styles

BATCH_SIZE, SEQ_LENGTH = 8, 16


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(slots=True)
class Clock:
    """CPU seconds by name: `with clock("partition"): ...`; a name used twice adds up."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = cpu_seconds()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + cpu_seconds() - start


def build(source: str, n_layers: int) -> torch.nn.Module:
    """`hf:FAMILY` or `style:NAME`, tiny."""
    kind, _, name = source.partition(":")
    if kind == "style":
        return styles.build(name, n_layers=n_layers)
    return hf.build(name, n_layers=n_layers)[0]


def traced(model: torch.nn.Module, clock: Clock) -> tuple[CapturedGraph, tuple[Any, ...]]:
    """The graph of one training call and its flat arguments; "capture" on the clock is the call: Dynamo's trace, and a run."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (BATCH_SIZE, SEQ_LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    found: list[tuple[CapturedGraph, tuple[Any, ...]]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((capture(gm, example_inputs), tuple(example_inputs)))
        return gm.forward

    torch._dynamo.reset()
    mark_batch(batch)
    with clock("capture"):
        torch.compile(model, backend=backend, fullgraph=True)(**batch)
    return found[-1]


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown; numbers to the right, floats with two digits."""
    names = list(rows[0])
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    lines = ["| " + " | ".join(name.rjust(w) for name, w in zip(names, widths)) + " |"]
    lines.append("|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    lines += ["| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths)) + " |" for line in cells]
    return "\n".join(lines)


def machine() -> str:
    """What the numbers depend on."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return f"torch {torch.__version__}, {os.cpu_count()} cores, load average {load}, {torch.get_num_threads()} thread(s)"
