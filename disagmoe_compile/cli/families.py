"""`disagmoe families [FAMILY ...]`: every MoE family of the installed transformers against eager PyTorch.

docs/families.md is the output of `disagmoe families --markdown`.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.cli.progress import counting_bar

if TYPE_CHECKING:
    from disagmoe_compile.testing.family_check import FamilyReport

_COLUMNS = (
    "family",
    "graphs",
    "layers",
    "expert style",
    "stages",
    "experts",
    "worst relative error",
    "notes",
)


@command
def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FAMILY]...", help="These only; all if none is given.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/families.md.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that work on families.")] = 1,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Builds each family tiny, splits it, and compares loss and gradients with eager."""
    from disagmoe_compile.models import hf

    chosen = list(names) if names else list(hf.families())
    reports = _check_all(chosen, jobs)
    document = {"versions": _versions(), "families": [report.to_dict() for report in reports]}
    if markdown:
        page = markdown_page(reports)
        return Output(
            document, lambda console: console.print(page, soft_wrap=True, markup=False, highlight=False)
        )
    return Output(document, lambda console: console.print(_table(reports)))


def _check_all(names: Sequence[str], jobs: int) -> list[FamilyReport]:
    from disagmoe_compile.testing.family_check import FamilyReport, check_family

    console = Console(stderr=True)
    progress = counting_bar(console)
    found: dict[str, FamilyReport] = {}
    context = multiprocessing.get_context("spawn")
    with progress, ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet) as pool:
        task = progress.add_task("checking", total=len(names))
        futures = {pool.submit(check_family, name): name for name in names}
        for future in as_completed(futures):
            name = futures[future]
            try:
                found[name] = future.result()
            except Exception as error:  # the process died
                found[name] = FamilyReport(name, "-", 0, reason=f"{type(error).__name__}: {error}")
            progress.update(task, advance=1, description=f"checked {name}")
    return [found[name] for name in names]


def _quiet() -> None:
    """In a worker process."""
    import logging
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _versions() -> dict[str, str]:
    return {
        "disagmoe-compile": version("disagmoe-compile"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _row(report: FamilyReport) -> tuple[str, ...]:
    errors = report.worst_errors or {}
    if errors:
        experts = "sharded"
    elif report.graphs:
        experts = "not split"
    else:
        experts = "not supported"
    return (
        report.family,
        str(report.graphs),
        str(report.n_layers),
        ", ".join(report.styles) or "-",
        str(report.stages) if report.stages else "-",
        experts,
        " ".join(f"{error:.0e}" for error in errors.values()) or "-",
        "; ".join([*([report.reason] if report.reason else []), *report.notes]),
    )


def _table(reports: Sequence[FamilyReport]) -> Table:
    table = Table(*_COLUMNS, title="Families (errors with 1, 2, 3 and 4 FFN ranks)")
    for report in reports:
        table.add_row(*_row(report))
    return table


def markdown_page(reports: Sequence[FamilyReport]) -> str:
    """docs/families.md."""
    versions = ", ".join(f"{name} {found}" for name, found in _versions().items())
    sharded = [report for report in reports if report.worst_errors]
    worst = max((error for report in sharded for error in (report.worst_errors or {}).values()), default=0.0)
    lines = [
        "# Families of transformers",
        "",
        "Made by `disagmoe families --markdown > docs/families.md`; do not edit.",
        f"Versions: {versions}.",
        "",
        "Each family is built tiny (hidden 64, 8 experts, top-2, random weights, float32), with as many layers as it has kinds",
        "of layer (two at least), traced by `torch.compile`, split, and trained one step on virtual ranks in one process.",
        "The error is the largest relative one of the loss and of every gradient against eager PyTorch, with 1, 2, 3 and 4",
        "FFN ranks, under 1 or 2 attention ranks and 1 to 3 micro-batches. A family that is not split runs as a whole in one",
        "process.",
        "",
        f"{len(sharded)} of {len(reports)} families are split; the largest error is {worst:.0e}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in _row(report)) + " |" for report in reports
    ]
    return "\n".join(lines)
