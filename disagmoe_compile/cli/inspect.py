"""`disagmoe inspect SOURCE`: how a model would be split, without training it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.errors import InputError

if TYPE_CHECKING:
    from disagmoe_compile.inspect.bisect import Bisection
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.explain import Explanation
    from disagmoe_compile.inspect.pass_pair import PairDiff


@command
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf:FAMILY, style:NAME or path/to/file.py:factory.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the graph after every pass as runnable Python, an HTML report, the schedule and the stages in DOT.",
        ),
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Show what each pass changed.")] = False,
    diff: Annotated[
        str | None,
        typer.Option(metavar="FIRST:SECOND", help="Show what changed between two passes, by number or name."),
    ] = None,
    attention_group_size: Annotated[int, typer.Option(min=1, help="Of the plan that --out shows.")] = 1,
    ffn_group_size: Annotated[int, typer.Option(min=1, help="Of the plan that --out shows.")] = 1,
    pipeline_groups: Annotated[int, typer.Option(min=1, help="Of the plan that --out shows.")] = 1,
    n_microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Of the plan that --out shows; as many as the example batch allows."),
    ] = None,
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
    from disagmoe_compile.cli.inspect_files import Sizes, plan_to_show, write_files
    from disagmoe_compile.inspect.bisect import bisect as run_bisection
    from disagmoe_compile.inspect.diff import DiffRecorder
    from disagmoe_compile.inspect.dump import GraphDumper
    from disagmoe_compile.inspect.explain import explain_graph, no_graph, trace_call
    from disagmoe_compile.inspect.pass_pair import PairRecorder
    from disagmoe_compile.inspect.structured import structured_trace
    from disagmoe_compile.inspect.why import WhyRecorder
    from disagmoe_compile.models.source import load_source
    from disagmoe_compile.passes.captured import CapturedGraph
    from disagmoe_compile.plan.ir import Plan

    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # before minutes of tracing
        except OSError as error:
            raise InputError(f"--out {out} cannot be made: {error.strerror}") from error
    disabled = tuple(disable or ())
    diffs = DiffRecorder()
    recorder = None if why is None else WhyRecorder(why)
    pair = None if diff is None else PairRecorder.parse(diff)
    bisection, files = None, {}
    with Console(stderr=True).status("tracing"):
        loaded = load_source(source)
        traced = trace_call(loaded.model, loaded.args, loaded.kwargs)
        if isinstance(traced, CapturedGraph):
            dumper = None if out is None else GraphDumper(out)
            observers = [one for one in (diffs, dumper, recorder, pair) if one is not None]
            explanation, partition = explain_graph(traced, observers, disabled)
            trace = structured_trace(traced)
            if out is not None or trace is not None:
                sizes = Sizes(attention_group_size, ffn_group_size, pipeline_groups, n_microbatches)
                plan = plan_to_show(traced, partition, sizes)
                if trace is not None and isinstance(plan, Plan):
                    trace.plan(plan)
                if out is not None:
                    files = write_files(out, source, partition, explanation, plan)
            bisection = run_bisection(traced, disabled=disabled) if bisect else None
        else:
            explanation = no_graph(traced)
    changes = None if pair is None else pair.diff()
    answer = None if recorder is None else recorder.answer
    document = {"source": source, **explanation.to_dict(), "dumps": None if out is None else str(out)}
    document["files"] = files
    if changes is not None:
        document["diff"] = asdict(changes)
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
            console.print(str(answer), markup=False, highlight=False, soft_wrap=True)
        elif changes is not None:
            _render_diff(console, changes)
        elif bisection is not None:
            _render_bisection(console, bisection)
        else:
            _render(console, explanation, diffs, passes, out)
            for kind, path in files.items():
                console.print(f"{kind}: {path}", soft_wrap=True)

    return Output(document, render)


def _render_diff(console: Console, changes: PairDiff) -> None:
    added = [f"+{count} {name}" for name, count in changes.added.items()]
    removed = [f"-{count} {name}" for name, count in changes.removed.items()]
    counts = ", ".join(added + removed) or "the same operations"
    text = f"{changes.first} to {changes.second}: {counts}\n{changes.code}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
