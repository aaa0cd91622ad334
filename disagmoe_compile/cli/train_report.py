"""Tables of `disagmoe train`: the partition, the plan, the losses, the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from disagmoe_compile.plan.ir import Plan, Splits

_LOSSES_SHOWN = 20


def render_plan(console: Console, plan: Plan) -> None:
    console.print(_stages(plan))
    console.print(_transfers(plan))
    topology, workload = plan.topology, plan.workload
    schedule = plan.training or plan.forward_only
    console.print(
        f"plan {plan.fingerprint}: schedule {schedule.name}, {workload.n_microbatches} micro-batches of "
        f"{' or '.join(map(str, plan.microbatch_sizes))} on each attention rank, {topology.attention_groups} attention group(s) "
        f"of {topology.attention_group_size} and {topology.ffn_groups} FFN group(s) of {topology.ffn_group_size}, "
        f"{sum(map(len, schedule.actions.values()))} actions",
        highlight=False,
    )


def _stages(plan: Plan) -> Table:
    table = Table(title="Partition", title_justify="left")
    for column in ("stage", "role", "layers", "group", "ranks", "experts", "parameters"):
        table.add_column(column, justify="right" if column in ("experts", "parameters") else "left")
    for stage in plan.stages:
        ranks = plan.topology.ranks_of_stage(stage.index)
        table.add_row(
            stage.name,
            str(stage.role),
            ",".join(map(str, stage.layers)) or "-",
            str(plan.topology.group_of_stage(stage.index)),
            span(ranks),
            str(stage.num_experts or "-"),
            str(len(stage.param_fqns)),
        )
    return table


def _transfers(plan: Plan) -> Table:
    table = Table(title="Transfers of one micro-batch", title_justify="left")
    for column in ("transfer", "from", "to", "a message holds", "bytes a message"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    for transfer in plan.transfers:
        nbytes = sum(spec.nbytes() for spec in transfer.payload)
        routed = transfer.splits is Splits.ROUTED
        table.add_row(
            transfer.name,
            plan.stages[transfer.src].name,
            plan.stages[transfer.dst].name,
            ", ".join(spec.name for spec in transfer.payload),
            f"{'up to ' if routed else ''}{nbytes:,}",
        )
    return table


def render_result(console: Console, document: Mapping[str, Any]) -> None:
    console.print(_losses(document["losses"], document["eager_losses"]))
    console.print(_ranks(document["ranks"]))
    if document["max_relative_error"] is not None:
        console.print(
            f"largest relative error against eager: {document['max_relative_error']:.1e}", highlight=False
        )
    console.print(
        f"{document['tokens_per_s']:,.0f} tokens/s; first step {document['first_step_s']:.1f} s with compilation "
        f"({document['stage_compiler']})\nrun folder: {document['run_dir']}",
        highlight=False,
        soft_wrap=True,
    )


def _losses(losses: Sequence[float], eager: Sequence[float] | None) -> Table:
    table = Table(title="Loss", title_justify="left")
    for column in ("step", "disagmoe", *(("eager", "relative error") if eager is not None else ())):
        table.add_column(column, justify="right")
    for step in _some(len(losses)):
        row = [str(step), f"{losses[step]:.6f}"]
        if eager is not None:
            row += [f"{eager[step]:.6f}", f"{abs(losses[step] - eager[step]) / abs(eager[step]):.1e}"]
        table.add_row(*row)
    return table


def _some(count: int) -> list[int]:
    """All steps of a short run; of a long one evenly spread ones, the first and the last included."""
    if count <= _LOSSES_SHOWN:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_LOSSES_SHOWN - 1)) for i in range(_LOSSES_SHOWN)})


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Ranks", title_justify="left")
    for column in ("rank", "role", "group", "parameter bytes", "optimizer bytes", "sent bytes"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            rank["role"],
            str(rank["group"]),
            *(f"{rank[key]:,}" for key in ("param_bytes", "optimizer_bytes", "sent_bytes")),
        )
    return table


def span(ranks: range) -> str:
    """`0-1`, or `2` for a single rank."""
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
