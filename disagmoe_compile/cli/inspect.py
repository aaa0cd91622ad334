"""`disagmoe inspect SOURCE`: how a model would be split, without training it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command

if TYPE_CHECKING:
    from disagmoe_compile.inspect.bisect import Bisection
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.explain import Explanation


@command
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf:FAMILY, style:NAME or path/to/file.py:factory.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the graph after every pass, as runnable Python.")
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Show what each pass changed.")] = False,
    why: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Say why a node stands in its stage, by its name in the dumps."),
    ] = None,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect", help="Run the graph after every pass; name the one after which parity breaks."
        ),
    ] = False,
    disable: Annotated[
        list[str] | None,
        typer.Option(metavar="PASS", help="Leave a pass, or find_regions.STYLE, out. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Shows the stages, transfers and experts of a model, and where its graph breaks."""
    from disagmoe_compile.inspect.bisect import bisect as run_bisection
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.dump import GraphDumper
    from disagmoe_compile.inspect.explain import explain_graph, no_graph, trace_call
    from disagmoe_compile.inspect.why import WhyRecorder
    from disagmoe_compile.models.source import load_source
    from disagmoe_compile.passes.captured import CapturedGraph

    disabled = tuple(disable or ())
    diffs = DiffRecorder()
    recorder = None if why is None else WhyRecorder(why)
    bisection = None
    with Console(stderr=True).status("tracing"):
        loaded = load_source(source)
        traced = trace_call(loaded.model, loaded.args, loaded.kwargs)
        if isinstance(traced, CapturedGraph):
            dumper = None if out is None else GraphDumper(out)
            observers = [one for one in (diffs, dumper, recorder) if one is not None]
            explanation = explain_graph(traced, observers, disabled)
            bisection = run_bisection(traced, disabled=disabled) if bisect else None
        else:
            explanation = no_graph(traced)
    answer = None if recorder is None else recorder.answer
    document = {"source": source, **explanation.to_dict(), "dumps": None if out is None else str(out)}
    if passes:
        document["passes"] = [
            {**one, "operations": diff.operations, "added": diff.added, "removed": diff.removed}
            for one, diff in zip(document["passes"], diffs.diffs)
        ]
    if answer is not None:
        document["why"] = asdict(answer)
    if bisection is not None:
        culprit = bisection.culprit
        document["bisect"] = {
            "culprit": None if culprit is None else culprit.name,
            "passes": [asdict(one) for one in bisection.passes],
        }

    def render(console: Console) -> None:
        if answer is not None:
            console.print(str(answer), markup=False, highlight=False)
        elif bisection is not None:
            _render_bisection(console, bisection)
        else:
            _render(console, explanation, diffs, passes, out)

    return Output(document, render)


def _render_bisection(console: Console, bisection: Bisection) -> None:
    from disagmoe_compile.inspect.explain_tables import bisection_table

    console.print(bisection_table(bisection))
    culprit = bisection.culprit
    verdict = (
        "every pass keeps parity"
        if culprit is None
        else f"parity breaks after {culprit.name}, at {culprit.where}"
    )
    console.print(verdict, highlight=False)


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
