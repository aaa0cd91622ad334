"""disagmoe-compile: a torch.compile backend that trains MoE models with attention and experts on disjoint
ranks.

Public names are loaded on first use, so that importing this package, its plans or its planner never imports
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "clip_grad_norm_": "disagmoe_compile.runtime.clip",
    "explain": "disagmoe_compile.inspect.explain",
    "full_state_dict": "disagmoe_compile.runtime.full_state",
    "init_weights": "disagmoe_compile.runtime.loading.load",
    "load_plan": "disagmoe_compile.plan.files",
    "load_safetensors": "disagmoe_compile.runtime.loading.load",
    "simulate": "disagmoe_compile.simulator.simulate",
}

# Packages that are public themselves; `plan` can be called, see there.
_PACKAGES = ("plan", "testing")

__all__ = [
    "clip_grad_norm_",
    "explain",
    "full_state_dict",
    "init_weights",
    "load_plan",
    "load_safetensors",
    "plan",
    "simulate",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"disagmoe_compile.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
