"""What M2N sends, and in which type: the numbers stay, or stay within what the type can hold, and the bytes are the plan's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from disagmoe_compile.config import Options
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.hf import build
from disagmoe_compile.plan.ir import Plan, TransferKind
from disagmoe_compile.runtime.buffers import Buffers
from disagmoe_compile.runtime.transport.loopback import LoopbackTransport, run_all
from disagmoe_compile.simulator.plan_program import message_bytes
from disagmoe_compile.testing.parity import Reference, assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, VirtualRun, capture_call, run_captured

BATCH, LENGTH = 8, 16
WORLD = {"attention_group_size": 2, "ffn_group_size": 2, "n_microbatches": 2}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 250, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def captured() -> tuple[CapturedCall, Reference]:
    model = build("qwen3_moe", seed=0)[0]
    return capture_call(model, batch()), eager_reference(model, **batch())


class _Rounded(torch.autograd.Function):
    """To a shorter type and back, forward and backward: what a row goes through between two ranks."""

    @staticmethod
    def forward(ctx, rows, dtype):
        ctx.dtype = dtype
        return rows.to(dtype).to(rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype).to(gradient.dtype), None


class _ExpertsBehindAWire(nn.Module):
    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts, self.dtype = experts, dtype

    def forward(self, tokens, *routing):
        return _Rounded.apply(self.experts(_Rounded.apply(tokens, self.dtype), *routing), self.dtype)


def eager_with_rounded_rows(dtype: torch.dtype) -> Reference:
    model = build("qwen3_moe", seed=0)[0]
    for layer in model.model.layers:
        layer.mlp.experts = _ExpertsBehindAWire(layer.mlp.experts, dtype)
    reference = eager_reference(model, **batch())
    gradients = {name.replace(".experts.experts.", ".experts."): g for name, g in reference.gradients.items()}
    return Reference(reference.loss, gradients)


def sent_bytes(run: VirtualRun) -> dict[str, int]:
    names = [t.name for t in run.plan.transfers if t.kind is not TransferKind.COLLECTIVE]
    return {name: sum(e.sent_bytes.get(name, 0) for e in run.executors) for name in names}


def expected_bytes(plan: Plan) -> dict[str, float]:
    """As the simulator prices them: of a step, on random routing."""
    n = plan.workload.n_microbatches
    moved = [t for t in plan.transfers if t.kind is not TransferKind.COLLECTIVE]
    return {t.name: n * message_bytes(plan, t) for t in moved}


def test_a_row_for_every_pair_equals_eager(captured):
    call, reference = captured
    run = run_captured(call, **WORLD, dedup="none")
    assert_parity(run.loss, run.gradients, reference)


def test_short_rows_on_one_ffn_rank_are_eager_with_rounded_rows(captured):
    """One rank returns the whole sum, so eager can make the very same casts; eager without them is the control."""
    call, plain = captured
    rounded = eager_with_rounded_rows(torch.bfloat16)
    one_ffn_rank = {"attention_group_size": 1, "ffn_group_size": 1, "n_microbatches": 1}
    run = run_captured(call, **one_ffn_rank, payload_dtype="bfloat16")
    assert_parity(run.loss, run.gradients, rounded)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_parity(run.loss, run.gradients, plain)


@pytest.mark.parametrize(
    ("dtype", "dedup", "tolerance"), [("bfloat16", "none", 1e-2), ("float16", "rank", 1e-3)]
)
def test_short_rows_cost_no_more_than_their_type_and_the_bytes_that_the_plan_says(
    captured, dtype, dedup, tolerance
):
    call, plain = captured
    run = run_captured(call, **WORLD, payload_dtype=dtype, dedup=dedup)
    assert_parity(run.loss, run.gradients, plain, gradient_tolerance=tolerance)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_parity(run.loss, run.gradients, plain)
    sent, expected = sent_bytes(run), expected_bytes(run.plan)
    assert sent == pytest.approx(expected, rel=0.05)
    as_computed = run_captured(call, **WORLD)
    assert sum(sent.values()) != pytest.approx(sum(sent_bytes(as_computed).values()), rel=0.2)


def test_routing_weights_keep_their_type(captured):
    call, _ = captured
    plan = run_captured(call, **WORLD, payload_dtype="bfloat16").plan
    types = {spec.name: spec.dtype for t in plan.transfers for spec in t.payload}
    rows = ("tokens", "combined", "d_combined", "d_tokens")
    assert {types[name] for name in rows} == {"bfloat16"}
    assert (types["weights"], types["d_weights"]) == ("float32", "float32")


def test_nothing_reads_a_message_after_its_buffer_was_given_back(captured, monkeypatch):
    """Buffers are overwritten with NaN when they are free; two groups of each kind, for residuals between groups."""
    call, reference = captured
    give, given = Buffers.give, []

    def poison(buffers, buffer):
        given.append(buffer.fill_(255).numel())
        give(buffers, buffer)

    monkeypatch.setattr(Buffers, "give", poison)
    run = run_captured(call, **WORLD, pipeline_groups=2, stage_compiler="aot_eager")
    assert len(given) > 50
    allocated = sum(executor.worker.transport.buffers.allocated for executor in run.executors)
    assert allocated < len(given), "later messages use the memory of earlier ones"
    assert_parity(run.loss, run.gradients, reference)


@pytest.mark.parametrize("pipeline_groups", [1, 2])
def test_memory_of_messages_does_not_grow_with_micro_batches_or_steps(captured, pipeline_groups):
    """With twice as many messages of half the size no more buffers; a second step needs no other."""
    call, _ = captured
    world = {
        **WORLD,
        "pipeline_groups": pipeline_groups,
        "attention_group_size": 1,
        "microbatches_in_flight": 2,
    }
    allocated = []
    for n in (4, 8):
        run = run_captured(call, **world | {"n_microbatches": n})
        buffers = [executor.worker.transport.buffers for executor in run.executors]
        once = [one.allocated for one in buffers]
        run_again(run)
        assert [one.allocated for one in buffers] == once
        allocated.append(sum(once))
    assert allocated[1] <= allocated[0]


def run_again(run: VirtualRun) -> None:
    """The same step once more."""
    for executor in run.executors:
        seeds = executor.worker.seeds
        executor.begin(executor.worker.step)
        executor.worker.seeds = seeds
    assert run.plan.training is not None
    transport = run.executors[0].worker.transport
    assert isinstance(transport, LoopbackTransport)
    lists = [run.plan.training.actions[executor.worker.group] for executor in run.executors]
    run_all(run.executors, transport._mailbox, lists)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dedup": "node"}, "dedup='node' is not supported by this version"),
        ({"payload_dtype": "int8"}, "payload_dtype must be one of bfloat16, float16, float32"),
        ({"recompute": "layer"}, "recompute must be one of none, stage, attention, ffn"),
    ],
)
def test_what_is_not_run_is_refused_in_one_line(option, message):
    with pytest.raises(InputError, match=message):
        Options.from_mapping(option)
