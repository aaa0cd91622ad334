"""The options of `torch.compile(model, backend="disagmoe", options={...})`, validated before anything is traced."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.exchange import PAYLOAD_DTYPES
from disagmoe_compile.plan.recompute import RECOMPUTE

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": ("af_pipe", "af_pipe_in_order", "gpipe"),
    "stage_compiler": ("inductor", "aot_eager", "eager"),
    "dedup": ("none", "rank", "node"),
    "recompute": RECOMPUTE,
    "loss_reduction": ("auto", "mean", "sum"),
}
# Promised values that this version does not run yet: asking for one is an error, never a silent fallback.
_NOT_YET: Mapping[str, str] = {"dedup": "node"}
_POSITIVE = (
    "attention_group_size",
    "ffn_group_size",
    "pipeline_groups",
    "n_microbatches",
    "microbatches_in_flight",
)


@dataclass(frozen=True, slots=True)
class Options:
    """None means: the planner (or the model) decides. `docs/options.md` describes each."""

    attention_group_size: int | None = None
    ffn_group_size: int | None = None
    pipeline_groups: int | None = None
    n_microbatches: int | None = None
    microbatches_in_flight: int | None = None
    schedule: str = "af_pipe"
    stage_compiler: str = "inductor"
    dedup: str = "rank"
    payload_dtype: str | None = None
    recompute: str = "none"
    loss_reduction: str = "auto"
    gather_outputs: bool = False
    timeout_s: float = 600
    plan: str | None = None
    trace_dir: str | None = None
    disable_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"option {name} must be a positive whole number, got {value!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"option {name} must be one of {', '.join(choices)}, got {value!r}")
            if value == _NOT_YET.get(name):
                raise InputError(f"option {name}={value!r} is not supported by this version; leave it out")
        if self.payload_dtype not in (None, *PAYLOAD_DTYPES):
            raise InputError(
                f"option payload_dtype must be one of {', '.join(PAYLOAD_DTYPES)}, or None for rows as they are computed, "
                f"got {self.payload_dtype!r}"
            )
        if type(self.gather_outputs) is not bool:
            raise InputError(f"option gather_outputs must be True or False, got {self.gather_outputs!r}")
        if (
            isinstance(self.timeout_s, bool)
            or not isinstance(self.timeout_s, int | float)
            or self.timeout_s <= 0
        ):
            raise InputError(f"option timeout_s must be a positive number of seconds, got {self.timeout_s!r}")
        if isinstance(self.disable_passes, str) or not all(isinstance(p, str) for p in self.disable_passes):
            raise InputError(
                f"option disable_passes must be a list of names of passes, got {self.disable_passes!r}"
            )
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        for name in ("plan", "trace_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise InputError(f"option {name} must be a path, got {value!r}")

    @staticmethod
    def from_mapping(options: Mapping[str, Any] | None) -> Options:
        """Raises InputError (a ValueError) that names an unknown option and lists the valid ones."""
        given = dict(options or {})
        valid = [f.name for f in fields(Options)]
        for name in given:
            if name not in valid:
                near = difflib.get_close_matches(str(name), valid, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise InputError(f"unknown option {name!r}: {hint}valid options are {', '.join(valid)}")
        given.setdefault("trace_dir", os.environ.get("DISAGMOE_TRACE") or None)
        return Options(**given)
