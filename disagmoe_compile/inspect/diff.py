"""What a pass changed, as counts of operations that came and went, with the graphs inside the graph counted
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.base import PassReport


@dataclass(frozen=True, slots=True)
class PassDiff:
    """`added` and `removed`: operation -> how many more or fewer there are after the pass than before it."""

    index: int
    name: str
    report: PassReport
    operations: int
    added: Mapping[str, int]
    removed: Mapping[str, int]


class DiffRecorder:
    """Observer of a pass manager. The first pass is compared with `before`, the graph as it was captured."""

    def __init__(self, before: fx.GraphModule | None = None) -> None:
        self._last = count_operations(before) if before is not None else None
        self.diffs: list[PassDiff] = []

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        now = count_operations(graph_module)
        last = now if self._last is None else self._last
        self.diffs.append(
            PassDiff(
                index,
                pass_name,
                report,
                now.total(),
                dict(sorted((now - last).items())),
                dict(sorted((last - now).items())),
            )
        )
        self._last = now


def count_operations(graph_module: fx.GraphModule) -> Counter[str]:
    """Bare names of everything the graph and the graphs inside it call. A graph used twice counts once."""
    return Counter(
        metadata.target_name(node)
        for module in graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    )
