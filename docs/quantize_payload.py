"""A pass from nothing to tested: tokens travel to the experts and back as bfloat16. See writing_passes.md."""

from dataclasses import dataclass

import torch
from torch import fx
from torch.testing import FileCheck

from disagmoe_compile import testing
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import EXPERTS, emit, value


@dataclass(frozen=True, slots=True)
class QuantizePayload:
    dtype: torch.dtype = torch.bfloat16
    name: str = "quantize_payload"
    requires: frozenset[Capability] = frozenset({Capability.CANONICAL_EXPERTS})
    provides: frozenset[Capability] = frozenset()

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph, done, skipped = graph_module.graph, set(), []
        calls = [node for node in graph.nodes if EXPERTS in node.meta]
        for node in calls:
            tokens, function = node.args[0], node.kwargs["function"].target
            computed = value(tokens).dtype
            if computed == self.dtype:
                skipped.append(f"{node.name}: its tokens are {self.dtype} already")
                continue
            with graph.inserting_before(node):  # what is sent
                node.args = (emit(graph, "to", (tokens, self.dtype)), *node.args[1:])
            if function not in done:  # layers with equal experts share one function
                self._convert_rows(graph_module.get_submodule(function), computed)
                done.add(function)
            readers = list(node.users)
            node.meta["example_value"] = value(node).to(self.dtype)  # what comes back
            with graph.inserting_before(node.next):
                back = emit(graph, "to", (node, computed))
            for reader in readers:
                reader.replace_input_with(node, back)
        matched = len(calls) - len(skipped)
        return PassReport(matched=matched, inserted=2 * matched, skipped=tuple(skipped))

    def _convert_rows(self, function: fx.GraphModule, computed: torch.dtype) -> None:
        """One expert computes as before; only its rows arrive and leave as `dtype`."""
        rows, *_, output = function.graph.nodes
        first = next(node for node in function.graph.nodes if node.op != "placeholder")
        with function.graph.inserting_before(first):
            wide = function.graph.call_method("to", (rows, computed))
        rows.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
        with function.graph.inserting_before(output):
            output.args = (function.graph.call_method("to", (output.args[0], self.dtype)),)
        function.recompile()


def test_payloads_are_bfloat16_and_numbers_stay_close() -> None:
    model = testing.build_model("sorted_grouped_mm", n_layers=1)
    run = testing.run_pass(QuantizePayload(), model, testing.language_batch())
    assert (run.report.matched, run.report.skipped) == (1, ())
    FileCheck().check("torch.bfloat16").check("experts(").check("torch.float32").run(run.code)
    run.assert_parity(loss_tolerance=1e-2, gradient_tolerance=5e-2)
    run.on_ranks(ffn_group_size=2, n_microbatches=2).assert_parity(
        loss_tolerance=1e-2, gradient_tolerance=5e-2
    )
    sent = run.call.partition.programs.experts[0]
    assert (sent.token_dtype, sent.out_dtype) == (torch.bfloat16, torch.bfloat16)


def test_what_is_narrow_already_is_left_alone() -> None:
    model = testing.build_model("sorted_grouped_mm", n_layers=1, dtype=torch.bfloat16)
    run = testing.run_pass(QuantizePayload(), model, testing.language_batch())
    assert run.report.matched == 0 and "bfloat16 already" in run.report.skipped[0]
