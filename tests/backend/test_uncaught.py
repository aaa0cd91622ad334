"""An error of ours that nobody caught shows the script's lines and itself, on the terminal and in torchrun's summary."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
import torch

from disagmoe_compile.backend.uncaught import shorten_uncaught
from disagmoe_compile.errors import InputError

Ended = Callable[[BaseException], str]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ended:
    """What the interpreter prints when a script ends with this error."""
    printed: list[str] = []

    def show(kind: type[BaseException], error: BaseException, lines: TracebackType | None) -> None:
        printed.append("".join(traceback.format_exception(kind, error, lines)))

    def end(error: BaseException) -> str:
        sys.excepthook(type(error), error, error.__traceback__)
        return printed[-1]

    monkeypatch.setattr(sys, "excepthook", show)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    shorten_uncaught()
    shorten_uncaught()
    assert sys.excepthook is not show
    return end


def refused() -> InputError:
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="disagmoe", options={"ffn_group_size": 2})
    with pytest.raises(InputError) as caught:
        compiled(torch.ones(1, 2))
    return caught.value


def test_it_ends_with_the_script_s_line_and_torchrun_is_told_the_same(ended: Ended, tmp_path: Path) -> None:
    error = refused()
    assert "_dynamo" in "".join(traceback.format_exception(error))
    printed = ended(error)
    assert "compiled(torch.ones(1, 2))" in printed and str(error) in printed
    assert "_dynamo" not in printed and "direct cause" not in printed
    told = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert told == printed


def test_what_record_has_written_stays(ended: Ended, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("{}")
    ended(refused())
    assert (tmp_path / "error.json").read_text() == "{}"


def test_all_lines_are_there_for_who_asks_and_of_errors_of_others(ended: Ended, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    assert "in forward" in ended(caught.value)
    with torch._dynamo.config.patch(verbose=True):
        assert "_dynamo" in ended(refused())
    assert not (tmp_path / "error.json").exists()
