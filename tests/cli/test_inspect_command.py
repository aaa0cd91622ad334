"""`disagmoe inspect` as a command: one document, dumps, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CommandLine = Callable[..., tuple[int, str, str]]

MODEL = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).sum()

def factory():
    return Tiny(), (torch.rand(2, 4),), {}
"""


def _inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from disagmoe_compile.cli.main import run; run()",
        "inspect",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_users_file_is_inspected_as_json_with_dumps_and_diffs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    out = tmp_path / "dumps"
    result = _inspect(f"{tmp_path}/mine.py:factory", "--json", "--passes", "--out", str(out))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert [stage["params"] for stage in document["stages"]] == [["layer.weight", "layer.bias"]]
    assert document["experts"] == []
    assert len(list(out.glob("*.py"))) == len(document["passes"])
    assert {"name", "matched", "skipped", "added", "removed"} <= set(document["passes"][0])


def test_a_bad_source_is_one_line(disagmoe: CommandLine, tmp_path: Path) -> None:
    status, _, err = disagmoe("inspect", f"{tmp_path}/none.py:factory")
    assert status == 2
    (line,) = [text for text in err.splitlines() if text]
    assert line.startswith("disagmoe: error: ")
    assert "no such file" in line


def test_a_folder_that_cannot_be_made_is_one_line_before_any_tracing(
    disagmoe: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, _, err = disagmoe(
        "inspect", f"{tmp_path}/none.py:factory", "--out", str(tmp_path / "file" / "dumps")
    )
    assert status == 2
    assert "--out" in err and "cannot be made" in err and "no such file" not in err
