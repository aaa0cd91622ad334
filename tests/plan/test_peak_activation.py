"""The plan's figure of what a rank keeps for backwards."""

from __future__ import annotations

from dataclasses import replace

from disagmoe_compile.plan.completeness import peak_activation_bytes, peak_residency
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.testing.plans import example_plan


def test_an_attention_rank_keeps_each_activation_and_an_ffn_rank_its_share() -> None:
    plan = example_plan(Topology(2, 2, 1, 1, 2))
    plan = replace(plan, stages=tuple(replace(stage, activation_bytes=10) for stage in plan.stages))
    assert plan.training is not None
    attention, ffn = plan.topology.groups
    held = peak_residency(plan.training)
    assert peak_activation_bytes(plan) == {attention: 10 * held[attention], ffn: 10 * held[ffn] / 2}


def test_a_plan_without_training_keeps_nothing() -> None:
    plan = replace(example_plan(Topology(1, 1, 1, 1, 1)), training=None)
    assert set(peak_activation_bytes(plan).values()) == {0}
