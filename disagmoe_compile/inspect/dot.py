"""The graph of stages in DOT, for tools that read it; an SVG of it where Graphviz's `dot` is installed.

The report draws the same picture without Graphviz. Stages of one boundary stand in a cluster; edges carry bytes a token.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.inspect.explain import Explanation, StageInfo, TransferInfo

_FILL = {"attention": "#cfe3fb", "ffn": "#fde0bd"}
_LINE = {"dispatch": "#3473b7", "combine": "#c46f10", "p2p": "#7b61a8"}
_TIMEOUT_S = 120


def to_dot(explanation: Explanation) -> str:
    return "\n".join(_lines(explanation)) + "\n"


def write_svg(dot_file: Path) -> Path | None:
    """The SVG beside a DOT file; None where `dot` is not installed. Raises DisagMoEError with what `dot` says."""
    program = shutil.which("dot")
    if program is None:
        return None
    svg = dot_file.with_suffix(".svg")
    command = [program, "-Tsvg", "-o", str(svg), str(dot_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise DisagMoEError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return svg


def _lines(explanation: Explanation) -> Iterator[str]:
    yield "digraph stages {"
    yield '  rankdir=LR; node [shape=box, style="rounded,filled", fontname="sans-serif"]; edge [fontname="sans-serif"];'
    boundaries: dict[str, list[StageInfo]] = {}
    for stage in explanation.stages:
        boundaries.setdefault(stage.name[1:], []).append(stage)
    for boundary, stages in boundaries.items():
        layers = sorted({layer for stage in stages for layer in stage.layers})
        label = "layers " + ", ".join(map(str, layers)) if layers else "no layer"
        yield f"  subgraph cluster_{boundary} {{ label={_quoted(label)};"
        yield from (_node(stage) for stage in stages)
        yield "  }"
    yield from (_edge(transfer) for transfer in explanation.transfers)
    yield "}"


def _node(stage: StageInfo) -> str:
    label = f"{stage.name} {stage.role}\n{stage.nodes} operations\n{stage.param_bytes:,} B of parameters"
    return f'    {stage.name} [label={_quoted(label)}, fillcolor="{_FILL[stage.role]}"];'


def _edge(transfer: TransferInfo) -> str:
    label = f"{transfer.name}\n{transfer.bytes_per_token:,} B a token"
    style = (
        "dashed"
        if transfer.direction == "backward"
        else "dotted"
        if transfer.several_groups_only
        else "solid"
    )
    return f'  {transfer.src} -> {transfer.dst} [label={_quoted(label)}, style={style}, color="{_LINE[transfer.kind]}"];'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
