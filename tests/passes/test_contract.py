"""Wrong orders of passes are errors of construction; passes that break their word are caught by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability, ContractError
from disagmoe_compile.passes.manager import PassManager
from disagmoe_compile.passes.pipeline import default_passes


@dataclass(frozen=True)
class Lazy:
    """Provides what it does not do."""

    name: str = "lazy"
    requires: frozenset[Capability] = frozenset()
    provides: frozenset[Capability] = frozenset({Capability.REGIONS_KNOWN})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        return PassReport()


def graph_module() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ones, (2,)),))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("removed", range(len(default_passes())))
def test_every_pass_is_needed_in_its_place(removed):
    passes = default_passes()
    kept = passes[:removed] + passes[removed + 1 :]
    needed_later = any(p.requires & passes[removed].provides for p in passes[removed + 1 :])
    if needed_later:
        with pytest.raises(ContractError, match="requires"):
            PassManager(kept)
    else:
        PassManager(kept)
    assert needed_later or removed >= len(passes) - 2


def test_reversed_order_is_refused_before_any_graph():
    with pytest.raises(ContractError, match="pass 0"):
        PassManager(tuple(reversed(default_passes())))


def test_pass_that_breaks_its_word_is_named():
    with pytest.raises(ContractError, match="pass lazy does not hold to `regions_known`"):
        PassManager((Lazy(),)).run(graph_module())


def test_observers_see_every_pass_in_order():
    @dataclass(frozen=True)
    class Honest(Lazy):
        name: str = "honest"

        def run(self, graph_module: fx.GraphModule) -> PassReport:
            graph_module.meta["disagmoe_regions"] = ()
            return PassReport(matched=1)

    seen = []
    module = graph_module()
    manager = PassManager((Honest(), Honest(name="again")))
    reports = manager.run(
        module, [lambda i, name, gm, report: seen.append((i, name, gm is module, report.matched))]
    )
    assert seen == [(0, "honest", True, 1), (1, "again", True, 1)]
    assert [name for name, _ in reports] == ["honest", "again"]
