"""AF-Pipe's gain over others, among systems that fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagmoe_compile.simulator.reproduce.setting import Outcome


@dataclass(frozen=True, slots=True)
class Gain:
    """Of AF-Pipe over others, in tokens/s; NaN where `too_large`, which do not fit in memory, leave nothing to compare."""

    gain: float
    too_large: Sequence[str] = ()


def gain_over(found: Mapping[str, Outcome], rivals: Sequence[str]) -> Gain:
    """Over the best of `rivals` that fit in memory."""
    others = {s: found[s] for s in rivals if found[s].fits}
    if not found["af_pipe"].fits:
        return Gain(math.nan, too_large({"af_pipe": found["af_pipe"]}))
    if not others:
        return Gain(math.nan, too_large({s: found[s] for s in rivals}))
    return Gain(found["af_pipe"].tokens_per_s_per_gpu / max(o.tokens_per_s_per_gpu for o in others.values()))


def largest(gains: Sequence[Gain]) -> Gain:
    """Of those that have a number, if any has."""
    return max(gains, key=lambda one: -math.inf if one.too_large else one.gain)


def too_large(found: Mapping[str, Outcome]) -> Sequence[str]:
    """The systems of which no choice fits in memory."""
    return tuple(system for system, outcome in found.items() if not outcome.fits)
