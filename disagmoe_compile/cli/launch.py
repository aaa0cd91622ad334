"""Starts the local ranks of a run through torch's elastic agent, and says in one line which of them failed,
and why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.errors import DisagMoEError, InputError, PeerError

_ADDRESS = "127.0.0.1"
_GRACE_S = 3  # from SIGTERM to SIGKILL for the ranks that are left when one fails

_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",  # several ranks share the cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of compile processes
    "TORCH_DISABLE_ADDR2LINE": "1",
}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank ended: a negative `exit_code` is a signal; `cause` is what it said itself (type, message),
    if anything.
    """

    rank: int
    exit_code: int
    cause: tuple[str, str] | None = None
    exit_status: int = 1


def launch(module: str, folder: RunFolder, nproc: int, port: int) -> None:
    """Runs `python -m module FOLDER` as ranks 0..nproc-1 and returns when all have ended well.

    Output of the ranks goes to files in the folder. If one fails, all others are ended. Raises InputError
    where the ranks found the input bad or the port is in use, else a DisagMoEError that names the rank that
    failed first, and why.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder.logs.mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=folder.path.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_ADDRESS}:{port}",
        rdzv_configs={"timeout": 60},
        local_addr=_ADDRESS,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.logs), redirects=Std.ALL),
        shutdown_timeout=_GRACE_S,
    )
    try:
        with _environment(), _quiet_agent():
            elastic_launch(config, sys.executable)("-m", module, str(folder.path))
    except ChildFailedError as error:
        failures = [
            failure_of(folder, global_rank, failure.exitcode)
            for global_rank, failure in error.failures.items()
        ]
        raise explain_failures(failures, folder) from error
    except SignalException as error:
        raise KeyboardInterrupt from error


def failure_of(folder: RunFolder, rank: int, exit_code: int) -> RankFailure:
    cause = (folder.report(rank) or {}).get("error")
    if cause is None:
        return RankFailure(rank, exit_code)
    return RankFailure(rank, exit_code, (cause["type"], cause["message"]), cause["exit_status"])


def explain_failures(failures: Sequence[RankFailure], folder: RunFolder) -> DisagMoEError:
    """The error of the rank that caused the others to fail: one that died or erred by itself before one that
    lost a peer. Of a rank that hung, and was killed with the others, what one that waited for it says.
    """
    first = min(failures, key=lambda failure: (_is_consequence(failure), failure.rank))
    if first.cause is None:
        for other in failures:
            if other.cause is not None and f"from rank {first.rank} in time" in other.cause[1]:
                return PeerError(f"{other.cause[1]}; all ranks were ended; their output is in {folder.logs}")
        how = (
            f"was killed by {signal.Signals(-first.exit_code).name}"
            if first.exit_code < 0
            else f"ended with exit status {first.exit_code}"
        )
        return PeerError(
            f"rank {first.rank} {how}; all other ranks were ended; its output is in {folder.logs}"
        )
    kind, message = first.cause
    if first.exit_status == InputError.exit_status:
        return InputError(message)
    named = message if message.startswith(f"rank {first.rank} ") else f"rank {first.rank}: {kind}: {message}"
    return DisagMoEError(f"{' '.join(named.split())}; its output is in {folder.logs}")


def _is_consequence(failure: RankFailure) -> int:
    if failure.exit_code == -signal.SIGTERM:
        return 2
    return int(failure.cause is not None and failure.cause[0] == PeerError.__name__)


def check_port(port: int) -> int:
    """The port, if it can be listened on. Raises InputError that names it."""
    if not 0 < port < 65536:
        raise InputError(f"--master-port must be between 1 and 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_ADDRESS, port))
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used ({error.strerror}); leave --master-port out for a free one"
            ) from error
    return port


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Settings that ranks inherit, unless the user set them; gloo is kept on the loopback interface."""
    wanted = dict(_ENVIRONMENT)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs a page for each failed rank; we say it in one line."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
