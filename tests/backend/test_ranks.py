"""Real processes over gloo: an unmodified model trained by several ranks equals eager, and does nothing it should not.

Each world is run once; the tests of it look at what its ranks reported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from ranks import (
    Case,
    RankResult,
    batch,
    make_model,
    optimizer_of,
    swap_two_computations,
    train,
    train_twice,
)

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.serialize import dump
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.testing import relative_error

MAIN = Case(n_microbatches=4)
# every size of the contract, 2 and 4 micro-batches, in worlds of 3 and 4; the full product, of families of transformers, is slow
PAIRWISE = [
    MAIN,
    Case(family="gathered_einsum", attention=1, ffn=1, groups=2, n_microbatches=4, compiler="aot_eager"),
    Case(
        family="gathered_einsum", attention=1, ffn=2, n_microbatches=2, schedule="gpipe", compiler="aot_eager"
    ),
]
FULL = [
    Case(family=family, attention=m, ffn=n, groups=p, n_microbatches=k, compiler=compiler)
    for family in ("qwen3_moe", "gpt_oss")
    for m, n, p in [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]
    for k in (1, 2, 4)
    for compiler in ("eager", "aot_eager")
]


@pytest.fixture(scope="module")
def results(pool):
    @cache
    def of(case: Case) -> list[RankResult]:
        return pool.run(train, case, world_size=case.world_size, process_group=False, timeout_s=500)

    return of


@cache
def eager(case: Case) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, the last step's gradients, final parameters."""
    model = make_model(case)
    optimizer = optimizer_of(model)
    losses, gradients = [], {}
    for step in range(case.steps):
        loss = model(**batch(case, step)).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def assert_equals_eager(case: Case, ranks: list[RankResult]) -> None:
    losses, gradients, parameters = eager(case)
    covered: dict[str, int] = dict.fromkeys(parameters, 0)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses, rel=1e-5)
        assert set(rank.gradients) == set(rank.ranges) == set(rank.parameters)
        for name, rows in rank.ranges.items():
            part = slice(None) if rows is None else slice(*rows)
            assert relative_error(rank.gradients[name], gradients[name][part]) <= 1e-4, name
            assert relative_error(rank.parameters[name], parameters[name][part]) <= 1e-4, name
            covered[name] += rank.parameters[name].shape[0]
    assert all(covered[name] >= parameter.shape[0] for name, parameter in parameters.items())


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_losses_gradients_and_parameters_equal_eager(results, case):
    assert_equals_eager(case, results(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_losses_gradients_and_parameters_equal_eager_everywhere(results, case):
    assert_equals_eager(case, results(case))


def test_two_runs_are_bitwise_equal_with_dropout_that_does_something(pool):
    """Masks come from private generators, so a rerun draws the same; eager's own stream cannot be matched bit by bit."""
    model = {"n_layers": 1, "attention_dropout": 0.5}
    case = Case(attention=1, ffn=1, n_microbatches=2, steps=2, model=model)
    plain = eager(replace(case, model={"n_layers": 1}))[0]
    for first, second in pool.run(train_twice, case, world_size=2, process_group=False, timeout_s=500):
        assert first.losses == second.losses
        assert first.parameters.keys() == second.parameters.keys()
        assert all(torch.equal(first.parameters[n], second.parameters[n]) for n in first.parameters)
        assert first.losses[0] != pytest.approx(plain[0], rel=1e-5)
        assert first.losses[0] == pytest.approx(plain[0], rel=0.1)


def test_a_plan_edited_by_hand_changes_the_order_of_work_and_nothing_else(results, tmp_path):
    made = PAIRWISE[1]
    plan = results(made)[0].plan
    edited = swap_two_computations(plan)
    path = str(tmp_path / "plan.json")
    dump(edited, path)
    case = replace(made, steps=2, options={"plan": path})
    ranks = results(case)
    for rank, result in enumerate(ranks):
        group = plan.topology.group_of_rank(rank)
        expected = [str(action) for action in edited.training.of(group)]
        assert [event.action for event in result.events if event.step == 1] == expected
    assert edited.training.of(plan.topology.groups[0]) != plan.training.of(plan.topology.groups[0])
    assert_equals_eager(case, ranks)


def test_each_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(results):
    shapes = {n: p.shape for n, p in make_model(MAIN).named_parameters()}
    expert_bytes = sum(4 * shape.numel() for name, shape in shapes.items() if ".experts." in name)
    dense_bytes = sum(4 * shape.numel() for name, shape in shapes.items() if ".experts." not in name)
    for rank, result in enumerate(results(MAIN)):
        share = dense_bytes if rank < 2 else expert_bytes // 2
        assert result.parameter_bytes == pytest.approx(share, rel=0.05)
        assert result.gradient_bytes == pytest.approx(share, rel=0.05)
        assert result.optimizer_bytes == pytest.approx(2 * share, rel=0.05)


def routing_of_eager(case: Case, step: int) -> list[torch.Tensor]:
    """Expert ids [tokens, top-k] per layer, of the model as it is before `step`."""
    model = make_model(case)
    optimizer = optimizer_of(model)
    found: list[torch.Tensor] = []
    for earlier in range(step):
        model(**batch(case, earlier)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: found.append(output[-1]))
    model(**batch(case, step))
    return found


def test_an_ffn_rank_runs_exactly_the_rows_routed_to_it_and_an_attention_rank_none(results):
    routing = routing_of_eager(MAIN, MAIN.steps - 1)
    for rank, result in enumerate(results(MAIN)):
        if rank < 2:
            assert result.expert_rows == []
            assert not any(".experts." in name for name in result.ranges)
            continue
        mine = range(4 * (rank - 2), 4 * (rank - 1))
        pairs = sum(int(((ids >= mine.start) & (ids < mine.stop)).sum()) for ids in routing)
        # two projections forward, and their two input gradients backward
        assert sum(result.expert_rows) == 4 * pairs


def test_bytes_on_the_wire_equal_the_plans_count(results):
    ranks = results(MAIN)
    plan = ranks[0].plan
    sent = {t.name: sum(r.sent_bytes.get(t.name, 0) for r in ranks) for t in plan.transfers}
    expected = dict.fromkeys(sent, 0)
    size = plan.workload.microbatch_size
    for step in range(MAIN.steps):
        for boundary, ids in enumerate(routing_of_eager(MAIN, step)):
            per_sample = ids.view(MAIN.batch_size, MAIN.seq_length, -1)
            for first in range(0, MAIN.batch_size, size):
                tokens = per_sample[first : first + size].flatten(0, 1)
                for member in range(MAIN.ffn):
                    owned = (tokens // 4) == member
                    sizes = {"rows": int(owned.any(1).sum()), "pairs": int(owned.sum())}
                    for kind in ("dispatch", "combine", "combine_bwd", "dispatch_bwd"):
                        expected[f"{kind}.{boundary}"] += plan.transfer(f"{kind}.{boundary}").nbytes(sizes)
    for name in (n for n in expected if n.startswith("grads.")):
        expected[name] = MAIN.steps * MAIN.attention * plan.transfer(name).nbytes()
    assert sent == expected


def compute_events(result: RankResult, step: int) -> list[tuple[Action, float, float]]:
    return [
        (action, event.start, event.end)
        for event in result.events
        if event.step == step and not (action := Action.parse(event.action)).transfer and action.after is None
    ]


def forwards_interleave_with_backwards(result: RankResult, step: int) -> bool:
    """Some forward of a later micro-batch starts after the backward of an earlier one has begun and before it ends."""
    events = compute_events(result, step)
    backward = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    spans: dict[int, tuple[float, float]] = {}
    for action, start, end in events:
        if action.kind in backward:
            first, last = spans.get(action.microbatch, (start, end))
            spans[action.microbatch] = (min(first, start), max(last, end))
    return any(
        action.kind is ActionKind.FORWARD and action.microbatch > microbatch and first < start < last
        for action, start, _ in events
        for microbatch, (first, last) in spans.items()
    )


def test_af_pipe_runs_forwards_between_backwards_and_sends_beside_compute(results):
    for result in results(MAIN):
        assert forwards_interleave_with_backwards(result, step=2)
    overlapping = 0
    for result in results(MAIN):
        compute = compute_events(result, 2)
        sends = [e for e in result.events if e.step == 2 and "SEND" in e.action]
        overlapping += any(send.start < start < send.end for send in sends for _, start, _ in compute)
    assert overlapping == len(results(MAIN))


def test_gpipe_does_not_interleave(results):
    for result in results(PAIRWISE[-1]):
        assert not forwards_interleave_with_backwards(result, step=2)


@pytest.mark.parametrize("case", [MAIN, PAIRWISE[1]], ids=str)
def test_ranks_execute_the_actions_of_the_plan(results, case):
    for rank, result in enumerate(results(case)):
        plan = result.plan
        group = plan.topology.group_of_rank(rank)
        expected = [str(action) for action in plan.training.of(group)]
        for step in range(case.steps):
            assert [e.action for e in result.events if e.step == step] == expected
        assert (group.role is Role.FFN) == (
            rank >= plan.topology.attention_groups * plan.topology.attention_group_size
        )
