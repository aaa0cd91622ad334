"""The command `disagmoe`. One file a command; a command imports torch only if it needs it, and only when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from disagmoe_compile.cli import clusters, doctor, families, inspect, models, plan, reproduce, simulate, train
from disagmoe_compile.cli.output import report

app = typer.Typer(
    name="disagmoe",
    help="Trains unmodified MoE models with attention and experts on disjoint ranks.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("models")(models.models)
app.command("families")(families.families)
app.command("clusters")(clusters.clusters)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("reproduce")(reproduce.reproduce)
app.command("inspect")(inspect.inspect)
app.command("train")(train.train)


@app.callback(invoke_without_command=True)
def disagmoe(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"disagmoe {metadata.version('disagmoe-compile')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point: exit status 0, 1 for a failure while running, 2 for bad input (usage errors too), 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(args=arguments, prog_name="disagmoe", standalone_mode=False)
    except typer.TyperException as error:
        status = report(error)
    except typer.Abort:
        status = 130
    except BrokenPipeError:
        # The reader of a pipe went away (`disagmoe clusters | head`): not an error, and Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status or 0)
