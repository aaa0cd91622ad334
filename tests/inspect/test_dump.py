"""Dumps are Python that runs, computes what the graph computes, and says what it is."""

from __future__ import annotations

import operator
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.dump import GraphDumper, render
from disagmoe_compile.inspect.pass_pair import PairRecorder
from disagmoe_compile.inspect.readable_names import readable_names
from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.base import PassReport, bound_options
from disagmoe_compile.passes.experts_op import experts
from disagmoe_compile.passes.linearize_loss import LinearizeLoss
from disagmoe_compile.passes.program import InputKind, StageInput


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = fx.symbolic_trace(Inner())
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ weight) + self.scale


class _KeepGraphs(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, fx.GraphModule)


def _graph() -> fx.GraphModule:
    module = Outer()
    graph_module = fx.GraphModule(module, _KeepGraphs().trace(module))
    values = (torch.randn(2, 3), torch.randn(3, 4))
    names = (("x", InputKind.INPUT), ("layers.0.weight", InputKind.PARAMETER))
    for i, (node, value) in enumerate(zip(metadata.placeholders(graph_module.graph), values)):
        node.meta["example_value"] = value
        name, kind = names[i]
        node.meta[metadata.SOURCE] = StageInput(kind, name, i, tuple(value.shape), value.dtype)
    return graph_module


def test_a_dump_computes_what_its_graph_computes(tmp_path: Path) -> None:
    graph_module = _graph()
    path = tmp_path / "dump.py"
    path.write_text(render(graph_module))
    module = runpy.run_path(str(path))
    inputs = module["example_inputs"]()
    assert torch.equal(module["GraphModule"]()(*inputs), graph_module(*inputs))


def test_a_dump_runs_as_a_script(tmp_path: Path) -> None:
    path = GraphDumper(tmp_path).write("graph.py", _graph(), ())
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[(2, 4)]"


def test_the_observer_numbers_files_and_heads_them_with_pass_options_and_counts(tmp_path: Path) -> None:
    dump = GraphDumper(tmp_path / "graphs", {"schedule": "af_pipe", "plan": None})
    dump(3, "partition", _graph(), PassReport(matched=2, inserted=5, skipped=("node a: no top-k",)))
    text = (tmp_path / "graphs" / "03_partition.py").read_text()
    head = text.split('"""')[1]
    assert "Pass 03 partition: matched 2, inserted 5, skipped 1" in head
    assert "skipped: node a: no top-k" in head
    assert "option schedule = 'af_pipe'" in head
    assert "plan" not in head.replace("Pass", "")
    assert "on 2 inputs (1 parameters)" in head


def test_parameters_go_by_their_own_names() -> None:
    text = render(_graph())
    assert "def forward(self, x : " in text.replace("x:", "x :")
    assert "layers_0_weight" in text
    assert "# parameter: layers.0.weight" in text


def test_operations_go_by_their_module_and_what_they_call() -> None:
    graph_module = _graph()
    for node in graph_module.graph.nodes:
        node.meta["nn_module_stack"] = {"1": ("L['self'].model.layers.0.mlp", torch.nn.Module)}
    assert "model_layers_0_mlp_matmul = x @ layers_0_weight" in render(graph_module)


def test_items_go_by_the_call_that_returned_them() -> None:
    graph = fx.Graph()
    pair = graph.call_method("unbind", (graph.placeholder("x"), 0))
    graph.output(graph.call_function(operator.getitem, (pair, 1)))
    assert list(readable_names(graph).values()) == ["x", "unbind", "unbind_1"]


def test_what_a_call_passes_names_the_arguments_of_the_graph_inside() -> None:
    graph_module = _graph()
    text = render(graph_module)
    inner = text[text.index("class GraphModule_inner") : text.index("class GraphModule(")]
    assert "def forward(self, matmul" in inner


def test_the_function_of_an_expert_takes_parameters_by_their_names() -> None:
    root = torch.nn.Module()
    function = fx.Graph()
    rows, weight, up = (function.placeholder(name) for name in ("rows", "weight", "param_0"))
    function.output(function.call_function(torch.mul, (function.call_function(torch.mm, (rows, up)), weight)))
    root.add_module("expert_function_0", fx.GraphModule(torch.nn.Module(), function))
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("tokens", "token_P", "expert_P", "weight_P", "up")]
    up_source = StageInput(InputKind.PARAMETER, "layers.0.experts.up", 4, (2, 3, 3), torch.float32)
    given[-1].meta[metadata.SOURCE] = up_source
    called = {"function": graph.get_attr("expert_function_0"), "num_experts": 2}
    graph.output(graph.call_function(experts, tuple(given), called))
    text = render(fx.GraphModule(root, graph))
    assert "def forward(self, rows, weight, layers_0_experts_up)" in text
    assert "torch.mm(rows, layers_0_experts_up)" in text


def test_the_header_names_what_the_pass_was_constructed_with(tmp_path: Path) -> None:
    report = PassReport(matched=1, options=("reduction='auto'",))
    GraphDumper(tmp_path)(8, "linearize_loss", _graph(), report)
    assert (
        "Pass 08 linearize_loss(reduction='auto'): matched 1"
        in (tmp_path / "08_linearize_loss.py").read_text()
    )


def test_options_of_a_pass_are_its_fields_without_its_contract() -> None:
    assert bound_options(LinearizeLoss("sum")) == ("reduction='sum'",)


def test_any_two_passes_are_compared_by_counts_and_text() -> None:
    before, after = _graph(), _graph()
    output = metadata.output_node(after.graph)
    with after.graph.inserting_before(output):
        output.args = (after.graph.call_function(torch.relu, (output.args[0],)),)
    after.recompile()
    recorder = PairRecorder.parse("1:last")
    for index, (name, graph_module) in enumerate([("zero", before), ("one", before), ("last", after)]):
        recorder(index, name, graph_module, PassReport())
    found = recorder.diff()
    assert (found.first, found.second, found.added, found.removed) == ("01_one", "02_last", {"relu": 1}, {})
    assert "+        relu = torch.relu(add)" in found.code


@pytest.mark.parametrize("text", ["2:1", "1:nothing", "5:6"])
def test_a_pair_that_did_not_run_in_this_order_is_refused_with_the_passes(text: str) -> None:
    recorder = PairRecorder.parse(text)
    for index, name in enumerate(["zero", "one", "two"]):
        recorder(index, name, _graph(), PassReport())
    with pytest.raises(InputError, match="the earlier one first; the passes are 00_zero, 01_one, 02_two"):
        recorder.diff()


def test_rendering_leaves_the_graph_as_it_was() -> None:
    graph_module = _graph()
    before = [node.name for node in graph_module.graph.nodes]
    render(graph_module)
    assert [node.name for node in graph_module.graph.nodes] == before


def test_a_header_cannot_end_the_docstring(tmp_path: Path) -> None:
    path = tmp_path / "dump.py"
    path.write_text(render(_graph(), ['a """ quote and a \\ backslash']))
    runpy.run_path(str(path))
