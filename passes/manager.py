"""Runs passes in order. Knows no pass: checks contracts, lints, recompiles, and shows each result to the
observers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from disagmoe_compile.passes.base import GraphPass, Observer, PassReport, bound_options
from disagmoe_compile.passes.contract import Capability, check_order, standing, verify

logger = logging.getLogger(__name__)  # TORCH_LOGS=+disagmoe_compile shows it

CAPTURED = frozenset({Capability.SOURCES})  # what a captured graph offers


@dataclass(frozen=True, slots=True)
class PassManager:
    """`given`: what the graph already offers before the first pass; `needed`: what it must offer after the last one.
    Raises ContractError at construction for a wrong order.
    """

    passes: tuple[GraphPass, ...]
    given: frozenset[Capability] = CAPTURED
    needed: frozenset[Capability] = frozenset()

    def __post_init__(self) -> None:
        check_order(self.passes, self.given, self.needed)

    def run(
        self, graph_module: fx.GraphModule, observers: Sequence[Observer] = ()
    ) -> tuple[tuple[str, PassReport], ...]:
        """Transforms `graph_module` in place. Observers see `(index, pass name, graph module, report)` after
        each pass."""
        verify(self.given, graph_module, "capture")
        have, reports = self.given, []
        for index, graph_pass in enumerate(self.passes):
            report = replace(graph_pass.run(graph_module), options=bound_options(graph_pass))
            graph_module.graph.lint()
            if observers:
                graph_module.recompile()  # with the graphs inside: as long as most passes take
            have |= graph_pass.provides
            verify(standing(have), graph_module, graph_pass.name)
            logger.debug("pass %02d %s: %s", index, graph_pass.name, report)
            reports.append((graph_pass.name, report))
            for observe in observers:
                observe(index, graph_pass.name, graph_module, report)
        graph_module.recompile()
        return tuple(reports)
