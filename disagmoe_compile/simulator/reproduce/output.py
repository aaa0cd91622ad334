"""A figure as CSV, text and plot."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

from disagmoe_compile.errors import InputError
from disagmoe_compile.simulator.reproduce.rows import Figure, Row

_COLUMNS = ("what", "series", "x", "ours", "paper", "verdict", "reason")


def write(figure: Figure, folder: Path) -> list[Path]:
    """NAME.csv, NAME.txt and, where matplotlib is installed, NAME.png. Raises InputError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table, text = folder / f"{figure.name}.csv", folder / f"{figure.name}.txt"
        with table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(row.to_dict() for row in figure.rows)
        text.write_text(as_text(figure), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {str(folder)!r}: {error.strerror}") from error
    picture = _draw(figure, folder / f"{figure.name}.png")
    return [table, text, *([picture] if picture else [])]


def as_text(figure: Figure) -> str:
    lines = [f"{figure.name}: {figure.title} (simulated, not measured)"]
    for row in figure.rows:
        ours = f"{'-':>12}" if math.isnan(row.ours) else f"{row.ours:>12.4g}"
        paper = "" if row.paper is None else f"  paper {row.paper:.4g}"
        verdict = f"  {row.verdict}" if paper or row.too_large else ""
        reason = f"  ({row.why_not})" if row.why_not else ""
        lines.append(f"  {row.what:<48} {ours}{paper}{verdict}{reason}")
    return "\n".join([*lines, *(f"  note: {note}" for note in figure.notes)]) + "\n"


def _draw(figure: Figure, path: Path) -> Path | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series: defaultdict[str, list[Row]] = defaultdict(list)
    for row in figure.rows:
        series[row.series].append(row)
    drawing, axes = plt.subplots(figsize=(8, 5))
    for name, rows in series.items():
        (line,) = axes.plot([r.x for r in rows], [r.ours for r in rows], "o-", label=name)
        known = [r for r in rows if r.paper is not None]
        if known:
            label = f"{name}, paper"
            axes.plot(
                [r.x for r in known], [r.paper for r in known], "x", color=line.get_color(), label=label
            )
    axes.set(title=f"{figure.title} (simulated)", xlabel=figure.x_label, ylabel=figure.y_label)
    axes.legend(fontsize="x-small")
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
    plt.close(drawing)
    return path
