"""`disagmoe plan --problem FILE`: the best split of GPUs and NICs between attention and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.planner.allocation import Allocation, AllocationProblem, solve
from disagmoe_compile.planner.problem_file import load_problem

ProblemOption = Annotated[
    Path,
    typer.Option(
        "--problem",
        metavar="FILE",
        help="JSON: attention_flops, ffn_flops, exchange_bytes (of a stage), gpus, nics, gpu_flops, nic_bytes_per_s.",
    ),
]


@command
def plan(problem: ProblemOption, as_json: JsonOption = False, debug: DebugOption = False) -> Output:
    """Splits GPUs and NICs between attention and experts so that the slower of the two is as fast as possible."""
    loaded = load_problem(problem)
    allocation = solve(loaded)
    return Output(allocation.to_dict(), lambda console: _render(console, loaded, allocation))


def _render(console: Console, problem: AllocationProblem, allocation: Allocation) -> None:
    table = Table()
    for column in ("", "GPUs", "NICs", "time of a stage", "limited by"):
        table.add_column(column, justify="left" if column in ("", "limited by") else "right")
    for name, gpus, nics, seconds, flops in (
        (
            "attention",
            allocation.attention_gpus,
            allocation.attention_nics,
            allocation.t_attention_s,
            problem.attention_flops,
        ),
        ("experts", allocation.ffn_gpus, allocation.ffn_nics, allocation.t_ffn_s, problem.ffn_flops),
    ):
        compute_s = flops / (gpus * problem.gpu_flops)
        exchange_s = problem.exchange_bytes / (nics * problem.nic_bytes_per_s)
        limit = "compute" if compute_s >= exchange_s else "exchange"
        table.add_row(name, str(gpus), str(nics), _milliseconds(seconds), limit)
    console.print(table)
    solver = allocation.solver
    console.print(
        f"T* = {_milliseconds(allocation.t_star_s)}, balance {allocation.balance_score:.3f} of 2\n"
        f"{solver.name}: {solver.status}, bound {_milliseconds(solver.bound)}, gap {solver.gap:.1e}, {solver.seconds:.2f} s",
        highlight=False,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
