"""Every world shape in one process, over the loopback mailbox: loss and every gradient equal eager. Each with what must fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disagmoe_compile.errors import DisagMoEError, InputError, PlanError
from disagmoe_compile.models.hf import build
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.runtime.expert_worker import ExpertWorker
from disagmoe_compile.testing.parity import Reference, assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, capture_call, run_captured

SHAPES = [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]
# (shape, micro-batches, schedule): every pair of values occurs; the full product is marked slow
PAIRWISE = [
    ((1, 1, 1), 1, "af_pipe"),
    ((2, 2, 1), 4, "af_pipe"),
    ((1, 2, 1), 2, "gpipe"),
    ((2, 1, 1), 2, "af_pipe"),
    ((1, 1, 2), 4, "gpipe"),
    ((2, 2, 2), 2, "af_pipe"),
    ((2, 2, 2), 1, "gpipe"),
    ((2, 1, 2), 4, "af_pipe_in_order"),
]


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def captured(request) -> tuple[CapturedCall, Reference]:
    model = build(request.param, seed=0)[0]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (8, 16), generator=generator)
    labels = ids.clone()
    for sample in range(8):  # micro-batches and ranks see 2 to 14 valid labels
        labels[sample, : 1 + (5 * sample) % 13] = -100
    batch = {"input_ids": ids, "labels": labels}
    return capture_call(model, batch), eager_reference(model, **batch)


def options(shape: tuple[int, int, int], n_microbatches: int, schedule: str = "af_pipe") -> dict[str, object]:
    attention, ffn, groups = shape
    return {
        "attention_group_size": attention,
        "ffn_group_size": ffn,
        "pipeline_groups": groups,
        "n_microbatches": n_microbatches,
        "schedule": schedule,
    }


@pytest.mark.parametrize(("shape", "n_microbatches", "schedule"), PAIRWISE)
def test_loss_and_gradients_equal_eager(captured, shape, n_microbatches, schedule):
    call, reference = captured
    run = run_captured(call, **options(shape, n_microbatches, schedule))
    assert_parity(run.loss, run.gradients, reference)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("schedule", ["af_pipe", "af_pipe_in_order", "gpipe"])
@pytest.mark.parametrize("n_microbatches", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_eager_everywhere(captured, shape, n_microbatches, schedule, compiler):
    call, reference = captured
    run = run_captured(call, **options(shape, n_microbatches, schedule), stage_compiler=compiler)
    assert_parity(run.loss, run.gradients, reference)


def test_ahead_of_time_stages_equal_eager(captured):
    call, reference = captured
    run = run_captured(call, **options((2, 2, 1), 2), stage_compiler="aot_eager")
    assert_parity(run.loss, run.gradients, reference)


def test_splitting_the_weight_gradient_changes_no_bit(captured):
    call, _ = captured

    def unsplit(plan):
        lists = {
            group: tuple(
                replace(action, kind=ActionKind.BACKWARD)
                if action.kind is ActionKind.BACKWARD_INPUT
                else replace(action, after=ActionKind.BACKWARD)
                if action.after is ActionKind.BACKWARD_INPUT
                else action
                for action in actions
                if action.kind is not ActionKind.BACKWARD_WEIGHT
            )
            for group, actions in plan.training.actions.items()
        }
        return replace(plan, training=replace(plan.training, actions=lists))

    split = run_captured(call, **options((2, 2, 1), 2), stage_compiler="aot_eager")
    whole = run_captured(call, **options((2, 2, 1), 2), stage_compiler="aot_eager", edit_plan=unsplit)
    executed = {event.action for executor in whole.executors for event in executor.events}
    assert "2B0" in executed and "2I0" not in executed
    assert all(torch.equal(split.gradients[name], whole.gradients[name]) for name in split.gradients)


def test_ranks_run_the_actions_of_the_plan_in_its_order(captured):
    call, _ = captured
    run = run_captured(call, **options((2, 2, 1), 2))
    for executor in run.executors:
        expected = [str(action) for action in run.plan.training.of(executor.worker.group)]
        assert [event.action for event in executor.events] == expected


def test_a_corrupted_expert_gradient_fails_parity(captured):
    call, reference = captured

    def corrupt(workers):
        worker = next(w for w in workers if isinstance(w, ExpertWorker))
        add = worker.add_gradient
        worker.add_gradient = lambda fqn, gradient: add(fqn, gradient * 1.01)

    run = run_captured(call, **options((2, 2, 1), 2), edit_workers=corrupt)
    with pytest.raises(AssertionError, match=r"gradients differ from eager: .*experts"):
        assert_parity(run.loss, run.gradients, reference)


def test_a_gradient_of_nan_fails_parity(captured):
    call, reference = captured
    run = run_captured(call, **options((1, 1, 1), 1))
    gradients = dict(run.gradients)
    name = next(iter(gradients))
    gradients[name] = torch.full_like(gradients[name], float("nan"))
    with pytest.raises(AssertionError, match="inf"):
        assert_parity(run.loss, gradients, reference)


def test_without_the_sum_over_replicas_gradients_fail_parity(captured):
    call, reference = captured

    def drop(plan):
        lists = {
            group: tuple(a for a in actions if a.kind is not ActionKind.REDUCE_GRAD)
            for group, actions in plan.training.actions.items()
        }
        return replace(plan, training=replace(plan.training, actions=lists))

    run = run_captured(call, **options((2, 2, 1), 2), edit_plan=drop)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_parity(run.loss, run.gradients, reference)


def test_a_schedule_that_cannot_finish_says_where_each_rank_stands(captured):
    call, _ = captured

    def without_first_dispatch(plan):
        """The sender's SEND, and its WAIT and FREE, which would fail before anybody waits in vain."""
        group = plan.topology.groups[0]
        actions = tuple(a for a in plan.training.of(group) if (a.transfer, a.stage) != ("dispatch.0", 0))
        return replace(
            plan, training=replace(plan.training, actions={**plan.training.actions, group: actions})
        )

    with pytest.raises(DisagMoEError, match=r"deadlocks: rank 0 at .*, rank 1 at 1WAIT\[dispatch\.0\]0"):
        run_captured(call, **options((1, 1, 1), 1), edit_plan=without_first_dispatch)


def test_more_ffn_ranks_than_experts_are_one_clear_error(captured):
    call, _ = captured
    with pytest.raises(InputError, match="more than the model's 8 experts"):
        run_captured(call, attention_group_size=1, ffn_group_size=9)


def test_an_invalid_plan_is_refused_with_every_violation(captured):
    from disagmoe_compile.plan.validate import check

    call, _ = captured
    plan = run_captured(call, **options((1, 1, 1), 1)).plan
    group = plan.topology.groups[0]
    actions = tuple(a for a in plan.training.of(group) if a.kind is not ActionKind.WAIT)
    broken = replace(plan, training=replace(plan.training, actions={**plan.training.actions, group: actions}))
    with pytest.raises(PlanError) as caught:
        check(broken)
    assert len(caught.value.violations) > 1
