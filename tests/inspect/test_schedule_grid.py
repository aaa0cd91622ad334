"""Slots of a schedule: nothing before what it waits for, and a table with one row a group and lane."""

from __future__ import annotations

import re

from disagmoe_compile.inspect.schedule_grid import Lane, place, schedule_text
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan

PLAN = example_plan(Topology(2, 1, 2, 2, 4))
PLACED = place(PLAN, PLAN.training)


def test_every_action_has_a_slot_and_keeps_its_order() -> None:
    for group, placed in PLACED.items():
        assert [one.action for one in placed] == list(PLAN.training.of(group))
        slots = [one.slot for one in placed]
        assert slots == sorted(slots)


def test_a_group_computes_one_thing_a_slot() -> None:
    for placed in PLACED.values():
        busy = [one.slot for one in placed if one.lane is Lane.COMPUTE]
        assert len(busy) == len(set(busy))


def test_a_message_arrives_a_slot_after_it_was_sent() -> None:
    every = [one for placed in PLACED.values() for one in placed]
    sent = {
        (one.action.transfer, one.action.microbatch): one.slot
        for one in every
        if one.action.kind is ActionKind.SEND
    }
    arrivals = [
        one
        for one in every
        if one.action.kind is ActionKind.WAIT
        and one.action.transfer
        and PLAN.transfer(one.action.transfer).dst == one.action.stage
    ]
    assert arrivals
    for one in arrivals:
        assert one.slot > sent[one.action.transfer, one.action.microbatch]


def test_the_table_names_ranks_groups_and_messages() -> None:
    text = schedule_text(PLAN, PLAN.training)
    table = text.partition("Every action, in order:")[0]
    assert re.search(r"^0-1 +attention\.0 +compute +0F0", table, re.MULTILINE)
    assert "D0.0+P0.0" in table and "C3'.0" in table
    assert max(map(len, table.splitlines())) <= 160
