"""`disagmoe reproduce NAME`: the paper's figures in our simulator, ours beside theirs. Simulated, never measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.errors import InputError
from disagmoe_compile.simulator.reproduce.figures import FIGURES
from disagmoe_compile.simulator.reproduce.output import as_text, write
from disagmoe_compile.simulator.reproduce.rows import Figure


@command
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(FIGURES)}, or all.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a CSV, a text and a plot a figure.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """The paper's experiments as tables: ours, theirs, and whether it is reproduced. Simulated, not measured."""
    if name not in (*FIGURES, "all"):
        raise InputError(f"unknown figure {name!r}; one of {', '.join(FIGURES)}, all")
    names = list(FIGURES) if name == "all" else [name]
    figures: list[Figure] = []
    written: list[Path] = []
    for one in track(names, description="simulating", console=Console(stderr=True), transient=True):
        figures.append(FIGURES[one]())
        if out is not None:
            written += write(figures[-1], out)
    document = {"simulated": True, "figures": [figure.to_dict() for figure in figures]}

    def render(console: Console) -> None:
        for figure in figures:
            console.print(as_text(figure), highlight=False, markup=False, soft_wrap=True)
        for path in written:
            console.print(f"wrote {path}", highlight=False)

    return Output(document, render)
