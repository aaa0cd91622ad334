"""What lowering adds, and where it puts it."""

import pytest

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.lower import lower
from disagmoe_compile.plan import Action, ActionKind, Group, Role, Schedule, Topology
from disagmoe_compile.testing.plans import example_plan

A0, A1, F0 = Group(Role.ATTENTION, 0), Group(Role.ATTENTION, 1), Group(Role.FFN, 0)


def lists(topology, n, **options):
    plan = example_plan(topology, n, **options)
    return {group: [str(a) for a in actions] for group, actions in plan.training.actions.items()}


def test_one_micro_batch_through_one_boundary():
    """The whole lowered text of the smallest pipeline."""
    found = lists(Topology(2, 1, 1, 1, 1), 1, receive_ahead=0)
    assert found[A0] == [
        "0F0", "0WAIT[F]0@comm_send", "0SEND[dispatch.0]0",
        "2RECV[combine.0]0", "2WAIT[combine.0]0", "2F0", "2FREE[combine.0]0",
        "0WAIT[dispatch.0]0@comm_send", "0FREE[dispatch.0]0@comm_send",
        "2WAIT[F]0@backward", "2I0", "2WAIT[I]0@comm_send", "2SEND[combine_bwd.0]0", "2W0", "2REDUCE_GRAD[grads.2]",
        "0RECV[dispatch_bwd.0]0", "0WAIT[dispatch_bwd.0]0@backward", "0B0", "0FREE[dispatch_bwd.0]0@backward",
        "0REDUCE_GRAD[grads.0]", "2WAIT[combine_bwd.0]0@comm_send", "2FREE[combine_bwd.0]0@comm_send",
    ]  # fmt: skip
    assert found[F0] == [
        "1RECV[dispatch.0]0", "1WAIT[dispatch.0]0", "1F0", "1FREE[dispatch.0]0", "1WAIT[F]0@comm_send", "1SEND[combine.0]0",
        "1RECV[combine_bwd.0]0", "1WAIT[combine_bwd.0]0@backward", "1I0", "1FREE[combine_bwd.0]0@backward",
        "1WAIT[I]0@comm_send", "1SEND[dispatch_bwd.0]0", "1WAIT[combine.0]0@comm_send", "1FREE[combine.0]0@comm_send",
        "1W0", "1WAIT[dispatch_bwd.0]0@comm_send", "1FREE[dispatch_bwd.0]0@comm_send",
    ]  # fmt: skip


@pytest.mark.parametrize(("topology", "n"), [(Topology(1, 1, 1, 1, 3), 4), (Topology(2, 2, 2, 2, 3), 4)])
def test_every_message_adds_six_actions(topology, n):
    """RECV, WAIT, FREE; SEND, WAIT, FREE on the sender; and one event WAIT for each compute action that sends."""
    plan = example_plan(topology, n)
    boundaries = topology.n_boundaries
    messages = n * sum(t.kind != "collective" for t in plan.transfers)
    compute = n * (2 + 3 * (topology.n_stages - 1))
    senders = n * 2 * (topology.n_stages - 1)
    reductions = sum(t.kind == "collective" for t in plan.transfers)
    heads = n
    assert len([t for t in plan.transfers if t.kind != "collective"]) in (4 * boundaries, 6 * boundaries)
    assert (
        sum(map(len, plan.training.actions.values())) == 6 * messages + compute + senders + reductions + heads
    )


def test_residuals_move_only_between_groups():
    one, two = lists(Topology(1, 1, 1, 1, 2), 2), lists(Topology(1, 1, 2, 1, 2), 2)
    assert not any("residual" in text for text in one[A0])
    listed = two[A1]
    assert listed.index("2WAIT[residual.0]0") < listed.index("2RECV[combine.0]0") < listed.index("2F0")
    assert "2SEND[residual_bwd.0]0" in listed and "2SEND[residual.1]0" in listed


