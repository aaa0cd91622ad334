"""A training run that is interrupted leaves nobody behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

TRAIN = (
    "train", "style:gathered_einsum", "--attention-group-size", "1", "--ffn-group-size", "1", "--n-microbatches", "1",
    "--steps", "100000", "--batch-size", "2", "--seq-length", "8", "--stage-compiler", "eager", "--output-dir",
)  # fmt: skip
PATIENCE_S = 240


def wait_for(what: str, condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_S} s"
        time.sleep(0.1)


def ranks_of(folder: Path) -> list[int]:
    """Processes that run a rank of this run folder."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_rank(path, folder)]


def _is_rank(cmdline: Path, folder: Path) -> bool:
    try:
        arguments = cmdline.read_bytes().split(b"\0")
    except OSError:
        return False
    return b"disagmoe_compile.cli.train_worker" in arguments and str(folder).encode() in arguments


def ended(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and _command(pid) for pid in pids)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_with_the_command(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", "from disagmoe_compile.cli.main import run; run()", *TRAIN, str(folder)]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for("the second step", lambda: training.poll() or _steps(folder) >= 2)
        ranks = ranks_of(folder)
        assert len(ranks) == 2, training.stderr.read() if training.stderr and training.poll() else ranks
        os.kill(training.pid, sent)
        _, errors = training.communicate(timeout=PATIENCE_S)
        assert training.returncode == status, errors
        assert "Traceback" not in errors
        wait_for("the end of the ranks", lambda: ended(ranks))
    finally:
        training.kill()


def _steps(folder: Path) -> int:
    losses = folder / "losses.jsonl"
    return len(losses.read_text().splitlines()) if losses.exists() else 0
