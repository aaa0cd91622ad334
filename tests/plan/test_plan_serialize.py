"""A plan file reads back equal, and a broken one names its key."""

import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan import Topology, dump, from_dict, load, to_dict
from disagmoe_compile.testing.plans import example_plan

PLAN = example_plan(Topology(2, 2, 2, 2, 2), 2)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.dictionaries(
        st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=3
    ),
)
def test_round_trip(m, p_a, p_f, n_microbatches, tied_head, training, options):
    plan = example_plan(Topology(m, 1, p_a, p_f, 2, tied_head), n_microbatches, training=training)
    plan = dataclasses.replace(plan, options=options)
    assert from_dict(json.loads(json.dumps(to_dict(plan)))) == plan


def test_file_round_trip_is_stable(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    dump(PLAN, first)
    plan = load(first)
    dump(plan, second)
    assert plan == PLAN
    assert first.read_bytes() == second.read_bytes()
    assert '"2SEND[dispatch.1]0"' in first.read_text()


def test_the_fingerprint_follows_the_content():
    assert PLAN.fingerprint == from_dict(to_dict(PLAN)).fingerprint
    assert PLAN.fingerprint != dataclasses.replace(PLAN, resident_limit=99).fingerprint


def test_a_plan_of_before_separate_parameters_has_none():
    document = to_dict(PLAN)
    for stage in document["stages"]:
        assert stage.pop("expert_of") == {}
    assert from_dict(document) == PLAN


def broken(change):
    document = copy.deepcopy(to_dict(PLAN))
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(colour=1), "plan.colour"),
        (lambda d: d.pop("workload"), "plan.workload"),
        (lambda d: d.update(schema_version=2), "schema_version 2"),
        (lambda d: d.pop("schema_version"), "schema_version"),
        (lambda d: d["topology"].update(ffn_groups=0), "plan.topology"),
        (lambda d: d["topology"].update(ffn_groups=True), "plan.topology.ffn_groups"),
        (lambda d: d["stages"][1].update(role="attention"), "plan.stages[1]"),
        (lambda d: d["stages"][1].update(extra=0), "plan.stages[1].extra"),
        (lambda d: d["transfers"][0].update(kind="teleport"), "plan.transfers[0].kind"),
        (lambda d: d["transfers"][0]["payload"][1].update(dtype="float7"), "plan.transfers[0].payload[1]"),
        (lambda d: d["training"]["actions"]["ffn.0"].insert(0, "1X0"), "plan.training.actions.ffn.0[0]"),
        (lambda d: d["training"]["actions"].update({"ffn": []}), "plan.training.actions"),
        (lambda d: d.update(stages=3), "plan.stages"),
        (lambda d: d["versions"].update(torch=2), "plan.versions.torch"),
        (lambda d: d["stages"][1].update(expert_of={"layers.0.experts": 99}), "plan.stages[1]"),
        (lambda d: d["stages"][1].update(expert_of={"other": 0}), "plan.stages[1]"),
        (lambda d: d["stages"][1].update(expert_of={"layers.0.experts": "0"}), "expert_of.layers.0.experts"),
    ],
)
def test_a_malformed_plan_is_an_error_that_names_the_key(change, named):
    with pytest.raises(PlanError) as caught:
        from_dict(broken(change))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("document", [None, [], "plan", 3])
def test_what_is_no_object_is_no_plan(document):
    with pytest.raises(PlanError):
        from_dict(document)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema_version": 1}', "\u0000"])
def test_a_file_that_is_no_plan_is_named(tmp_path, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load(path)


def test_options_that_json_cannot_hold_are_an_error(tmp_path):
    with pytest.raises(PlanError, match="JSON"):
        dump(dataclasses.replace(PLAN, options={"seed": object()}), tmp_path / "plan.json")