def computes_between(listed, first, second):
    actions = [Action.parse(text) for text in listed]
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    return sum(a.kind in kinds for a in actions[listed.index(first) : listed.index(second)])


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_receives_are_posted_ahead(ahead):
    listed = lists(Topology(1, 1, 1, 1, 1), 8, receive_ahead=ahead)[F0]
    assert computes_between(listed, "1RECV[dispatch.0]3", "1WAIT[dispatch.0]3") == min(ahead, 3)
    assert computes_between(listed, "1RECV[dispatch.0]7", "1WAIT[dispatch.0]7") == ahead


def test_receives_are_never_posted_above_what_fixes_their_sizes():
    for topology in (Topology(1, 1, 1, 1, 2), Topology(1, 1, 2, 2, 2)):
        found = lists(topology, 6, receive_ahead=50)
        for listed in found.values():
            place = {text: k for k, text in enumerate(listed)}
            for i in range(6):
                for first, second in (
                    (
                        f"0SEND[dispatch.0]{i}",
                        f"2RECV[combine.0]{i}" if topology.attention_groups == 1 else None,
                    ),
                    (f"2WAIT[residual.0]{i}", f"2RECV[combine.0]{i}"),
                    (f"1WAIT[dispatch.0]{i}", f"1RECV[combine_bwd.0]{i}"),
                    (f"0SEND[dispatch.0]{i}", f"0RECV[dispatch_bwd.0]{i}"),
                ):
                    if first in place and second in place:
                        assert place[first] < place[second]


def test_dispatches_are_received_in_the_order_of_their_use():
    listed = lists(Topology(1, 1, 1, 1, 3), 5, receive_ahead=3)[F0]
    received = [text.replace("RECV", "WAIT") for text in listed if "RECV[dispatch." in text]
    assert received == [text for text in listed if "WAIT[dispatch." in text]


def test_gradients_are_reduced_right_after_the_last_of_them():
    listed = lists(Topology(2, 1, 1, 1, 2), 3)[A0]
    for stage, last in ((4, "4W2"), (2, "2W2"), (0, "0FREE[dispatch_bwd.0]2@backward")):
        assert listed.index(f"{stage}REDUCE_GRAD[grads.{stage}]") == listed.index(last) + 1


def test_nothing_is_reduced_without_replicas():
    assert not any("REDUCE" in text for text in lists(Topology(1, 2, 1, 1, 2), 3)[A0])


def test_a_send_buffer_is_given_back_before_the_end_where_a_reply_proves_its_receive():
    listed = lists(Topology(1, 1, 1, 1, 1), 4)[A0]
    assert listed.index("2WAIT[combine.0]0") < listed.index("0WAIT[dispatch.0]0@comm_send") < len(listed) // 2


def test_forward_only_waits_for_its_sends_too():
    plan = example_plan(Topology(1, 1, 1, 1, 1), 2)
    listed = [str(a) for a in plan.forward_only.of(F0)]
    assert listed[-1] == "1FREE[combine.0]1@comm_send"
    assert not any("bwd" in text for text in listed)


def test_what_is_lowered_is_not_lowered_again():
    plan = example_plan()
    with pytest.raises(PlanError, match="lowered already"):
        lower(plan.training, plan.topology, plan.transfers, owned_stages=[])


def test_a_schedule_for_other_groups_is_an_error():
    plan = example_plan()
    with pytest.raises(PlanError, match="groups"):
        lower(af_pipe(Topology(1, 1, 2, 1, 2), 2), plan.topology, plan.transfers, owned_stages=[])


def test_an_order_that_cannot_run_is_an_error():
    """Attention wants the combine of 1 before it starts 0, the experts the other way round."""
    plan = example_plan(Topology(1, 1, 1, 1, 1), 2, training=False)
    orders = {A0: "0F1 2F1 0F0 2F0", F0: "1F0 1F1"}
    actions = {group: tuple(map(Action.parse, text.split())) for group, text in orders.items()}
    with pytest.raises(PlanError, match="wait for each other"):
        lower(Schedule("twisted", False, actions), plan.topology, plan.transfers, owned_stages=[])
