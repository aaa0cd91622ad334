"""Where the ranks stand: who beats, who does not, and the table that says it."""

from __future__ import annotations

import logging

import pytest

from disagmoe_compile.runtime.pulse import Place, Pulse, log_places, silent_ranks
from disagmoe_compile.testing.plans import example_plan

PLACE = Place(5, "ffn.0", 4, "1F0")


def test_a_rank_without_a_beat_is_silent_unless_it_ended_by_an_error():
    before = {0: Pulse(7, False, None), 1: Pulse(7, False, PLACE), 2: Pulse(7, True, PLACE)}
    after = {**before, 0: Pulse(8, False, None), 3: Pulse(1, False, None)}
    assert silent_ranks(before, after) == [1]


def test_the_table_names_each_rank_s_action_and_marks_it_in_the_schedule(caplog: pytest.LogCaptureFixture):
    plan = example_plan()
    assert plan.training is not None
    group = plan.topology.groups[-1]
    action = plan.training.of(group)[4]
    here = Place(5, str(group), 4, str(action))
    with caplog.at_level(logging.ERROR):
        log_places({2: Pulse(3, False, here), 0: Pulse(9, False, None)}, [2], plan.training)
    assert f"rank 2: {action} of ffn.0 in step 5; gives no sign of life" in caplog.text
    assert "rank 0: before its first action; alive" in caplog.text
    assert f">> 4 {action}" in caplog.text
