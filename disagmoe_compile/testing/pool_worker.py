"""The child side of GlooPool: one process that is one rank of many cases.

Protocol over the pipe, pickled: the worker says READY; for (RUN, Case) it answers (failure, value); for
(CLEAN_UP, None) it restores a fresh process state and says READY again; (STOP, None), or the end of the pipe,
ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from disagmoe_compile.runtime.pulse import end_with_parent

READY, RUN, CLEAN_UP, STOP = "ready", "run", "clean up", "stop"


@dataclass(frozen=True, slots=True)
class Case:
    """`body` is the pickled (function, args); `store` a path for the rendezvous of this case alone; `port` is
    free on all ranks.
    """

    body: bytes
    world_size: int
    store: str
    port: int
    timeout_s: float
    env: Mapping[str, str]
    path: tuple[str, ...]
    process_group: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` is the exception's class name. `exception` is None where it cannot be pickled, or the process is
    gone.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    exception: BaseException | None

    @property
    def summary(self) -> str:
        return f"{self.kind}: {self.message}"


def serve(rank: int, connection: Connection, stacks: str, environment: Mapping[str, str]) -> None:
    """Main loop of a worker. SIGUSR1 makes it write the stacks of its threads to the file `stacks`.

    `environment` replaces that of the server it was forked from, which may be older. The worker ends with that server, which
    ends with the process that started it, even in the middle of a case.
    """
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    with open(stacks, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        import torch
        import torch._dynamo

        torch.set_num_threads(1)
        clean = _State.take()
        connection.send_bytes(pickle.dumps(READY))
        while True:
            try:
                order, case = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            if order == STOP:
                return
            if order == RUN:
                connection.send_bytes(_answer(rank, case))
            else:
                clean.restore()
                connection.send_bytes(pickle.dumps(READY))


def _answer(rank: int, case: Case) -> bytes:
    try:
        return pickle.dumps((None, _run(rank, case)))
    except BaseException as error:
        if isinstance(error, SystemExit):
            error = RuntimeError(f"the case called sys.exit({error.code!r})")
        failure = Failure(rank, type(error).__name__, str(error), traceback.format_exc(), _portable(error))
        _release_frames(error)
        _leave_process_group()  # the peers' pending operations fail now instead of at their timeout
        return pickle.dumps((failure, None))


def _run(rank: int, case: Case) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = case.path
    os.environ.update(_torchrun_environment(rank, case))
    os.environ.update(case.env)
    function, args = pickle.loads(case.body)
    if case.process_group:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(case.store, case.world_size),
            rank=rank,
            world_size=case.world_size,
            timeout=datetime.timedelta(seconds=case.timeout_s),
        )
    torch.manual_seed(0)
    return function(*args)


def _torchrun_environment(rank: int, case: Case) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(case.world_size),
        "LOCAL_WORLD_SIZE": str(case.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(case.port),
    }


def _portable(error: BaseException) -> BaseException | None:
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return copy
    return None


def _release_frames(error: BaseException | None) -> None:
    """Frames of the traceback hold the process group of the operation that failed, and with it its
    connections. An error may be its own cause, a few steps on.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        gc.collect()


def _forget_compiled_code() -> None:
    """Dynamo leaves what a backend returned among the globals of the model's module, and with it the process groups of a session;
    each of these has a thread that wakes up hundreds of times a second.
    """
    for module in list(sys.modules.values()):
        names = [name for name in getattr(module, "__dict__", ()) if name.startswith("__compiled_fn_")]
        for name in names:
            delattr(module, name)


@dataclass(frozen=True, slots=True)
class _State:
    """What a case may change in its process and the next one must find as it was."""

    env: Mapping[str, str]
    folder: str
    dynamo_config: Any
    optimizer_hooks: Mapping[int, Any]

    @staticmethod
    def take() -> _State:
        import torch._dynamo.config
        import torch.optim.optimizer as optimizer

        return _State(
            dict(os.environ),
            os.getcwd(),
            torch._dynamo.config.get_config_copy(),
            dict(optimizer._global_optimizer_pre_hooks),
        )

    def restore(self) -> None:
        import torch
        import torch.optim.optimizer as optimizer

        _leave_process_group()
        torch._dynamo.reset()  # also removes the callbacks at the start and end of a compilation
        _forget_compiled_code()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # setting a deprecated option back is no use of it
            torch._dynamo.config.load_config(self.dynamo_config)
        optimizer._global_optimizer_pre_hooks.clear()
        optimizer._global_optimizer_pre_hooks.update(self.optimizer_hooks)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.folder)
        gc.collect()
