from __future__ import annotations

from collections.abc import Callable

import pytest

from disagmoe_compile.cli import main

CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def disagmoe(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs `disagmoe *arguments` in this process; returns exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
