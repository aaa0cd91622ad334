"""`disagmoe inspect SOURCE`: how a model would be split, without training it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command

if TYPE_CHECKING:
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.explain import Explanation


@command
def inspect(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="hf:FAMILY or path/to/file.py:factory.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the graph after every pass, as runnable Python.")
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Show what each pass changed.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Shows the stages, transfers and experts of a model, and where its graph breaks."""
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.dump import GraphDumper
    from disagmoe_compile.inspect.explain import explain_with
    from disagmoe_compile.models.source import load_source

    with Console(stderr=True).status("tracing"):
        loaded = load_source(source)
        diffs = DiffRecorder()
        observers = (diffs, GraphDumper(out)) if out is not None else (diffs,)
        explanation = explain_with(observers, loaded.model, *loaded.args, **loaded.kwargs)
    document = {"source": source, **explanation.to_dict(), "dumps": None if out is None else str(out)}
    if passes:
        document["passes"] = [
            {**one, "operations": diff.operations, "added": diff.added, "removed": diff.removed}
            for one, diff in zip(document["passes"], diffs.diffs)
        ]
    return Output(document, lambda console: _render(console, explanation, diffs, passes, out))


def _render(
    console: Console, explanation: Explanation, diffs: DiffRecorder, passes: bool, out: Path | None
) -> None:
    from disagmoe_compile.inspect.explain_tables import pass_table, renderables

    for part in renderables(explanation):
        console.print(part)
    if passes:
        console.print(pass_table(diffs.diffs))
    if out is not None and explanation.passes:
        console.print(
            f"dumps: {out} ({len(explanation.passes)} files; each runs with python)", soft_wrap=True
        )
