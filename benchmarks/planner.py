"""How long the planner takes, and that it proves its answer. `python benchmarks/planner.py [--large]`; no torch.

Bars, in CPU seconds: 16 nodes under 1 s, 1,250 nodes (10,000 GPUs) under 60 s. "solve" is wall time as the plan reports
it, "CPU" that of the whole call; importing Pyomo is apart.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.size import plan
from disagmoe_compile.planner.sizing_problem import TrainingWorkload


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    nodes: int
    seq_length: int
    most_s: float
    free_nics: bool = False


CASES = (
    Case("DeepSeek-MoE-16B", 16, 8192, 1),
    Case("Qwen3-30B-A3B", 16, 8192, 1),
    Case("GPT-OSS-20B", 16, 32768, 1),
    Case("DeepSeek-MoE-16B", 4, 8192, 1, free_nics=True),
    Case("Qwen3-30B-A3B", 16, 8192, 1, free_nics=True),
)
LARGE = (Case("DeepSeek-V3", 1250, 8192, 60), Case("Qwen3-235B-A22B", 1250, 8192, 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 1,250 nodes")
    large = parser.parse_args().large
    import pyomo.environ  # noqa: F401
    from pyomo.contrib.solver.solvers import highs  # noqa: F401

    table = Table(title="Planner")
    for column in ("model", "GPUs", "tokens", "NICs", "status", "gap", "solve", "CPU", "bar"):
        table.add_column(column, justify="right")
    for case in (*CASES, *(LARGE if large else ())):
        started = time.process_time()
        found = plan(
            find_model(case.model),
            find_cluster("H800-SXM5", case.nodes),
            TrainingWorkload(case.seq_length, sequences_per_gpu=8),
            alternatives=0,
            free_nics=case.free_nics,
            time_limit_s=10 * case.most_s,
        )
        table.add_row(
            case.model,
            f"{found.world_size:,}",
            str(case.seq_length),
            "free" if case.free_nics else "tied",
            found.solver["status"],
            f"{found.solver['gap']:.0e}",
            f"{found.solver['seconds']:.2f} s",
            f"{time.process_time() - started:.2f} s",
            f"{case.most_s:g} s",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
