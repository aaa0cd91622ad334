"""De-inplace rewrites what nobody can tell apart, and leaves the rest for effect edges."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aliasing import effect_edges, storage_roots, written
from disagmoe_compile.passes.deinplace import Deinplace
from disagmoe_compile.passes.metadata import is_call
from disagmoe_compile.passes.pipeline import partition_model, working_copy
from disagmoe_compile.testing.graphs import capture_model


def deinplaced(function, *args):
    """(graph module after the pass, report, what eager returns, what the graph returns)."""
    captured, flat = capture_model(function, {f"x{i}": arg for i, arg in enumerate(args)})
    graph_module = working_copy(captured)
    report = Deinplace().run(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()
    eager = captured.graph_module(*[a.clone() if isinstance(a, torch.Tensor) else a for a in flat])
    return graph_module, report, eager, graph_module(*flat)


def writers(graph_module):
    return [node for node in graph_module.graph.nodes if written(node) is not None]


def test_accumulation_becomes_a_value():
    def function(x0, x1):
        total = x0 * 2
        total.add_(x1)
        total += x1
        return total.relu()

    graph_module, report, eager, actual = deinplaced(function, torch.randn(3, 4), torch.randn(3, 4))
    assert (report.matched, report.skipped) == (2, ())
    assert writers(graph_module) == []
    torch.testing.assert_close(actual, eager)


def test_rows_added_at_an_index_become_a_value():
    def function(x0, x1):
        total = torch.zeros_like(x0)
        for index in (torch.tensor([0, 2]), torch.tensor([1])):
            total[index] += x1[index]
        return total.relu()

    graph_module, report, eager, actual = deinplaced(function, torch.randn(3, 4), torch.randn(3, 4))
    assert report.skipped == () and writers(graph_module) == []
    torch.testing.assert_close(actual, eager)


def test_view_read_after_the_write_keeps_the_write():
    def function(x0, x1):
        total = x0 * 2
        view = total[:, :2]
        total.add_(x1)
        return view + 1

    graph_module, report, eager, actual = deinplaced(function, torch.randn(3, 4), torch.randn(3, 4))
    assert len(report.skipped) == 1 and "another name" in report.skipped[0]
    assert len(writers(graph_module)) == 1
    torch.testing.assert_close(actual, eager)


def test_narrow_accumulator_keeps_its_dtype():
    def function(x0, x1):
        total = x0.to(torch.bfloat16) * 2
        total.add_(x1)
        return total + 0

    _, _, eager, actual = deinplaced(function, torch.randn(3, 4), torch.randn(3, 4))
    assert actual[0].dtype == eager[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual, eager)


def test_writer_without_readers_is_an_effect_of_its_storage():
    def function(x0, x1):
        out = x0.new_empty(x0.shape[0], 8)
        out[:, :4].copy_(x0)
        out[:, 4:].copy_(x1)
        return out * 2

    captured, flat = capture_model(function, {"x0": torch.randn(3, 4), "x1": torch.randn(3, 4)})
    graph = captured.graph_module.graph
    edges = effect_edges(graph, storage_roots(graph))
    product = next(node for node in graph.nodes if is_call(node, "mul"))
    assert len(edges[product]) == 2
    head = partition_model(captured).programs.attention[0]
    tensors = [flat[i.position] for i in head.inputs]
    torch.testing.assert_close(head.module(*tensors)[0], captured.graph_module(*flat)[0])


def test_returned_storage_holds_what_was_written_to_it_last():
    def function(x0):
        state = torch.zeros_like(x0)
        total = (x0 * 2).sum()
        state.copy_(x0 * 3)
        return state, total

    captured, flat = capture_model(function, {"x0": torch.randn(3, 4, requires_grad=True)})
    program = partition_model(captured).programs.attention[0]
    results = program.module(*(flat[i.position] for i in program.inputs))
    torch.testing.assert_close(results[program.model_outputs[0]], captured.graph_module(*flat)[0])


def test_write_to_a_buffer_is_refused_by_name():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen.add_(x.sum(0))
            return (x * self.seen).sum()

    captured, _ = capture_model(Counter(), {"x": torch.randn(3, 4, requires_grad=True)})
    with pytest.raises(UnsupportedModelError, match=r"buffer `seen`.*test_deinplace.py"):
        partition_model(captured)
