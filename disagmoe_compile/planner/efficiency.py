"""What kernels and links reach of a vendor's peaks, and the seconds that follow.

Each number is a share of a peak, named, with a source or the word "assumed", and any of them can be overridden in a cluster file:

    gemm             FLOP/s of large matmuls                                  of GPU.flops
    attention_core   FLOP/s of a fused attention core, forward and backward   of GPU.flops
    memory           bytes/s of kernels that mostly move data, as weights     of GPU.memory_bytes_per_s
    link             bytes/s one way inside a node                            of GPU.link_bytes_per_s
    network          bytes/s one way through a NIC                            of Cluster.nic_bytes_per_s

Grouped matmuls with few rows an expert reach less than `gemm`: `step_costs.grouped_gemm_efficiency`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from disagmoe_compile.errors import InputError

ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """A share (0 to 1] of a peak, and who says so; a source that begins with "assumed" is a guess."""

    value: float
    source: str = ASSUMED

    def __post_init__(self) -> None:
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not (is_number and 0 < self.value <= 1):
            raise InputError(f"must be a share above 0 and up to 1, got {self.value!r}")
        if not isinstance(self.source, str) or not self.source:
            raise InputError(f"needs a source; write {ASSUMED!r} if there is none")

    @property
    def is_assumed(self) -> bool:
        return self.source.startswith(ASSUMED)


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """See the module docstring."""

    gemm: Efficiency
    attention_core: Efficiency
    memory: Efficiency
    link: Efficiency
    network: Efficiency

    def overridden(self, changes: object) -> Efficiencies:
        """With some replaced: name -> a share, or {"value": share, "source": text}. Raises InputError naming what is wrong."""
        names = [field.name for field in fields(self)]
        if not isinstance(changes, Mapping):
            raise InputError(
                f"efficiencies must be an object with any of {', '.join(names)}, got {changes!r}"
            )
        unknown = sorted(set(map(str, changes)) - set(names))
        if unknown:
            raise InputError(f"unknown efficiency {', '.join(map(repr, unknown))}; known: {', '.join(names)}")
        return replace(self, **{name: _parsed(name, change) for name, change in changes.items()})

    def to_dict(self) -> dict[str, Any]:
        """Name -> value and source, as `overridden` takes them."""
        return asdict(self)


def uniform(value: float, source: str = ASSUMED) -> Efficiencies:
    """The same share of every peak: 1 where the peaks are already what is reached."""
    return Efficiencies(*(Efficiency(value, source) for _ in fields(Efficiencies)))


def _parsed(name: str, change: object) -> Efficiency:
    try:
        if not isinstance(change, Mapping):
            return Efficiency(change)  # type: ignore[arg-type]  # it checks
        if set(change) - {"value", "source"} or "value" not in change:
            raise InputError(f"must be a number or an object with value and source, got {dict(change)!r}")
        return Efficiency(**change)
    except InputError as error:
        raise InputError(f"efficiency {name!r} {error}") from error
