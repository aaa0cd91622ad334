"""Each rule has a plan that breaks it and nothing else."""

import dataclasses

import pytest

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.plan import Action, Group, Plan, Role, Topology, check, overlap, validate
from disagmoe_compile.plan.violation import RULES, Violation
from disagmoe_compile.testing.plans import example_plan

A0, F0 = Group(Role.ATTENTION, 0), Group(Role.FFN, 0)
PLAN = example_plan(Topology(2, 2, 1, 1, 2), 2)
ROOMY = dataclasses.replace(PLAN, resident_limit=PLAN.resident_limit + 1)
TWO_GROUPS = example_plan(Topology(2, 2, 2, 2, 2), 2)


def parse(*texts: str) -> list[Action]:
    return [Action.parse(text) for text in texts]


def with_list(plan: Plan, group: Group, actions: list[Action]) -> Plan:
    schedule = dataclasses.replace(plan.training, actions={**plan.training.actions, group: tuple(actions)})
    return dataclasses.replace(plan, training=schedule)


def without(plan: Plan, group: Group, text: str) -> Plan:
    actions = list(plan.training.of(group))
    actions.remove(Action.parse(text))
    return with_list(plan, group, actions)


def moved(
    plan: Plan, group: Group, text: str, *, before: str | None = None, after: str | None = None
) -> Plan:
    """The action `text` taken out and put next to another."""
    actions = list(plan.training.of(group))
    actions.remove(Action.parse(text))
    at = actions.index(Action.parse(before or after)) + (after is not None)
    return with_list(plan, group, [*actions[:at], Action.parse(text), *actions[at:]])


def pulled(plan: Plan, group: Group, texts: list[str], before: str) -> Plan:
    """The actions `texts` taken out and put in front of another."""
    actions = [a for a in plan.training.of(group) if str(a) not in texts]
    at = actions.index(Action.parse(before))
    return with_list(plan, group, [*actions[:at], *parse(*texts), *actions[at:]])


def with_stage(plan: Plan, index: int, **changes) -> Plan:
    stages = [dataclasses.replace(s, **changes) if s.index == index else s for s in plan.stages]
    return dataclasses.replace(plan, stages=tuple(stages))


def with_transfer(plan: Plan, found: str, /, **changes) -> Plan:
    transfers = [dataclasses.replace(t, **changes) if t.name == found else t for t in plan.transfers]
    return dataclasses.replace(plan, transfers=tuple(transfers))


def rules(plan: Plan) -> list[str]:
    return sorted({violation.rule for violation in validate(plan)})


def on_a_foreign_group() -> Plan:
    free = "1FREE[dispatch.0]0"
    plan = without(PLAN, F0, free)
    return with_list(plan, A0, [*plan.training.of(A0), *parse(free)])


