"""Pictures of a plan and of a sweep, as PNG or SVG. Needs matplotlib: `pip install matplotlib`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.sensitivity import Roof

_SUFFIXES = (".png", ".svg")
_COLOURS = {"attention": "tab:blue", "ffn": "tab:orange"}


def draw_rooflines(path: Path, *, title: str, before: Sequence[Roof], after: Sequence[Roof]) -> None:
    """Both roles on the roofs of their groups, before (an even split) and after allocation. FLOP/s of all GPUs of a role."""
    plt = _pyplot(path)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    finite = [r.intensity for r in (*before, *after) if r.intensity < float("inf")]
    ridges = [r.ridge for r in (*before, *after)]
    low, high = min([*finite, *ridges]) / 4, max([*finite, *ridges]) * 4
    for roofs, style, moment in ((before, "--", "even split"), (after, "-", "allocated")):
        for roof in roofs:
            colour = _COLOURS[roof.role]
            label = f"{roof.role}, {moment}"
            axes.plot(
                [low, roof.ridge, high],
                [roof.peak_flops * low / roof.ridge, roof.peak_flops, roof.peak_flops],
                style,
                color=colour,
                alpha=0.6,
                label=f"roof: {label}",
            )
            at = min(roof.intensity, high)
            attained = roof.peak_flops * min(1.0, at / roof.ridge)
            axes.plot(
                [at],
                [attained],
                "o",
                color=colour,
                fillstyle="none" if style == "--" else "full",
                label=label,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte sent through NICs",
        ylabel="FLOP/s of all its GPUs",
        title=title,
    )
    axes.legend(fontsize="x-small", ncols=2)
    _save(plt, figure, path)


def draw_sweep(path: Path, *, parameter: str, values: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
    """Tokens a second and the share of GPUs on attention over a swept parameter."""
    plt = _pyplot(path)
    figure, (speed, share) = plt.subplots(2, 1, sharex=True, figsize=(6, 5.5))
    speed.plot(values, [row["tokens_per_s"] for row in rows], "o-")
    speed.set(ylabel="tokens/s", xscale="log", ylim=(0, None))
    share.plot(values, [row["attention_gpus"] / row["world_size"] for row in rows], "o-")
    share.set(ylabel="share of GPUs on attention", xlabel=parameter, ylim=(0, 1), xticks=values)
    share.set_xticklabels([f"{value}" for value in values])
    share.minorticks_off()
    _save(plt, figure, path)


def check_drawable(path: Path) -> None:
    """Raises InputError where no picture can be drawn there, before a long computation."""
    _pyplot(path)


def _pyplot(path: Path) -> Any:
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"a picture is written as {' or '.join(_SUFFIXES)}, got {str(path)!r}")
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(f"pictures need matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"cannot write the picture {str(path)!r}: {error.strerror}") from error
    finally:
        plt.close(figure)
