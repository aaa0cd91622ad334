"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# Before torch is imported: test workers and their ranks are many processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "untimed", deadline=None
)  # an example takes longer on a busy machine: no fault of the code
settings.load_profile("untimed")

if TYPE_CHECKING:
    from disagmoe_compile.testing.pool import GlooPool


# What ranks import on their first case, but not `backend.entry`: it looks at torchrun's environment.
_RANKS_IMPORT = (
    "torch._dynamo",
    "disagmoe_compile.backend.graph_session",
    "disagmoe_compile.backend.planning",
    "transformers.modeling_utils",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks come first: they take longest, and a worker that gets one at the end keeps all others waiting."""
    starts_ranks = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in starts_ranks)


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Up to eight gloo ranks for the whole session; only those that a test needs are started."""
    from disagmoe_compile.testing.pool import GlooPool

    with GlooPool(8, preload=_RANKS_IMPORT) as gloo:
        yield gloo
