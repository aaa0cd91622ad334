"""Graphs as runnable Python: one numbered file a pass, in one directory.

A dump defines the graph and the graphs inside it as `torch.nn.Module` classes, with the user's source line
above each operation and shapes beside it. Everything carries the name of its parameter or module (`readable_names.py`).
`python NN_pass.py` runs the graph once on made-up inputs of the captured shapes and prints the shapes of what
comes out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from disagmoe_compile.inspect.readable_names import identifier, named_copy, names_passed, readable_names
from disagmoe_compile.passes import metadata
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.partition import STAGE, AttentionStage

_LITERAL_NUMEL = 16  # constants of a graph up to this size are written out; larger ones are zeros
_RELEASES = re.compile(r";  (?:\w+ = )+None$", re.MULTILINE)

_MAIN = """
if __name__ == "__main__":
    with torch.no_grad():
        results = GraphModule()(*example_inputs())
    results = results if isinstance(results, (tuple, list)) else (results,)
    print([tuple(r.shape) if isinstance(r, torch.Tensor) else r for r in results])
"""


@dataclass(frozen=True, slots=True)
class GraphDumper:
    """Observer of a pass manager: writes `NN_pass.py` for each pass into `directory`, which it creates.

    `options` are shown at the head of every file.
    """

    directory: str | os.PathLike[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, index: int, pass_name: str, graph_module: fx.GraphModule, report: PassReport) -> None:
        header = header_of(index, pass_name, report)
        header += [f"option {name} = {value!r}" for name, value in self.options.items() if value is not None]
        self.write(f"{index:02d}_{pass_name}.py", graph_module, header)

    def write(self, name: str, graph_module: fx.GraphModule, header: Iterable[str]) -> Path:
        directory = Path(self.directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        path.write_text(render(graph_module, header))
        return path


def header_of(index: int, pass_name: str, report: PassReport) -> list[str]:
    """The pass, its options and what it counted."""
    bound = f"({', '.join(report.options)})" if report.options else ""
    return [f"Pass {index:02d} {pass_name}{bound}: {report}"]


def render(graph_module: fx.GraphModule, header: Iterable[str] = ()) -> str:
    """The Python text of a graph and of all graphs inside it, innermost first."""
    title = [*header, _counts(graph_module)]
    classes: list[str] = []
    imports: dict[str, Any] = {}
    _write_class(graph_module, "GraphModule", (), classes, imports)
    parts = [
        '"""' + "\n".join(title).replace("\\", "\\\\").replace('"""', "'''") + '\n"""\n',
        _import_block(graph_module, imports),
        "\n\n".join(classes),
        _example_inputs(graph_module),
        _MAIN,
    ]
    return "\n".join(parts)


def stage_texts(graph_module: fx.GraphModule) -> dict[str, str]:
    """`A0`, `F0`, ... -> the Python text of the stage, after partition; without the releases of values (`x = None`)."""
    names = readable_names(graph_module.graph)
    passed = names_passed(graph_module.graph, names)
    found: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        stage, module = node.meta.get(STAGE), str(node.target)
        if stage is not None:
            name = f"A{stage.boundary}" if isinstance(stage, AttentionStage) else f"F{stage.info.boundary}"
            classes: list[str] = []
            _write_class(graph_module.get_submodule(module), name, passed[module], classes, {})
            found[name] = _RELEASES.sub("", "\n".join(classes))
    return found


def _counts(graph_module: fx.GraphModule) -> str:
    nodes = [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    inside = sum(len(m.graph.nodes) for _, m in graph_module.named_modules() if isinstance(m, fx.GraphModule))
    kinds = [metadata.source_of(n) for n in metadata.placeholders(graph_module.graph)]
    parameters = sum(kind is not None and kind.kind.value == "parameter" for kind in kinds)
    return (
        f"{len(nodes)} operations on {len(kinds)} inputs ({parameters} parameters); "
        f"{inside} nodes with the graphs inside"
    )


def _write_class(
    module: fx.GraphModule, name: str, given: Sequence[str], classes: list[str], imports: dict[str, Any]
) -> None:
    """`given`: names of the placeholders."""
    names = readable_names(module.graph, given)
    passed = names_passed(module.graph, names)
    lines = []
    for child_name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            child_class = f"{name}_{identifier(child_name)}"
            _write_class(child, child_class, passed.get(child_name, ()), classes, imports)
            lines.append(f"self.{child_name} = {child_class}()")
    for constant_name in _constant_names(module):
        lines.append(f"self.{constant_name} = {_constant(getattr(module, constant_name))}")
    code = named_copy(module.graph, names).python_code("self", verbose=True)
    imports |= code.globals
    body = code.src.strip().replace("\n", "\n    ")
    init = "".join(f"\n        {line}" for line in lines)
    classes.append(
        f"class {name}(torch.nn.Module):\n    def __init__(self):\n        super().__init__(){init}\n\n    {body}\n"
    )


def _constant_names(module: fx.GraphModule) -> list[str]:
    targets = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    return sorted(t for t in targets if "." not in t and isinstance(getattr(module, t, None), torch.Tensor))


def _constant(tensor: torch.Tensor) -> str:
    if tensor.numel() <= _LITERAL_NUMEL and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
    return f"torch.zeros({_sizes(tensor)!r}, dtype={tensor.dtype})"


def _import_block(module: fx.GraphModule, found: Mapping[str, Any]) -> str:
    """Imports for every global name of the code, and of the modules that register its custom operators."""
    lines = {"import torch", "from torch import device, inf, nan", "from types import NoneType"}
    for name, value in found.items():
        origin, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if name in ("torch", "device", "inf", "nan", "NoneType"):
            continue
        if name in sys.modules and sys.modules[name] is value:
            lines.add(f"import {name}")
        elif isinstance(origin, str) and isinstance(qualified, str) and "<" not in qualified:
            path, _, leaf = qualified.rpartition(".")
            lines.add(f"from {origin} import {leaf} as {name}" if not path else f"import {origin}")
            if path:
                lines.add(f"{name} = {origin}.{qualified}")
    lines |= {f"import {name}  # registers operators" for name in _operator_modules(module)}
    return "\n".join([*sorted(lines, key=lambda line: (" = " in line, line)), "", ""])


def _operator_modules(module: fx.GraphModule) -> set[str]:
    from torch._library.custom_ops import OPDEFS

    found = set()
    for graph in (m.graph for m in module.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.nodes:
            packet = getattr(node.target, "overloadpacket", node.target)
            definition = OPDEFS.get(getattr(packet, "_qualified_op_name", ""))
            if definition is not None:
                found.add(definition._init_fn.__module__)
    return found


def _example_inputs(module: fx.GraphModule) -> str:
    lines = []
    for node in metadata.placeholders(module.graph):
        source = metadata.source_of(node)
        comment = f"  # {source.kind}: {source.name}" if source is not None else ""
        lines.append(f"        {_example(metadata.value(node))},{comment}")
    body = "\n".join(lines)
    return f"\ndef example_inputs():\n    torch.manual_seed(0)\n    return (\n{body}\n    )\n"


def _example(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        make = "randn" if value.dtype.is_floating_point else "ones" if value.dtype is torch.bool else "zeros"
        return f"torch.{make}({_sizes(value)!r}, dtype={value.dtype})"
    if isinstance(value, torch.SymInt):
        return repr(_hint(value))
    return repr(value) if isinstance(value, int | float | bool) else "None"


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(_hint(size) for size in tensor.shape)


def _hint(size: int | torch.SymInt) -> int:
    """The captured value of a size. By hint: converting a live SymInt would specialise the graph."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
