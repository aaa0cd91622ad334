"""Tools for people who write passes, plans or models for this backend: run, compare with eager, draw random cases.

See docs/writing_passes.md. Loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "GlooPool": "pool",
    "PassRun": "passes",
    "PoolError": "pool",
    "assert_parity": "parity",
    "build_model": "models",
    "capture_call": "virtual",
    "eager_reference": "parity",
    "example_plan": "plans",
    "gradient_errors": "parity",
    "language_batch": "models",
    "moe_models": "models",
    "relative_error": "parity",
    "run_captured": "virtual",
    "run_pass": "passes",
    "run_passes": "passes",
    "run_virtual": "virtual",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
