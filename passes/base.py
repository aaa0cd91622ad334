"""What a pass is: one transformation (or analysis) of a graph, options bound at construction, and a report
of what it did.

A pass changes the graph module it is given in place. The manager knows no pass by name: it checks the
contract (see `contract.py`), runs, verifies, and shows the graph to observers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

from torch import fx

from disagmoe_compile.passes.contract import Capability


@dataclass(frozen=True, slots=True)
class PassReport:
    """`matched`: places the pass looked for and found. `inserted`: nodes or modules it added. `skipped`:
    places it left as they were, each with the reason. `notes`: what it found, for people. `options`: what the
    pass was constructed with, filled in by the manager."""

    matched: int = 0
    inserted: int = 0
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"matched {self.matched}, inserted {self.inserted}, skipped {len(self.skipped)}"
        return "\n".join([text, *(f"skipped: {reason}" for reason in self.skipped), *self.notes])


class GraphPass(Protocol):
    """`requires` must have been provided by earlier passes; `provides` is verified on the graph
    afterwards."""

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> frozenset[Capability]: ...

    @property
    def provides(self) -> frozenset[Capability]: ...

    def run(self, graph_module: fx.GraphModule) -> PassReport: ...


def bound_options(graph_pass: GraphPass) -> tuple[str, ...]:
    """`name=value` of what the pass was constructed with. Without its sets of capabilities: those print in another order in
    every process."""
    names: list[str] = [f.name for f in fields(graph_pass)] if is_dataclass(graph_pass) else []
    return tuple(
        f"{name}={getattr(graph_pass, name)!r}"
        for name in names
        if name not in ("name", "requires", "provides")
    )


Observer = Callable[[int, str, fx.GraphModule, PassReport], None]
