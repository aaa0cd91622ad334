"""Counts, order and memory of the compute-only schedules."""

from itertools import pairwise

import pytest

from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.forward_only import forward_only
from disagmoe_compile.passes.schedule.gpipe import gpipe
from disagmoe_compile.passes.schedule.order import interleaved
from disagmoe_compile.plan import ActionKind, Group, Role, Topology, peak_residency

A0, F0 = Group(Role.ATTENTION, 0), Group(Role.FFN, 0)
TOPOLOGY = Topology(2, 2, 2, 2, 4)


def texts(schedule, group):
    return [str(action) for action in schedule.of(group)]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("generate", [af_pipe, gpipe])
def test_every_stage_and_micro_batch_runs_once_each_way(generate, n):
    listed = [a for actions in generate(TOPOLOGY, n).actions.values() for a in actions]
    assert len(listed) == len(set(listed))
    counts = {kind: sum(a.kind is kind for a in listed) for kind in ActionKind}
    stages = TOPOLOGY.n_stages
    assert counts[ActionKind.FORWARD] == stages * n
    assert counts[ActionKind.BACKWARD] == n
    assert counts[ActionKind.BACKWARD_INPUT] == counts[ActionKind.BACKWARD_WEIGHT] == (stages - 1) * n


def test_without_the_split_every_backward_is_whole():
    listed = [
        a for actions in af_pipe(TOPOLOGY, 4, split_weight_gradient=False).actions.values() for a in actions
    ]
    assert {a.kind for a in listed} == {ActionKind.FORWARD, ActionKind.BACKWARD}
    assert len(listed) == 2 * TOPOLOGY.n_stages * 4


def test_forward_only_has_nothing_but_forwards():
    listed = [a for actions in forward_only(TOPOLOGY, 5).actions.values() for a in actions]
    assert {a.kind for a in listed} == {ActionKind.FORWARD} and len(listed) == TOPOLOGY.n_stages * 5


def test_every_group_runs_its_own_stages():
    for group, actions in af_pipe(TOPOLOGY, 3).actions.items():
        assert {TOPOLOGY.group_of_stage(a.stage) for a in actions} <= {group}


def test_forwards_of_a_round_alternate_with_backwards_of_the_round_before():
    schedule = af_pipe(Topology(1, 1, 1, 1, 1), 4, interleave=2, split_weight_gradient=False)
    assert " ".join(texts(schedule, A0)) == "0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3"
    assert " ".join(texts(schedule, F0)) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"


def test_gpipe_runs_all_forwards_before_any_backward():
    for group in TOPOLOGY.groups:
        kinds = [a.kind is ActionKind.FORWARD for a in gpipe(TOPOLOGY, 6).of(group)]
        assert kinds == sorted(kinds, reverse=True)


def test_the_weight_gradient_follows_its_input_gradient():
    for actions in af_pipe(TOPOLOGY, 4).actions.values():
        for one, other in pairwise(actions):
            if one.kind is ActionKind.BACKWARD_INPUT:
                assert (other.kind, other.stage, other.microbatch) == (
                    ActionKind.BACKWARD_WEIGHT, one.stage, one.microbatch,
                )  # fmt: skip


def overlapping_pairs(schedule):
    """Pairs of micro-batches i < j of which some forward of j comes between the first and the last backward of i on a group."""
    pairs = set()
    for actions in schedule.actions.values():
        backward = {}
        for position, a in enumerate(actions):
            if a.kind is not ActionKind.FORWARD:
                first, _ = backward.get(a.microbatch, (position, position))
                backward[a.microbatch] = (first, position)
        for position, a in enumerate(actions):
            if a.kind is ActionKind.FORWARD:
                pairs |= {
                    (i, a.microbatch)
                    for i, (x, y) in backward.items()
                    if i < a.microbatch and x < position < y
                }
    return pairs


def test_af_pipe_overlaps_later_forwards_with_earlier_backwards_and_gpipe_does_not():
    assert overlapping_pairs(af_pipe(TOPOLOGY, 8))
    assert not overlapping_pairs(gpipe(TOPOLOGY, 8))


def test_af_pipe_holds_a_bounded_number_of_activations():
    peaks = {n: peak_residency(af_pipe(TOPOLOGY, n, interleave=4)) for n in (16, 32, 64)}
    assert peaks[16] == peaks[32] == peaks[64]
    assert all(held <= 2 * 4 * len(TOPOLOGY.stages_of_group(g)) for g, held in peaks[64].items())
    assert peak_residency(gpipe(TOPOLOGY, 64))[A0] == 64 * len(TOPOLOGY.stages_of_group(A0))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_residency_of_an_attention_group_is_one_more_than_that_of_the_paper(p):
    """The paper counts 4L + 4p - 1 activations in order; rounds need one more (`order.py` says why), the head's among them."""
    layers = 28
    held = peak_residency(af_pipe(Topology(1, 1, p, p, layers), 64))
    assert held[A0] == max(held.values()) == (4 * layers + 4 * p - 1) + 1


def test_the_default_interleave_is_four_per_group_but_at_most_half():
    one = af_pipe(Topology(1, 1, 1, 1, 1), 64)
    assert one.actions == af_pipe(Topology(1, 1, 1, 1, 1), 64, interleave=4).actions
    assert af_pipe(TOPOLOGY, 64).actions == af_pipe(TOPOLOGY, 64, interleave=8).actions
    assert af_pipe(TOPOLOGY, 5).actions == af_pipe(TOPOLOGY, 5, interleave=3).actions
    assert af_pipe(TOPOLOGY, 1).actions == af_pipe(TOPOLOGY, 1, interleave=1).actions


@pytest.mark.parametrize(("n", "interleave"), [(7, 3), (1, 4), (9, 2)])
def test_the_serial_order_has_everything_after_what_it_needs(n, interleave):
    done = set()
    for forward, stage, i in interleaved(5, n, interleave):
        needed = [(True, stage - 1, i)] if forward else [(True, stage, i), (False, stage + 1, i)]
        assert all(x in done for x in needed if 0 <= x[1] < 5)
        done.add((forward, stage, i))
    assert len(done) == 2 * 5 * n


@pytest.mark.parametrize("arguments", [{"n_microbatches": 0}, {"n_microbatches": 2, "interleave": 0}])
def test_sizes_below_one_are_errors(arguments):
    for generate in (af_pipe, forward_only):
        with pytest.raises(ValueError, match="at least one"):
            generate(TOPOLOGY, **arguments)
