"""Dumps are Python that runs, computes what the graph computes, and says what it is."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import torch
from torch import fx

from disagmoe_compile.inspect.dump import GraphDumper, render
from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.base import PassReport
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


def test_rendering_leaves_the_graph_as_it_was() -> None:
    graph_module = _graph()
    before = [node.name for node in graph_module.graph.nodes]
    render(graph_module)
    assert [node.name for node in graph_module.graph.nodes] == before


def test_a_header_cannot_end_the_docstring(tmp_path: Path) -> None:
    path = tmp_path / "dump.py"
    path.write_text(render(_graph(), ['a """ quote and a \\ backslash']))
    runpy.run_path(str(path))
