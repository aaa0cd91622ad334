"""Errors of broken connections name the rank that failed first, not whoever happened to notice."""

from __future__ import annotations

import json
import os
import signal

import torch
import torch.distributed as dist

from disagmoe_compile.errors import DisagMoEError, PeerError, UnsupportedModelError
from disagmoe_compile.runtime.failure import FailureReport, describe_failure, read_first, report_first
from disagmoe_compile.testing.pool import GlooPool

CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:37604\nmore")


def test_only_the_first_report_counts() -> None:
    store = dist.HashStore()
    assert report_first(FailureReport(2, "3F1", None, "out of memory"), store)
    assert not report_first(FailureReport(0, "2SEND[dispatch.1]0", 2, "closed"), store)
    first = read_first(store, 0.0)
    assert first == FailureReport(2, "3F1", None, "out of memory")


def test_without_a_report_the_wait_ends() -> None:
    assert read_first(dist.HashStore(), 0.1) is None


def test_a_victim_names_the_first_failure_and_not_its_own_peer() -> None:
    store = dist.HashStore()
    report_first(FailureReport(2, "3F1", None, "MemoryError: out of memory"), store)
    error = describe_failure(CLOSED, 0, "2WAIT[combine.0]0", [1], store)
    assert isinstance(error, PeerError)
    assert (
        str(error)
        == "rank 0 stopped at 2WAIT[combine.0]0, because rank 2 failed at 3F1: MemoryError: out of memory"
    )


def test_who_waited_for_a_killed_rank_alone_reports_it_for_the_others() -> None:
    store = dist.HashStore()
    error = describe_failure(CLOSED, 0, "2WAIT[combine.0]0", [3], store, wait_s=0.0)
    assert isinstance(error, PeerError) and "rank 0 lost rank 3 at 2WAIT[combine.0]0" in str(error)
    later = describe_failure(CLOSED, 1, "0WAIT[residual.0]0", [0], store, wait_s=0.0)
    assert "because rank 3 failed" in str(later)


def test_a_timeout_names_action_and_peers() -> None:
    error = describe_failure(RuntimeError("Timed out waiting 600000ms"), 0, "2WAIT[combine.0]0", [2, 3], None)
    assert isinstance(error, PeerError)
    assert "rank 0 got no answer at 2WAIT[combine.0]0 from one of ranks [2, 3] in time" in str(error)


def test_an_error_of_one_s_own_is_reported_and_kept() -> None:
    store = dist.HashStore()
    mine = UnsupportedModelError("no")
    assert describe_failure(mine, 1, "3F1", [], store) is mine
    other = describe_failure(ValueError("bad\nworse"), 1, "3F1", [], store)
    assert type(other) is DisagMoEError and str(other) == "rank 1 failed at 3F1: ValueError: bad"
    assert read_first(store, 0.0) == FailureReport(1, "3F1", None, "UnsupportedModelError: no")


def die_while_others_wait(path: str) -> None:
    """Rank 2 is killed; rank 0 waits for it, rank 1 for rank 0. Each writes its error."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    peer = {0: 2, 1: 0}[rank]
    try:
        dist.recv(torch.empty(1), peer)
    except RuntimeError as error:
        described = describe_failure(error, rank, "3WAIT[dispatch.0]0", [peer], store)
        with open(f"{path}/{rank}", "w") as file:
            json.dump([type(described).__name__, str(described)], file)
        raise described from error


def test_a_killed_rank_is_named_by_all_survivors(pool: GlooPool, tmp_path: object) -> None:
    outcomes = pool.outcomes(die_while_others_wait, str(tmp_path), world_size=3)
    assert outcomes[2].failure is not None and outcomes[2].failure.kind == "ProcessDied"
    for rank in (0, 1):
        with open(f"{tmp_path}/{rank}") as file:
            kind, message = json.load(file)
        assert kind == "PeerError" and f"rank {rank}" in message and "rank 2" in message, message
