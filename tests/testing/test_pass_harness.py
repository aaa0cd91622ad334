"""The public harness: wrong passes are caught by numbers, by contract and by rule; random models run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx
from torch.testing import FileCheck

import disagmoe_compile as dm
from disagmoe_compile import testing
from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.bisect import bisect
from disagmoe_compile.passes import registry
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability, ContractError
from disagmoe_compile.passes.metadata import EXPERTS, emit
from disagmoe_compile.passes.pipeline import assemble


@dataclass(frozen=True, slots=True)
class Edit:
    """Applies `edit(graph, node)` to every canonical experts node."""

    edit: Callable[[fx.Graph, fx.Node], None]
    name: str = "edit"
    requires: frozenset[Capability] = frozenset({Capability.CANONICAL_EXPERTS})
    provides: frozenset[Capability] = frozenset()

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        calls = [node for node in graph_module.graph.nodes if EXPERTS in node.meta]
        for node in calls:
            self.edit(graph_module.graph, node)
        return PassReport(matched=len(calls))


def nothing(graph: fx.Graph, node: fx.Node) -> None:
    pass


def drop_the_routers_gradient(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        weights = emit(graph, "detach", (node.args[3],))
    node.args = (*node.args[:3], weights, *node.args[4:])


def halve_the_weights(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        weights = emit(graph, torch.mul, (node.args[3], 0.5))
    node.args = (*node.args[:3], weights, *node.args[4:])


def forget_what_it_is(graph: fx.Graph, node: fx.Node) -> None:
    del node.meta[EXPERTS]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return testing.build_model("batched_mm", n_layers=1)


def test_a_pass_that_does_nothing_keeps_parity_and_reports(model) -> None:
    run = testing.run_pass(Edit(nothing), model, testing.language_batch())
    assert (run.report.matched, run.report.skipped) == (1, ())
    FileCheck().check_count("experts(", 1).run(run.code)
    run.assert_parity()
    run.on_ranks(ffn_group_size=2, n_microbatches=2).assert_parity()
    assert run.numbers[0].what == "after edit" and run.numbers[-1].what == "after assign_streams"


@pytest.mark.parametrize(
    ("edit", "found"),
    [(drop_the_routers_gradient, "gradients differ"), (halve_the_weights, "after edit: loss")],
)
def test_a_pass_that_changes_numbers_is_caught(model, edit, found) -> None:
    run = testing.run_pass(Edit(edit), model, testing.language_batch())
    with pytest.raises(AssertionError, match=found):
        run.assert_parity()


def test_bisecting_names_the_pass_that_changed_numbers(model) -> None:
    call = testing.capture_call(model, testing.language_batch())
    culprit = bisect(call.captured, extra_passes=[Edit(halve_the_weights)]).culprit
    assert culprit is not None and culprit.name == "edit" and culprit.error > 1e-3


def test_a_pass_that_breaks_a_standing_capability_is_named(model) -> None:
    with pytest.raises(ContractError, match="pass edit does not hold to `canonical_experts`"):
        testing.run_pass(Edit(forget_what_it_is), model, testing.language_batch())


def test_a_pass_stands_where_its_requirements_first_hold() -> None:
    names = [p.name for p in assemble(extra=[Edit(nothing)]).passes]
    assert names.index("edit") == names.index("canonicalize_experts") + 1


def test_requirements_that_never_hold_together_are_an_error() -> None:
    impossible = Edit(nothing, requires=frozenset({Capability.REGIONS_KNOWN, Capability.TRANSFERS}))
    with pytest.raises(ContractError, match="pass edit requires regions_known, transfers, which never hold"):
        assemble(extra=[impossible])


def test_a_taken_name_is_an_error() -> None:
    with pytest.raises(ContractError, match="two passes are called partition"):
        assemble(extra=[Edit(nothing, name="partition")])


def test_only_what_nothing_needs_can_be_turned_off() -> None:
    names = [p.name for p in assemble(disabled=["assign_streams"]).passes]
    assert "assign_streams" not in names
    with pytest.raises(ContractError, match="requires placed"):
        assemble(disabled=["label_roles"])
    with pytest.raises(ContractError, match="no pass provides linear_loss"):
        assemble(disabled=["linearize_loss"])
    with pytest.raises(InputError, match="no pass 'typo' to turn off; there are inline_checkpoint"):
        assemble(disabled=["typo"])


def test_a_style_can_be_turned_off() -> None:
    (find,) = (p for p in assemble(disabled=["find_regions.grouped_mm"]).passes if p.name == "find_regions")
    assert "grouped_mm" not in [style.name for style in find.styles]


class _Entry:
    def __init__(self, name: str, found: object) -> None:
        self.name, self.found = name, found

    def load(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_installed_passes_are_found(monkeypatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [_Entry("mine", lambda: Edit(nothing))])
    assert [p.name for p in registry.registered_passes()] == ["edit"]
    assert "edit" in [p.name for p in assemble().passes]


@pytest.mark.parametrize(
    ("found", "reason"),
    [(ImportError("no module x"), "cannot be loaded: ImportError"), (lambda: object(), "object has no name")],
)
def test_an_entry_that_is_no_pass_is_named(monkeypatch, found, reason) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [_Entry("mine", found)])
    with pytest.raises(InputError, match=f"pass 'mine' .*{reason}"):
        registry.registered_passes()


def keeps_parity(drawn) -> None:
    call = testing.capture_call(model := drawn.build(), batch := testing.language_batch())
    assert len(call.partition.programs.experts) == drawn.n_moe_layers
    run = testing.run_captured(call, ffn_group_size=min(3, drawn.num_experts), n_microbatches=2)
    testing.assert_parity(run.loss, run.gradients, testing.eager_reference(model, **batch))


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(testing.moe_models(styles=("batched_mm", "gathered_einsum")))
def test_random_models_keep_parity(drawn) -> None:
    keeps_parity(drawn)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(testing.moe_models())
def test_random_models_of_every_style_keep_parity(drawn) -> None:
    keeps_parity(drawn)


def test_public_names_are_documented_and_there() -> None:
    assert dm.testing is testing
    for name in testing.__all__:
        assert getattr(testing, name).__doc__
