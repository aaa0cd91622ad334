"""Tools for people who write passes, plans or models for this backend: run, compare with eager, draw random cases.

See docs/writing_passes.md. Loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "GlooPool": "disagmoe_compile.testing.pool",
    "PassRun": "disagmoe_compile.testing.passes",
    "PoolError": "disagmoe_compile.testing.pool",
    "assert_parity": "disagmoe_compile.testing.parity",
    "build_model": "disagmoe_compile.testing.models",
    "capture_call": "disagmoe_compile.testing.virtual",
    "capture_model": "disagmoe_compile.testing.graphs",
    "eager_reference": "disagmoe_compile.testing.parity",
    "example_plan": "disagmoe_compile.testing.plans",
    "gradient_errors": "disagmoe_compile.inspect.parity",
    "language_batch": "disagmoe_compile.testing.models",
    "moe_models": "disagmoe_compile.testing.models",
    "relative_error": "disagmoe_compile.inspect.parity",
    "run_programs": "disagmoe_compile.testing.programs",
    "run_captured": "disagmoe_compile.testing.virtual",
    "run_pass": "disagmoe_compile.testing.passes",
    "run_passes": "disagmoe_compile.testing.passes",
    "run_virtual": "disagmoe_compile.testing.virtual",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
