"""The stages in DOT: every stage and transfer once, quoted; an SVG only where Graphviz is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from disagmoe_compile.inspect.dot import to_dot, write_svg
from disagmoe_compile.inspect.explain import Explanation, StageInfo, TransferInfo

EXPLANATION = Explanation(
    stages=(
        StageInfo("A0", "attention", (0,), 3, (), (), (), 0, 1024),
        StageInfo("F0", "ffn", (0,), 2, (), (), (), 0, 2048),
        StageInfo("A1", "attention", (), 1, (), (), (), 0, 0),
    ),
    transfers=(
        TransferInfo("dispatch.0", "dispatch", "forward", "A0", "F0", 280, ("tokens",), False),
        TransferInfo("combine.0", "combine", "forward", "F0", "A1", 256, ("out",), False),
        TransferInfo("combine_bwd.0", "combine", "backward", "A1", "F0", 256, ("d",), False),
    ),
    experts=(),
    graph_breaks=(),
)


def test_stages_stand_in_clusters_and_edges_carry_bytes() -> None:
    text = to_dot(EXPLANATION)
    assert text.count("subgraph cluster_") == 2
    assert 'A0 -> F0 [label="dispatch.0\\n280 B a token", style=solid' in text
    assert "A1 -> F0" in text and "style=dashed" in text


def test_without_graphviz_there_is_no_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert write_svg(tmp_path / "stages.dot") is None


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz: apt-get install graphviz")
def test_graphviz_draws_it(tmp_path: Path) -> None:
    path = tmp_path / "stages.dot"
    path.write_text(to_dot(EXPLANATION))
    svg = write_svg(path)
    assert svg is not None and "<svg" in svg.read_text()
