"""`disagmoe_compile.simulate`: plans of sizes and of actions, from objects and files, with the cost models that fit them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import disagmoe_compile as dm
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.plan.action import COMPUTE_KINDS
from disagmoe_compile.plan.serialize import dump
from disagmoe_compile.plan.sizing import Sizing, dump_sizing
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.sizing_problem import TrainingWorkload
from disagmoe_compile.planner.step_costs import model_costs
from disagmoe_compile.simulator.plan_program import Durations
from disagmoe_compile.testing.plans import example_plan


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    whole = find_model("DeepSeek-MoE-16B")
    return replace(whole, name="first five layers", layers=whole.layers[:5])


@pytest.fixture(scope="module")
def sizing(spec: ModelSpec) -> Sizing:
    workload = TrainingWorkload(1024, sequences_per_gpu=2, micro_batch_size=1)
    return dm.plan(spec, "h800", workload, alternatives=0, pipeline_groups=1)


def test_sizes_are_simulated_with_the_model_and_cluster_that_the_plan_recorded(
    sizing: Sizing, spec: ModelSpec, tmp_path: Path
) -> None:
    dump_sizing(sizing, tmp_path / "plan.json")
    recorded = dm.simulate(tmp_path / "plan.json")
    assert recorded.makespan == dm.simulate(sizing).makespan
    assert recorded.makespan == dm.simulate(sizing, model_costs(spec, seq_length=1024)).makespan
    assert recorded.makespan == pytest.approx(sizing.step_s, rel=0.3)


def test_other_costs_of_the_model_are_another_step(sizing: Sizing, spec: ModelSpec) -> None:
    longer = model_costs(replace(spec, vocab=4 * spec.vocab), seq_length=1024)  # the head sets the pace
    assert dm.simulate(sizing, longer).makespan > 1.2 * dm.simulate(sizing).makespan


def test_actions_take_the_durations_that_are_given(tmp_path: Path) -> None:
    plan = example_plan(Topology(1, 1, 1, 1, 2))
    assert plan.training is not None
    seconds = {
        (a.kind, a.stage): 2.0
        for listed in plan.training.actions.values()
        for a in listed
        if a.kind in COMPUTE_KINDS
    }
    dump(plan, tmp_path / "plan.json")
    once = dm.simulate(plan, Durations(seconds, {}))
    twice = dm.simulate(tmp_path / "plan.json", Durations({k: 2 * s for k, s in seconds.items()}, {}))
    assert twice.makespan == 2 * once.makespan > 0


def test_a_faster_cluster_is_a_shorter_step() -> None:
    plan = example_plan(Topology(1, 1, 1, 1, 2))
    assert dm.simulate(plan, find_cluster("h800")).makespan < dm.simulate(plan).makespan


@pytest.mark.parametrize(
    ("of_sizes", "cost_model", "message"),
    [(True, find_cluster("h800"), "takes ModelCosts"), (False, None, "takes a Cluster or Durations")],
)
def test_a_cost_model_of_the_other_kind_of_plan_is_refused(
    of_sizes: bool, cost_model: Any, message: str, sizing: Sizing, spec: ModelSpec
) -> None:
    plan: Any = sizing if of_sizes else example_plan(Topology(1, 1, 1, 1, 2))
    with pytest.raises(InputError, match=message):
        dm.simulate(plan, cost_model or model_costs(spec, seq_length=1024))
