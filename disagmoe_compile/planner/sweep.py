"""A sweep: one parameter of a plan over several values, `seq-length=4096,8192`."""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe_compile.errors import InputError

PARAMETERS = (
    "seq-length",
    "nodes",
    "global-batch-size",
    "sequences-per-gpu",
    "micro-batch-size",
    "pipeline-groups",
)


@dataclass(frozen=True, slots=True)
class Sweep:
    parameter: str
    values: tuple[int, ...]


def parse_sweep(text: str) -> Sweep:
    """From `PARAMETER=V1,V2,...`. Raises InputError for an unknown parameter or an impossible value."""
    parameter, _, listed = text.partition("=")
    if parameter not in PARAMETERS:
        raise InputError(
            f"--sweep {text}: expected one of {', '.join(PARAMETERS)} and values, PARAMETER=V1,V2"
        )
    values = listed.split(",")
    wrong = [value for value in values if not value.isdecimal() or int(value) < 1]
    if wrong:
        raise InputError(f"--sweep {text}: {wrong[0]!r} is not a whole number of at least 1")
    return Sweep(parameter, tuple(int(value) for value in values))
