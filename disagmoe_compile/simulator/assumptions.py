"""The numbers that no vendor states and nobody here has measured, in one place for every schedule and every figure. All ASSUMED.

Shares of peaks (matmuls, attention core, memory, links, network) belong to the cluster (`planner/efficiency.py`), and the grouped
matmul's loss with few rows to `planner.step_costs`. What is left is what a message and a kernel launch cost beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe_compile.errors import InputError


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Seconds. `message_latency_s`: of one M2N exchange, all-to-all or point-to-point message, beside its bytes. `launch_s`: of
    starting the kernels of one stage. Neither depends on the system: each pays for as many as it starts.
    """

    message_latency_s: float = 20e-6
    launch_s: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("message_latency_s", "launch_s"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be from 0 to 1 second, got {getattr(self, name)!r}")
