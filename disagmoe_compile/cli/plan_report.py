"""Tables of `disagmoe plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.planner.allocation import Allocation, AllocationProblem
from disagmoe_compile.planner.sizing_problem import SizingProblem
from disagmoe_compile.planner.sweep import Sweep

_MOST_STAGES = 8


def render_allocation(console: Console, problem: AllocationProblem, allocation: Allocation) -> None:
    """The bare problem's split."""
    table = _table("", "GPUs", "NICs", "time of a stage", "limited by")
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


def render_sizing(console: Console, found: Sizing, problem: SizingProblem) -> None:
    table = _table("", "GPUs", "group", "NICs", "stage", "memory", "recompute")
    has = _gigabytes(problem.memory_bytes)
    for role, gpus, size, nics, seconds in (
        (
            "attention",
            found.attention_gpus,
            found.attention_group_size,
            found.attention_nics,
            found.t_attention_s,
        ),
        ("ffn", found.ffn_gpus, found.ffn_group_size, found.ffn_nics, found.t_ffn_s),
    ):
        table.add_row(
            role,
            str(gpus),
            f"{found.pipeline_groups} x {size}",
            f"{nics:g}",
            _milliseconds(seconds),
            f"{_gigabytes(found.memory_bytes[role])} of {has}",
            found.recompute[role],
        )
    console.print(table)
    solver = found.solver
    sharded = ", optimizer state sharded" if found.shard_optimizer else ""
    console.print(
        f"{found.tokens_per_s:,.0f} tokens/s predicted: {found.step_s:.4g} s a step of {found.global_batch_size} sequences of "
        f"{found.seq_length} tokens\n"
        f"{found.n_microbatches} micro-batches of {found.micro_batch_size} on each attention rank, "
        f"{found.microbatches_in_flight} in flight each way; "
        f"shared experts on {found.shared_experts_on}; dedup {found.dedup}{sharded}\n"
        f"limited by {escape(', '.join(found.binding))}; balance {found.balance_score:.3f} of 2\n"
        f"{solver['name']}: {solver['status']}, no plan above {solver['bound']:,.0f} tokens/s, gap {solver['gap']:.1e}, "
        f"{solver['seconds']:.2f} s",
        highlight=False,
    )
    if found.alternatives:
        _render_alternatives(console, found)


def _render_alternatives(console: Console, found: Sizing) -> None:
    table = _table("next best", "groups", "M", "N", "micro-batches", "recompute A/F", "shared on", "tokens/s")
    for other in found.alternatives:
        table.add_row(
            f"{other['tokens_per_s'] / found.tokens_per_s - 1:+.2%}",
            str(other["pipeline_groups"]),
            str(other["attention_group_size"]),
            str(other["ffn_group_size"]),
            f"{other['n_microbatches']} x {other['micro_batch_size']}",
            f"{other['recompute']['attention']}/{other['recompute']['ffn']}",
            other["shared_experts_on"],
            f"{other['tokens_per_s']:,.0f}",
        )
    console.print(table)


def render_explanation(console: Console, explanation: Mapping[str, Any]) -> None:
    busy = _table("resource", "busy in a step")
    for name, seconds in explanation["resources_s"].items():
        busy.add_row(escape(name), f"{seconds:.4g} s")
    console.print(busy)
    console.print(
        f"filling the pipeline: x {explanation['fill']:.4f}, waiting for micro-batches: x {explanation['stall']:.4f}",
        highlight=False,
    )
    points = _table("role", "FLOPs a byte sent", "ridge", "")
    for roof in explanation["roofs"]:
        intensity = roof["intensity_flops_per_byte"]
        is_bound = intensity is None or intensity >= roof["ridge_flops_per_byte"]
        points.add_row(
            roof["role"],
            "-" if intensity is None else f"{intensity:,.0f}",
            f"{roof['ridge_flops_per_byte']:,.0f}",
            "compute bound" if is_bound else "waits for its NICs",
        )
    console.print(points)
    more = _table("one more", "tokens/s")
    for change in explanation["one_more"]:
        more.add_row(change["what"], f"{change['faster']:+.2%}")
    console.print(more)
    stages = _table("stage", "compute", "exchange")
    listed = explanation["stages"]
    for stage in listed[: _MOST_STAGES - 2]:
        stages.add_row(stage["name"], _milliseconds(stage["compute_s"]), _milliseconds(stage["exchange_s"]))
    if len(listed) > _MOST_STAGES:
        stages.add_row("...", "", "")
    for stage in listed[max(_MOST_STAGES - 2, len(listed) - 2) :]:
        stages.add_row(stage["name"], _milliseconds(stage["compute_s"]), _milliseconds(stage["exchange_s"]))
    console.print(stages)


def render_refinement(console: Console, refinement: Mapping[str, Any]) -> None:
    table = _table("trial", "M", "N", "micro-batches", "in flight", "step", "")
    for number, trial in enumerate(refinement["trajectory"]):
        table.add_row(
            "seed" if number == 0 else str(number),
            str(trial["attention_group_size"]),
            str(trial["ffn_group_size"]),
            f"{trial['n_microbatches']} x {trial['micro_batch_size']}",
            str(trial["microbatches_in_flight"]),
            _milliseconds(trial["step_s"]),
            "best so far" if trial["is_best"] else "",
        )
    console.print(table)


def render_sweep(
    console: Console, swept: Sweep, rows: Sequence[Mapping[str, Any]], plot: Path | None
) -> None:
    table = _table(swept.parameter, "groups", "A GPUs", "F GPUs", "A:F", "tokens/s", "limited by")
    for value, row in zip(swept.values, rows):
        table.add_row(
            str(value),
            str(row["pipeline_groups"]),
            str(row["attention_gpus"]),
            str(row["ffn_gpus"]),
            f"{row['attention_gpus'] / row['ffn_gpus']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            escape(", ".join(row["binding"])),
        )
    console.print(table)
    if plot is not None:
        console.print(f"wrote {plot}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        is_text = column in ("", "limited by", "role", "resource", "one more", "stage", "shared on")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"
