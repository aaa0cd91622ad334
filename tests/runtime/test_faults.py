"""A rank that dies, stops or raises at any kind of action: every other ends in time and names rank, action and micro-batch."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from sketch import fail_at

from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.testing.pool import GlooPool

KINDS = [kind for kind in ActionKind if kind is not ActionKind.OVERLAP]  # no generator makes one
FAST = [
    (ActionKind.WAIT, "SIGKILL", 1),
    (ActionKind.REDUCE_GRAD, "SIGKILL", 0),
    (ActionKind.FORWARD, "exception", 2),
    (ActionKind.SEND, "SIGSTOP", 3),
]
EVERY = [
    (kind, how, 0 if kind in (ActionKind.REDUCE_GRAD, ActionKind.BACKWARD) else 3)  # what FFN ranks never do
    for kind, how in product(KINDS, ("SIGKILL", "exception", "SIGSTOP"))
]


def assert_all_name_the_culprit(pool: GlooPool, folder: Path, kind: str, how: str, victim: int) -> None:
    timeout_s = 3 if how == "SIGSTOP" else 60
    outcomes = pool.outcomes(fail_at, kind, how, victim, timeout_s, str(folder), world_size=4, timeout_s=90)
    if how != "exception":
        failure = outcomes[victim].failure
        assert failure is not None and failure.kind == "ProcessDied"
    for outcome in outcomes:
        failure = outcome.failure
        assert failure is not None, f"rank {outcome.rank} did not notice"
        if outcome.rank != victim:
            assert failure.kind == "PeerError", failure.summary
            assert f"rank {outcome.rank} " in failure.message and f"rank {victim}" in failure.message
            where = re.search(r"\d(F|B|I|W|SEND|RECV|WAIT|FREE|REDUCE_GRAD)(\[\S+\])?\d*", failure.message)
            assert where is not None, failure.message


@pytest.mark.parametrize(("kind", "how", "victim"), FAST)
def test_every_other_rank_ends_and_names_the_culprit(pool, tmp_path, kind, how, victim):
    assert_all_name_the_culprit(pool, tmp_path, kind, how, victim)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "victim"), EVERY)
def test_every_other_rank_ends_and_names_the_culprit_at_any_action(pool, tmp_path, kind, how, victim):
    assert_all_name_the_culprit(pool, tmp_path, kind, how, victim)
