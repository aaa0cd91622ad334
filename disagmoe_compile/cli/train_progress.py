"""Shows a run while it goes on: the partition and the plan as soon as there is one, then a progress bar of
the steps.

The ranks write files; a thread of the launching process follows them. Nothing that is shown here can stall a
rank.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console

from disagmoe_compile.cli.progress import counting_bar
from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.cli.train_report import render_plan
from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.serialize import load

_POLL_S = 0.1


class Follower:
    """A context manager around the launch. `log` receives each step's line as soon as it is there."""

    def __init__(
        self, console: Console, folder: RunFolder, steps: int, world_size: int, log: Path | None
    ) -> None:
        self._console, self._folder, self._steps = console, folder, steps
        self._log = _open(log)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._shown = 0
        self._progress = counting_bar(console)
        self._task = self._progress.add_task(f"tracing and compiling on {world_size} ranks", total=steps)

    def __enter__(self) -> Follower:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._progress.stop()
        if self._log is not None:
            self._log.close()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        if not self._folder.losses.exists():
            return
        lines = [
            line for line in self._folder.losses.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        if lines and not self._shown:
            render_plan(self._console, load(self._folder.plan))
        for line in lines[self._shown :]:
            self._progress.update(self._task, advance=1, description=f"loss {json.loads(line)['loss']:.4f}")
            if self._log is not None:
                self._log.write(line)
                self._log.flush()
        self._shown = len(lines)


def _open(path: Path | None) -> TextIO | None:
    if path is None:
        return None
    try:
        return path.open("w")
    except OSError as error:
        raise InputError(f"--log-jsonl {path} cannot be written: {error.strerror}") from error
