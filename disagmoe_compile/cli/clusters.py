"""`disagmoe clusters [NAME|FILE]`: the node types that `--cluster` knows, or one of them, with their numbers and sources."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.planner.efficiency import Efficiencies
from disagmoe_compile.planner.hardware import Cluster, catalogue, find_cluster

ClusterArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME|FILE]", help="Only this one: a name, or a cluster file.")
]


@command
def clusters(
    cluster: ClusterArgument = None, as_json: JsonOption = False, debug: DebugOption = False
) -> Output:
    """The catalogue of GPUs and nodes, and the shares of their peaks that plans count on."""
    known = list(catalogue().values()) if cluster is None else [find_cluster(cluster)]
    document = {"clusters": [cluster.to_dict() for cluster in known]}
    return Output(document, lambda console: _render(console, known))


def _render(console: Console, known: list[Cluster]) -> None:
    table = Table(title="Node types (peaks as vendors state them; bytes/s in one direction)")
    table.add_column("name", no_wrap=True)
    for column in ("bf16\nTFLOPS", "HBM\nGB", "HBM\nGB/s", "link\nGB/s", "GPUs", "NICs", "NIC\nGB/s"):
        table.add_column(column, justify="right")
    for cluster in known:
        gpu = cluster.gpu
        table.add_row(
            cluster.name,
            f"{gpu.flops / 1e12:g}",
            f"{gpu.memory_bytes / 1e9:g}",
            f"{gpu.memory_bytes_per_s / 1e9:g}",
            f"{gpu.link_bytes_per_s / 1e9:g}",
            str(cluster.gpus_per_node),
            str(cluster.nics_per_node),
            f"{cluster.nic_bytes_per_s / 1e9:g}",
        )
    console.print(table)
    console.print(_reached(known))
    console.print(
        "Sources and notes: disagmoe clusters --json. Any number can be overridden in a cluster file."
    )


def _reached(known: list[Cluster]) -> Table:
    """Shares of the peaks; those that are guesses are marked."""
    names = [field.name for field in fields(Efficiencies)]
    table = Table(title="Shares of these peaks that plans count on (* assumed)")
    table.add_column("name", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right")
    for cluster in known:
        shares = [getattr(cluster.efficiencies, name) for name in names]
        table.add_row(
            cluster.name, *(f"{share.value:g}{'*' if share.is_assumed else ''}" for share in shares)
        )
    return table