BROKEN = {
    "stages": dataclasses.replace(PLAN, stages=PLAN.stages[::-1]),
    "transfers": with_transfer(PLAN, "combine_bwd.0", backward_of="combine.1"),
    "workload": dataclasses.replace(PLAN, workload=dataclasses.replace(PLAN.workload, global_batch_size=5)),
    "experts": with_stage(PLAN, 1, num_experts=1),
    "lowered": dataclasses.replace(PLAN, training=af_pipe(PLAN.topology, 2)),
    "placement": on_a_foreign_group(),
    "completeness": without(PLAN, A0, "2F1"),
    "matching": without(PLAN, A0, "0SEND[dispatch.0]1"),
    "wait": without(PLAN, A0, "0WAIT[dispatch.0]0@comm_send"),
    "free": moved(PLAN, A0, "2FREE[combine.0]0", before="2F0"),
    "size-order": moved(PLAN, A0, "2RECV[combine.0]0", before="0SEND[dispatch.0]0"),
    "order": moved(PLAN, A0, "2W0", before="2I0"),
    "reduce-grad": without(PLAN, A0, "0REDUCE_GRAD[grads.0]"),
    "memory": dataclasses.replace(PLAN, resident_limit=PLAN.resident_limit - 1),
    "deadlock": pulled(PLAN, F0, ["1RECV[dispatch.0]1", "1WAIT[dispatch.0]1"], before="1F0"),
    "race": without(PLAN, A0, "0WAIT[F]0@comm_send"),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_broken_by_one_change_which_is_reported_and_nothing_else_is(rule):
    assert rules(BROKEN[rule]) == [rule]


@pytest.mark.parametrize("rule", ["placement", "free", "size-order", "order", "deadlock", "race"])
def test_an_error_of_a_schedule_marks_its_step_in_the_grid_of_all_groups(rule):
    with pytest.raises(PlanError) as caught:
        check(BROKEN[rule])
    violation = next(one for one in validate(BROKEN[rule]) if one.position is not None)
    (note,) = caught.value.__notes__
    head, *rows = note.splitlines()[1:]
    assert head.split() == ["attention.0", "ffn.0"]
    action = BROKEN[rule].training.of(violation.group)[violation.position]
    assert any(f">> {violation.position} {action}" in row for row in rows)
    assert all(len(row) < 130 for row in rows) and 7 <= len(rows) <= 13


def test_a_violation_of_no_known_rule_cannot_be_made():
    with pytest.raises(ValueError, match="'tidiness' is no rule of a plan; there are stages, transfers"):
        Violation("tidiness", "the plan is untidy")


@pytest.mark.parametrize("plan", [PLAN, TWO_GROUPS])
def test_examples_keep_every_rule(plan):
    assert validate(plan) == []
    check(plan)


def test_a_parameter_has_one_owner():
    plan = with_stage(PLAN, 2, param_fqns=("layers.0.attention",), owned_fqns=("layers.0.attention",))
    assert rules(plan) == ["stages"]


def test_a_parameter_is_not_shared_across_groups():
    assert rules(with_stage(TWO_GROUPS, 4, param_fqns=("layers.2.attention", "layers.0.attention"))) == []
    plan = with_stage(TWO_GROUPS, 2, param_fqns=("layers.1.attention", "layers.0.attention"))
    assert rules(plan) == ["stages"]


def test_transfers_join_the_right_stages():
    assert "transfers" in rules(with_transfer(PLAN, "combine.0", src=0, dst=2))


def test_backward_mirrors_a_forward_transfer():
    assert rules(with_transfer(PLAN, "combine_bwd.0", backward_of="combine.1")) == ["transfers"]


def test_transfer_names_are_unique():
    assert "transfers" in rules(with_transfer(PLAN, "combine.1", name="combine.0"))


@pytest.mark.parametrize("name", ["dispatch.0", "combine_bwd.1", "residual.0", "grads.2"])
def test_a_missing_transfer_is_reported(name):
    transfers = tuple(t for t in TWO_GROUPS.transfers if t.name != name)
    assert rules(dataclasses.replace(TWO_GROUPS, transfers=transfers)) == ["transfers"]


def test_a_residual_inside_one_group_is_reported():
    residual = TWO_GROUPS.transfer("residual.0")
    assert rules(dataclasses.replace(PLAN, transfers=(*PLAN.transfers, residual))) == ["transfers"]


def test_a_schedule_for_other_groups_is_reported():
    schedule = dataclasses.replace(PLAN.training, actions={A0: PLAN.training.of(A0)})
    assert rules(dataclasses.replace(PLAN, training=schedule)) == ["lowered"]


@pytest.mark.parametrize(
    "text", ["0FREE[nothing.0]0", "9WAIT[F]0", "0WAIT[F]7", "0FREE[dispatch.1]0", "0SEND[grads.0]0"]
)
def test_an_action_names_what_the_plan_has(text):
    plan = with_list(PLAN, A0, [*PLAN.training.of(A0), *parse(text)])
    found = validate(plan)
    assert ("placement", A0, len(PLAN.training.of(A0))) in [(v.rule, v.group, v.position) for v in found]


@pytest.mark.parametrize("text", ["2F1", "2I0", "2W1", "0B0"])
def test_a_missing_compute_action_is_incomplete(text):
    assert rules(without(PLAN, A0, text)) == ["completeness"]


def test_backward_is_whole_or_split_but_not_both():
    actions = list(PLAN.training.of(A0))
    actions.insert(actions.index(Action.parse("2I0")), Action.parse("2B0"))
    assert rules(with_list(PLAN, A0, actions)) == ["completeness"]


def test_stage_zero_has_no_input_gradient():
    plan = without(PLAN, A0, "0B0")
    actions = list(plan.training.of(A0))
    at = actions.index(Action.parse("0WAIT[dispatch_bwd.0]0@backward")) + 1
    assert rules(with_list(plan, A0, [*actions[:at], *parse("0I0", "0W0"), *actions[at:]])) == [
        "completeness"
    ]


@pytest.mark.parametrize("text", ["0SEND[dispatch.0]1", "2RECV[combine.0]0", "2SEND[combine_bwd.0]0"])
def test_a_message_needs_both_ends(text):
    assert rules(without(PLAN, A0, text)) == ["matching"]


def test_a_message_is_sent_once():
    plan = with_list(PLAN, A0, [*PLAN.training.of(A0), *parse("0SEND[dispatch.0]1")])
    assert rules(plan) == ["matching"]


def test_a_send_buffer_is_waited_for_before_it_is_freed():
    assert rules(without(PLAN, A0, "0WAIT[dispatch.0]0@comm_send")) == ["wait"]


def test_a_value_is_waited_for_before_its_use():
    assert rules(moved(PLAN, A0, "2F0", before="2WAIT[combine.0]0")) == ["wait"]


def test_a_wait_comes_after_its_receive():
    assert rules(moved(PLAN, A0, "4WAIT[combine.1]0", before="4RECV[combine.1]0")) == ["wait"]


def test_an_event_is_waited_for_after_it_is_recorded():
    plan = with_list(PLAN, A0, [*parse("4WAIT[F]1@backward"), *PLAN.training.of(A0)])
    assert rules(plan) == ["wait"]


def test_an_event_that_is_never_recorded_is_reported():
    plan = with_list(PLAN, A0, [*PLAN.training.of(A0), *parse("2WAIT[B]1@backward")])
    assert rules(plan) == ["wait"]


@pytest.mark.parametrize("text", ["2FREE[combine.0]0", "0FREE[dispatch.0]1@comm_send"])
def test_what_is_received_or_sent_is_freed(text):
    assert rules(without(PLAN, A0, text)) == ["free"]


def test_nothing_is_freed_twice():
    plan = with_list(PLAN, A0, [*PLAN.training.of(A0), *parse("2FREE[combine.0]0")])
    assert rules(plan) == ["free"]


@pytest.mark.parametrize(
    ("plan", "group", "receive", "source"),
    [
        (PLAN, A0, "2RECV[combine.0]0", "0SEND[dispatch.0]0"),
        (PLAN, A0, "0RECV[dispatch_bwd.0]0", "0SEND[dispatch.0]0"),
        (PLAN, F0, "1RECV[combine_bwd.0]0", "1WAIT[dispatch.0]0"),
        (TWO_GROUPS, Group(Role.ATTENTION, 1), "2RECV[combine.0]0", "2WAIT[residual.0]0"),
    ],
)
def test_a_receive_is_posted_only_once_its_sizes_are_known(plan, group, receive, source):
    assert rules(moved(plan, group, receive, before=source)) == ["size-order"]


def test_a_send_comes_after_its_compute():
    assert rules(moved(PLAN, A0, "0F0", after="0SEND[dispatch.0]0")) in (["order", "wait"], ["order"])


def test_parts_of_an_overlap_do_not_depend_on_each_other():
    actions = list(PLAN.training.of(A0))
    at = actions.index(Action.parse("2I0"))
    actions.remove(Action.parse("2W0"))
    actions[at] = overlap(*parse("2I0", "2W0"))
    assert rules(with_list(PLAN, A0, actions)) == ["order"]


def test_an_overlap_of_independent_parts_is_valid():
    actions = list(PLAN.training.of(A0))
    first, second = Action.parse("4W0"), Action.parse("2I0")
    actions.remove(first)
    actions[actions.index(second)] = overlap(first, second)
    assert rules(with_list(ROOMY, A0, actions)) == []


def test_a_delayed_weight_gradient_is_valid():
    assert rules(moved(ROOMY, A0, "4W0", before="4W1")) == []


def test_gradients_are_reduced_once():
    assert rules(without(PLAN, A0, "0REDUCE_GRAD[grads.0]")) == ["reduce-grad"]
    plan = with_list(PLAN, A0, [*PLAN.training.of(A0), *parse("0REDUCE_GRAD[grads.0]")])
    assert rules(plan) == ["reduce-grad"]


def test_gradients_are_reduced_after_the_last_of_them():
    assert rules(moved(PLAN, A0, "2REDUCE_GRAD[grads.2]", before="2W1")) == ["reduce-grad"]


def test_a_tied_parameter_is_reduced_after_the_gradient_of_the_head():
    plan = example_plan(Topology(2, 1, 1, 1, 1, tied_head=True), 1)
    assert rules(moved(plan, A0, "2W0", after="0REDUCE_GRAD[grads.0]")) == ["reduce-grad"]


def test_groups_that_wait_for_each_other_deadlock():
    """The FFN group wants micro-batch 1 before it returns 0; attention sends 1 only after 0 came back."""
    plan = pulled(PLAN, F0, ["1RECV[dispatch.0]1", "1WAIT[dispatch.0]1"], before="1F0")
    found = validate(plan)
    assert {v.rule for v in found} == {"deadlock"}
    assert "1WAIT[dispatch.0]1" in found[0].message and "2WAIT[combine.0]0" in found[0].message
    marked = [line for line in found[0].detail.splitlines() if ">>" in line]
    assert any("1WAIT[dispatch.0]1" in line for line in marked)


def test_a_send_buffer_must_not_be_waited_for_before_its_receive_can_be_posted():
    """The FFN group takes the header of dispatch.1 of 0 before that of dispatch.0 of 1: so the latter's payload is not posted
    before the former is sent, and attention, waiting for it first, would wait for itself.
    """
    early = ["0F1", "0WAIT[F]1@comm_send", "0SEND[dispatch.0]1"]
    sent_early = pulled(ROOMY, A0, early, before="2SEND[dispatch.1]0")
    assert rules(sent_early) == []
    waited_early = pulled(ROOMY, A0, [*early, "0WAIT[dispatch.0]1@comm_send"], before="2SEND[dispatch.1]0")
    assert rules(waited_early) == ["deadlock"]


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (A0, "0WAIT[F]0@comm_send"),
        (A0, "2WAIT[I]1@comm_send"),
        (A0, "4WAIT[F]0@backward"),
        (F0, "1WAIT[I]0@comm_send"),
    ],
)
def test_streams_without_a_wait_race(group, text):
    assert rules(without(PLAN, group, text)) == ["race"]


def test_a_wait_on_the_wrong_stream_is_a_race():
    actions = list(PLAN.training.of(A0))
    at = actions.index(Action.parse("2WAIT[combine.0]0"))
    actions[at] = Action.parse("2WAIT[combine.0]0@comm_recv")
    assert "race" in rules(with_list(PLAN, A0, actions))


def test_check_lists_every_violation_and_keeps_its_message_to_one_line():
    plan = without(without(PLAN, A0, "2FREE[combine.0]0"), A0, "0REDUCE_GRAD[grads.0]")
    with pytest.raises(PlanError) as caught:
        check(plan)
    assert len(caught.value.violations) == 2 == len(validate(plan))
    assert "\n" not in str(caught.value)
    assert "2FREE[combine.0]0" in str(caught.value) and "stage 0" in str(caught.value)


def test_the_forward_only_schedule_is_validated_too():
    actions = PLAN.forward_only.actions
    schedule = dataclasses.replace(PLAN.forward_only, actions={**actions, F0: actions[F0][1:]})
    found = validate(dataclasses.replace(PLAN, forward_only=schedule))
    assert {v.rule for v in found} == {"matching"} and "forward_only" in found[0].message
