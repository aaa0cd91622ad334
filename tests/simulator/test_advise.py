"""Who wins where memory decides."""

from __future__ import annotations

import pytest

from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.simulator.advise import Verdict, summary


@pytest.mark.parametrize(
    ("fits", "rival_fits", "answer"),
    [
        (True, True, "Do not disaggregate: AF-Pipe is 50% slower"),
        (True, False, "Disaggregate: no rival fits"),
        (False, True, "Do not disaggregate: AF-Pipe, unlike a rival, never fits"),
    ],
)
def test_a_system_that_fits_beats_a_faster_one_that_does_not(
    fits: bool, rival_fits: bool, answer: str
) -> None:
    now = Verdict("as asked", -0.5, 1.0, "tutel", 2.0, fits, rival_fits)
    assert summary([now], find_cluster("h800")).startswith(answer)


def test_a_change_flips_the_answer_where_the_rival_stops_to_fit() -> None:
    now = Verdict("as asked", -0.5, 1.0, "tutel", 2.0)
    longer = Verdict("longer", -0.5, 1.0, "tutel", 2.0, rival_fits=False)
    assert summary([now, longer], find_cluster("h800")).endswith("The answer flips with: longer.")
