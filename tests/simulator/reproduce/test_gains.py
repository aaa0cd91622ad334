"""What does not fit in memory is compared with nothing, and shown as such."""

from __future__ import annotations

import math

import pytest

from disagmoe_compile.simulator.reproduce import figures
from disagmoe_compile.simulator.reproduce.gains import gain_over, largest
from disagmoe_compile.simulator.reproduce.output import as_text
from disagmoe_compile.simulator.reproduce.rows import Figure, Row
from disagmoe_compile.simulator.reproduce.setting import Outcome


def _found(**systems: tuple[float, bool]) -> dict[str, Outcome]:
    return {name: Outcome(speed, 1 / speed, fits, {}) for name, (speed, fits) in systems.items()}


def test_figures_compare_only_what_fits() -> None:
    found = _found(af_pipe=(3.0, True), tutel=(4.0, False), comet=(2.0, True))
    some, none = gain_over(found, ("tutel", "comet")), gain_over(found, ("tutel",))
    assert (some.gain, some.too_large) == (1.5, ())
    assert math.isnan(none.gain) and none.too_large == ("tutel",)
    assert largest([none, some]) == some


def test_af_pipe_that_does_not_fit_gains_nothing() -> None:
    gain = gain_over(_found(af_pipe=(3.0, False), comet=(2.0, True)), ("comet",))
    assert math.isnan(gain.gain) and gain.too_large == ("af_pipe",)


def test_a_row_about_what_does_not_fit_says_so_and_is_not_judged() -> None:
    row = Row("gain", "gain", 0, math.nan, 1.5, 1.0, "costs differ", ("tutel",))
    text = as_text(Figure("fig0", "A figure", "x", "y", [row]))
    assert "out of memory  (does not fit in memory: tutel)" in text
    assert row.to_dict()["ours"] is None and row.to_dict()["verdict"] == "out of memory"
    with pytest.raises(ValueError, match="no system of it lacks memory"):
        Row("gain", "gain", 0, math.nan)


@pytest.mark.parametrize("make", [figures.fig11, figures.dedup])
def test_a_rival_that_does_not_fit_is_compared_with_nothing(
    make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = _found(
        af_pipe=(3.0, True),
        megatron_1f1b=(1.0, True),
        tutel=(4.0, False),
        comet=(2.0, True),
        dualpipe=(2.0, True),
    )
    monkeypatch.setattr(figures, "simulated", lambda system, *_: speeds[system])
    rows = make.__wrapped__().rows  # type: ignore[attr-defined]
    compared = [row for row in rows if ("tutel" in row.what) and not row.what.startswith("exposed")]
    assert compared and all(math.isnan(row.ours) and row.too_large == ("tutel",) for row in compared)
    assert any(row.verdict != "out of memory" for row in rows)
