"""A simulated step as a picture (groups x time) and as a trace for ui.perfetto.dev, under the names of the actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.inspect.timeline import row_name, rows_of
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.sharing import Number
from disagmoe_compile.simulator.timeline import Timeline

COLOURS = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "weight gradient": "#F0B070",
    "dispatch": "#009E73",
    "combine": "#CC79A7",
    "other messages": "#8C8C8C",
}
"""Okabe and Ito's palette, told apart with any colour vision; weight gradients a pale shade of backward."""
LANES = {"dispatch": (0.11, 0.1), "combine": (0.21, 0.1), "other messages": (0.31, 0.08)}
"""Where a group's row has its messages, from its middle, and how high: those to different groups are under way together."""


def kind_of(action: Action) -> str | None:
    """Which colour an action has; None for what is not drawn."""
    if action.kind is ActionKind.FORWARD or action.kind is ActionKind.OVERLAP:
        return "forward"
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return "backward"
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return "weight gradient"
    if action.kind is ActionKind.SEND and action.transfer is not None:
        name = action.transfer.split(".")[0].removesuffix("_bwd")
        return name if name in ("dispatch", "combine") else "other messages"
    return "other messages" if action.kind is ActionKind.REDUCE_GRAD else None


def draw(timeline: Timeline, path: Path, title: str, *, unit: str = "s") -> None:
    """One row a group: compute in its upper half, what it sends in the lower, by kind. Raises InputError without matplotlib or a
    folder.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"a picture is written as .png or .svg, got {str(path)!r}")
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(f"pictures need matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    groups = timeline.groups
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.7 * len(groups)))
    for row, group in enumerate(groups):
        bars: dict[str, list[tuple[float, float]]] = {name: [] for name in COLOURS}
        for action, start, end in timeline.events(group):
            name = kind_of(action)
            if action.kind is ActionKind.SEND and action.transfer and action.microbatch is not None:
                start = timeline.times.start[timeline.placed.message[action.transfer, action.microbatch]]
            if name is not None and end > start:
                bars[name].append((float(start), float(end - start)))
        for name, spans in bars.items():
            place, height = LANES.get(name, (-0.4, 0.5))
            axes.broken_barh(spans, (row + place, height), color=COLOURS[name])
    axes.set(
        yticks=range(len(groups)), yticklabels=[str(g) for g in groups], xlabel=f"time ({unit}), simulated"
    )
    axes.set_xlim(0, float(timeline.makespan))
    axes.invert_yaxis()
    axes.set_title(title)
    figure.legend(
        handles=[Patch(color=c, label=n) for n, c in COLOURS.items()],
        loc="lower center",
        ncols=6,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06 + 0.1 / len(groups), 1, 1))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"cannot write the picture {str(path)!r}: {error.strerror}") from error
    finally:
        plt.close(figure)


def trace(timelines: Mapping[str, Timeline], nbytes: Mapping[str, Number] | None = None) -> dict[str, Any]:
    """A Chrome trace: one process a system and group, the rows of a run's own timeline, slices under the names of the actions."""
    rows: list[dict[str, Any]] = []
    process = 0
    for system, timeline in timelines.items():
        for group in timeline.groups:
            meta = {"ph": "M", "pid": process, "tid": 0}
            rows.append({**meta, "name": "process_name", "args": {"name": f"{system} {group} (simulated)"}})
            used: set[int] = set()
            for row, event in rows_of(timeline.trace_events(group, nbytes)):
                used.add(row)
                args: dict[str, Any] = {"bytes": event.nbytes} if event.nbytes else {}
                start, end = round(event.start * 1e6, 3), round(event.end * 1e6, 3)
                rows.append(
                    {
                        "ph": "X",
                        "pid": process,
                        "tid": row,
                        "name": event.action,
                        "cat": event.stream,
                        "ts": start,
                        "dur": round(end - start, 3),  # of rounded ends: it never reaches into the next slice
                        "args": args,
                    }
                )
            for row in sorted(used):
                meta = {"ph": "M", "pid": process, "tid": row}
                rows.append({**meta, "name": "thread_name", "args": {"name": row_name(row)}})
                rows.append({**meta, "name": "thread_sort_index", "args": {"sort_index": row}})
            process += 1
    return {"displayTimeUnit": "ms", "otherData": {"simulated": True}, "traceEvents": rows}


def write_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Raises InputError where the file cannot be written."""
    try:
        path.write_text(json.dumps(trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the trace {str(path)!r}: {error.strerror}") from error
