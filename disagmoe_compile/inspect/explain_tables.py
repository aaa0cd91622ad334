"""An Explanation for people: tables of stages, transfers and experts."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

from disagmoe_compile.inspect.bisect import Bisection
from disagmoe_compile.inspect.diff import PassDiff
from disagmoe_compile.inspect.explain import Explanation, TensorInfo

_TEXT_WIDTH = 120
_CHANGES_SHOWN = 12


def as_text(explanation: Explanation) -> str:
    """Plain text, for `print(dm.explain(model, ...))`."""
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH)
    for part in renderables(explanation):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


def renderables(explanation: Explanation) -> Iterator[RenderableType]:
    """The parts of the explanation in the order of reading."""
    for one in explanation.graph_breaks:
        yield f"graph break at {one.where}: {one.reason}"
    if explanation.stages:
        yield _stages(explanation)
        yield _interfaces(explanation)
    if explanation.transfers:
        yield _transfers(explanation)
    yield _experts(explanation)
    for operation in explanation.batch_coupled:
        yield f"mixes samples, so micro-batches compute something else than the whole batch: {operation}"


def _stages(explanation: Explanation) -> Table:
    table = _table(
        "Stages", "stage", "role", "layers", "operations", "forward MFLOPs", "parameters", "parameter bytes"
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for stage in explanation.stages:
        table.add_row(
            stage.name,
            stage.role,
            ",".join(map(str, stage.layers)) or "-",
            str(stage.nodes),
            f"{stage.forward_flops / 1e6:,.2f}",
            str(len(stage.params)),
            f"{stage.param_bytes:,}",
        )
    return table


def _interfaces(explanation: Explanation) -> Table:
    table = _table("What enters and leaves", "stage", "inputs", "outputs")
    for stage in explanation.stages:
        table.add_row(stage.name, _tensors(stage.inputs), _tensors(stage.outputs))
    return table


def _transfers(explanation: Explanation) -> Table:
    table = _table("Transfers", "transfer", "from", "to", "bytes a token", "tensors", "sent")
    for transfer in explanation.transfers:
        table.add_row(
            transfer.name,
            transfer.src,
            transfer.dst,
            f"{transfer.bytes_per_token:,}",
            ", ".join(transfer.tensors),
            "p > 1" if transfer.several_groups_only else "always",
        )
    return table


def _experts(explanation: Explanation) -> RenderableType:
    if not explanation.experts:
        return "no MoE region found"
    table = _table("Experts", "layer", "style", "experts", "top-k", "opaque, because")
    for expert in explanation.experts:
        cells = (expert.layer, expert.style, expert.num_experts, expert.top_k)
        table.add_row(*("-" if cell is None else str(cell) for cell in cells), expert.reason or "")
    return table


def pass_table(diffs: Sequence[PassDiff]) -> Table:
    """What each pass matched, skipped with the reason, and changed."""
    table = _table("Passes", "pass", "operations", "matched", "changed", "skipped and notes")
    for diff in diffs:
        added = [f"+{count} {name}" for name, count in diff.added.items()]
        removed = [f"-{count} {name}" for name, count in diff.removed.items()]
        table.add_row(
            f"{diff.index:02d} {diff.name}",
            str(diff.operations),
            str(diff.report.matched),
            "\n".join(_some(added + removed)) or "-",
            "\n".join([*diff.report.skipped, *diff.report.notes]) or "-",
        )
    return table


def _some(changes: list[str]) -> list[str]:
    if len(changes) <= _CHANGES_SHOWN:
        return changes
    return [*changes[:_CHANGES_SHOWN], f"and {len(changes) - _CHANGES_SHOWN} more"]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a name cut short cannot be typed
    return table


def _tensors(tensors: tuple[TensorInfo, ...]) -> str:
    return "\n".join(f"{t.name} {_short(t.dtype)}{list(t.shape)}" for t in tensors)


def _short(dtype: str) -> str:
    """`f32` for `float32`, as in the dumps."""
    return dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "i")


def bisection_table(bisection: Bisection) -> Table:
    table = _table("Parity with the captured graph", "after pass", "largest relative error", "of", "verdict")
    for one in bisection.passes:
        table.add_row(one.name, f"{one.error:.1e}", one.where, "broken" if one.is_broken else "kept")
    return table
