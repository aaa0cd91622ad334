"""The pool of gloo processes: results, errors, deaths and timeouts of ranks, and a clean process for each
case.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.optim.optimizer as optimizer

from disagmoe_compile.testing.pool import GlooPool, PoolError


def sum_over_ranks(value: float) -> tuple[int, int, float]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise KeyError("lost")
    dist.barrier()


def die_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        time.sleep(600)


def dirty_the_process() -> None:
    optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    torch._dynamo.config.recompile_limit = 1
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_grad_enabled(False)


def process_state() -> tuple[int, bool, bool, bool]:
    hooks = len(optimizer._global_optimizer_pre_hooks)
    is_limited = torch._dynamo.config.recompile_limit == 1
    return hooks, is_limited, "LEFT_BEHIND" in os.environ, torch.is_grad_enabled()


def environment(name: str) -> tuple[str | None, bool]:
    return os.environ.get(name), dist.is_initialized()


def test_results_come_in_rank_order(pool: GlooPool) -> None:
    assert pool.run(sum_over_ranks, 2.0, world_size=3) == [(0, 3, 12.0), (1, 3, 12.0), (2, 3, 12.0)]


def test_a_smaller_world_runs_in_the_same_processes(pool: GlooPool) -> None:
    pool.run(sum_over_ranks, 1.0, world_size=3)
    before = pool.pids
    assert pool.run(sum_over_ranks, 1.0, world_size=2) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert pool.pids == before


def test_an_exception_names_its_rank_and_keeps_its_type(pool: GlooPool) -> None:
    with pytest.raises(PoolError, match=r"rank 1 failed: KeyError: 'lost'") as caught:
        pool.run(fail_on, 1, world_size=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "fail_on" in str(caught.value)


def test_outcomes_keep_results_beside_errors(pool: GlooPool) -> None:
    outcomes = pool.outcomes(fail_on, 0, world_size=2)
    assert outcomes[0].failure is not None and outcomes[0].failure.kind == "KeyError"
    assert outcomes[1].failure is not None  # its barrier broke instead of waiting for the timeout


def test_a_killed_rank_is_named_and_replaced(pool: GlooPool) -> None:
    with pytest.raises(PoolError, match=r"rank 1 failed: ProcessDied: the process died \(SIGKILL\)"):
        pool.run(die_on, 1, world_size=2)
    assert pool.run(sum_over_ranks, 1.0, world_size=2) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_stuck_rank_ends_at_the_timeout_and_shows_where_it_stood(pool: GlooPool) -> None:
    outcomes = pool.outcomes(sleep_on, 1, world_size=2, timeout_s=2.0)
    assert outcomes[0].failure is None
    assert outcomes[1].failure is not None and outcomes[1].failure.kind == "Timeout"
    assert "sleep_on" in outcomes[1].failure.traceback
    assert pool.run(sum_over_ranks, 1.0, world_size=2)[1] == (1, 2, 3.0)


def test_the_next_case_finds_a_clean_process(pool: GlooPool) -> None:
    before = pool.run(process_state, world_size=2)
    pool.run(dirty_the_process, world_size=2)
    assert pool.run(process_state, world_size=2) == before


def test_environment_is_set_for_one_case_and_the_group_can_be_left_to_it(pool: GlooPool) -> None:
    how = {"world_size": 1, "env": {"FLAVOUR": "mint"}, "process_group": False}
    assert pool.run(environment, "FLAVOUR", **how) == [("mint", False)]
    assert pool.run(environment, "FLAVOUR", world_size=1) == [(None, True)]


def test_a_local_function_is_refused_with_what_to_do(pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="use a function at the top of a module"):
        pool.run(lambda: None, world_size=1)


def test_a_world_larger_than_the_pool_is_refused(pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="a pool of 8 cannot run a world of 9"):
        pool.run(sum_over_ranks, 1.0, world_size=9)


STARTS_RANKS = """
from test_pool import sleep_on
from disagmoe_compile.testing.pool import GlooPool

if __name__ == "__main__":
    pool = GlooPool(2)
    pool._start(2)
    print(*pool.pids, flush=True)
    pool.run(sleep_on, 0, process_group=False)
"""


def test_ranks_end_with_a_process_that_is_ended_in_the_middle_of_a_case(tmp_path: Path) -> None:
    """SIGTERM gives pytest no chance to close its pool."""
    script = tmp_path / "starts_ranks.py"
    script.write_text(STARTS_RANKS)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    starter = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert starter.stdout is not None
    ranks = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(ranks) == 2 and all(map(is_running, ranks))
    starter.terminate()
    starter.wait(30)
    deadline = time.monotonic() + 30
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, ranks))


def is_running(pid: int) -> bool:
    """Ended and not yet waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
