"""Which rank is to blame, ports, and ranks that really die."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from disagmoe_compile.cli.launch import (
    RankFailure,
    check_port,
    explain_failures,
    failure_of,
    launch,
)
from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.errors import DisagMoEError, InputError, PeerError
from disagmoe_compile.runtime.ports import free_port


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_a_killed_rank_is_blamed_before_those_that_lost_it(folder: RunFolder) -> None:
    failures = [
        RankFailure(0, 1, ("PeerError", "rank 0 lost contact with rank 2")),
        RankFailure(2, -signal.SIGKILL),
        RankFailure(3, -signal.SIGTERM),
    ]
    error = explain_failures(failures, folder)
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 2 was killed by SIGKILL")


def test_a_rank_that_hung_until_it_was_ended_is_not_said_to_have_been_killed(folder: RunFolder) -> None:
    failures = [
        RankFailure(0, 1, ("PeerError", "rank 0 lost rank 3 at optimizer.step()")),
        RankFailure(
            1, 1, ("PeerError", "rank 1 got no answer at summing the loss from rank 3 in time: rank 3 hung")
        ),
        RankFailure(3, -signal.SIGKILL),
    ]
    assert str(explain_failures(failures, folder)).startswith(
        "rank 1 got no answer at summing the loss from rank 3"
    )


def test_a_rank_that_raised_is_blamed_before_those_that_lost_it(folder: RunFolder) -> None:
    failures = [
        RankFailure(0, 1, ("PeerError", "rank 0 lost contact")),
        RankFailure(1, 1, ("ValueError", "bad\nthing")),
    ]
    message = str(explain_failures(failures, folder))
    assert message.startswith("rank 1: ValueError: bad thing")
    assert "\n" not in message


def test_bad_input_found_by_the_ranks_is_bad_input(folder: RunFolder) -> None:
    folder.save_report(1, {"error": {"type": "CaptureError", "message": "no", "exit_status": 2}})
    error = explain_failures([failure_of(folder, 1, 2)], folder)
    assert isinstance(error, InputError)
    assert str(error) == "no"


def test_a_rank_that_named_itself_is_not_named_twice(folder: RunFolder) -> None:
    failures = [
        RankFailure(0, 1, ("PeerError", "rank 0 (attention.0) lost contact in action 0SEND[dispatch.0]1"))
    ]
    assert str(explain_failures(failures, folder)).startswith("rank 0 (attention.0) lost contact in action")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            check_port(port)


def test_a_free_port_can_be_used() -> None:
    assert check_port(free_port()) > 0


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(InputError, match="between 1 and 65535, got 70000"):
        check_port(70000)


WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
print("hello from", rank)
if folder.name == "dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if folder.name == "dies":
    time.sleep(600)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_launched_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_launched_worker"


def test_output_of_ranks_goes_to_files(
    worker: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "well")
    launch(worker, folder, 2, free_port())
    assert "hello" not in capfd.readouterr().out
    texts = [path.read_text() for path in folder.logs.rglob("stdout.log")]
    assert sorted(texts) == ["hello from 0\n", "hello from 1\n"]


def test_a_rank_that_dies_ends_the_others_and_is_named(worker: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "dies")
    with pytest.raises(DisagMoEError, match="rank 1 was killed by SIGKILL"):
        launch(worker, folder, 2, free_port())
