"""Counters in buffers over several ranks: after a call they hold what eager counts on the whole batch."""

from __future__ import annotations

import pytest
import torch
from counting_models import CountingModel, count_on_ranks, counting_batch
from torch import Tensor

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import LanguageModel, Output, Sizes
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.testing.parity import Reference, assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, VirtualRun, capture_call, run_captured

# attention ranks, FFN ranks, groups, micro-batches
SHAPES = [
    (1, 1, 1, 1),
    (2, 2, 1, 2),
    (1, 3, 1, 2),
    (1, 1, 2, 3),
    pytest.param((2, 2, 2, 3), marks=pytest.mark.slow),
]
Case = tuple[CapturedCall, Reference, dict[str, torch.Tensor]]


def captured_case(recompute: bool) -> Case:
    """(captured call, eager's loss and gradients, eager's buffers). Eager without checkpoints: with them, its recomputation
    counts everything twice."""
    torch.manual_seed(0)
    model, twin = CountingModel(recompute), CountingModel()
    twin.load_state_dict(model.state_dict())
    batch = counting_batch(batch=12)
    return capture_call(model, batch), eager_reference(twin, **batch), dict(twin.named_buffers())


@pytest.fixture(scope="module")
def case() -> Case:
    return captured_case(recompute=False)


def run(call: CapturedCall, shape: tuple[int, int, int, int], **options: object) -> VirtualRun:
    attention, ffn, groups, n_microbatches = shape
    return run_captured(
        call,
        attention_group_size=attention,
        ffn_group_size=ffn,
        pipeline_groups=groups,
        n_microbatches=n_microbatches,
        **options,  # type: ignore[arg-type]
    )


def assert_same_buffers(found: VirtualRun, expected: dict[str, torch.Tensor]) -> None:
    written = {name: buffer for name, buffer in expected.items() if not name.endswith("bias")}
    assert found.buffers.keys() == written.keys()
    for name, buffer in written.items():
        torch.testing.assert_close(found.buffers[name], buffer, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("shape", SHAPES)
def test_buffers_loss_and_gradients_equal_eager(case, shape):
    call, reference, buffers = case
    found = run(call, shape)
    assert_parity(found.loss, found.gradients, reference)
    assert_same_buffers(found, buffers)


def test_a_checkpointed_layer_counts_its_tokens_once():
    call, reference, buffers = captured_case(recompute=True)
    found = run(call, (2, 2, 1, 2), stage_compiler="aot_eager")
    assert_parity(found.loss, found.gradients, reference)
    assert_same_buffers(found, buffers)


class Bincount(LanguageModel):
    """`bincount` has a size that only data tells, whatever its `minlength`."""

    def __init__(self) -> None:
        super().__init__(Sizes(n_layers=1), GatheredEinsum)
        self.register_buffer("seen", torch.zeros(self.embed.num_embeddings))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        n = self.embed.num_embeddings
        with torch.no_grad():
            self.seen.add_(torch.bincount(input_ids.flatten(), minlength=n)[:n].float())
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_counts_by_bincount_equal_eager(compiler):
    torch.manual_seed(0)
    model, twin = Bincount(), Bincount()
    twin.load_state_dict(model.state_dict())
    ids = torch.randint(3, 120, (8, 6), generator=torch.Generator().manual_seed(1))
    one = {"input_ids": ids, "labels": ids.clone()}
    reference = eager_reference(twin, **one)
    found = run(capture_call(model, one), (2, 2, 1, 2), stage_compiler=compiler)
    assert_parity(found.loss, found.gradients, reference)
    assert_same_buffers(found, dict(twin.named_buffers()))


def test_a_rank_whose_counts_are_lost_is_noticed(case):
    call, _, buffers = case

    def forget(workers):
        lost = next(w for w in workers if isinstance(w, AttentionWorker))
        begin = lost.begin

        def begin_and_count_nothing(step):
            begin(step)
            lost.buffer_sums.add = lambda *_, **__: None

        lost.begin = begin_and_count_nothing

    with pytest.raises(AssertionError, match=r"tokens_per_expert|seen|mass|calls"):
        assert_same_buffers(run(call, (2, 2, 1, 2), edit_workers=forget), buffers)


def test_every_rank_has_eagers_buffers_after_training_and_evaluation(pool):
    """Two steps, then a call that runs forward alone: later calls read what earlier ones counted."""
    expected = count_on_ranks(distributed=False)
    assert expected["seen"] > 0
    for found in pool.run(count_on_ranks, True, world_size=3, process_group=False, timeout_s=300):
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            torch.testing.assert_close(found[name], buffer, msg=lambda text, n=name: f"{n}: {text}")
