"""Why a node stands where it does: the rule, and the path that made it so."""

from __future__ import annotations

import pytest
from torch import fx

from disagmoe_compile import testing
from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.bisect import bisect
from disagmoe_compile.inspect.readable_names import readable_names
from disagmoe_compile.inspect.why import WhyRecorder, why
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.metadata import EXPERTS, PLACEMENT, where
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.virtual import CapturedCall


@pytest.fixture(scope="module")
def call() -> CapturedCall:
    return testing.capture_call(testing.build_model("batched_mm", n_layers=2), testing.language_batch())


@pytest.fixture(scope="module")
def placed(call) -> fx.Graph:
    graphs: list[fx.Graph] = []

    def keep(index: int, name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        if name == "label_roles":
            copy, nodes = fx.Graph(), {}
            copy.output(copy.graph_copy(graph_module.graph, nodes))
            graphs.append(copy)

    partition_model(call.captured, observers=[keep])
    return graphs[0]


def first(graph: fx.Graph, boundary: int, recomputed: bool = False) -> fx.Node:
    return next(
        n
        for n in graph.nodes
        if (p := n.meta.get(PLACEMENT)) and p.boundary == boundary and p.recomputed is recomputed
        and EXPERTS not in n.meta and n.op != "placeholder"
    )  # fmt: skip


def named(graph: fx.Graph, node: fx.Node) -> str:
    """As in the dumps."""
    return readable_names(graph)[node]


def test_a_node_after_the_experts_leads_back_to_them(placed) -> None:
    answer = why(placed, named(placed, first(placed, 1)))
    assert answer.stage == "A1" and answer.path[-1].stage == "F0"
    assert answer.rule == "waits for the experts of boundary 0; runs as early as it can"
    assert str(answer).splitlines()[1].startswith("stands in A1: ")


def test_experts_say_that_they_are(placed) -> None:
    experts = [n for n in placed.nodes if EXPERTS in n.meta]
    answer = why(placed, named(placed, experts[1]))
    assert (answer.stage, answer.rule) == ("F1", "the experts of a boundary")
    assert answer.path[-1].stage == "F0"


def test_a_recomputed_node_leads_to_what_it_depends_on(placed) -> None:
    node = next(
        n for n in placed.nodes if n.op != "placeholder" and (p := n.meta.get(PLACEMENT)) and p.recomputed
    )
    answer = why(placed, named(placed, node))
    assert answer.stage == "every stage that reads it" and "each reader recomputes it" in answer.rule
    assert all(step.stage == "every stage that reads it" for step in answer.path)


def test_an_unknown_name_lists_near_ones(placed) -> None:
    with pytest.raises(
        InputError, match=r"no node .expert. in the graph after label_roles; near names: .*experts"
    ):
        why(placed, "expert")


def test_the_recorder_answers_while_the_passes_run(call) -> None:
    recorder = WhyRecorder("blocks_0_moe_experts")
    partition_model(call.captured, observers=[recorder])
    assert recorder.answer is not None and recorder.answer.stage == "F0"


def test_bisecting_a_sound_pipeline_finds_no_culprit(call) -> None:
    found = bisect(call.captured)
    assert found.culprit is None
    assert [one.name for one in found.passes][:2] == ["inline_checkpoint", "deinplace"]


def test_a_line_of_a_package_goes_by_its_place_in_the_package() -> None:
    node = fx.Graph().placeholder("x")
    for prefix in ("/usr/lib/python3/dist-packages/", "/home/me/.venv/lib/python3.11/site-packages/"):
        node.meta["stack_trace"] = f'  File "{prefix}transformers/models/m.py", line 12, in forward\n    x'
        assert where(node) == "transformers/models/m.py:12"
    node.meta["stack_trace"] = '  File "/home/me/model.py", line 3, in forward\n    x'
    assert where(node) == "/home/me/model.py:3"
