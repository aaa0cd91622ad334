"""pytest fixtures, there for every test suite where this package is installed (entry point group `pytest11`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from disagmoe_compile.testing.pool import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Up to eight gloo ranks for the whole session; only those that a test needs are started."""
    from disagmoe_compile.testing.pool import GlooPool

    with GlooPool(8) as pool:
        yield pool


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile's caches empty before and after, so that a test's graphs and recompiles are its own."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
