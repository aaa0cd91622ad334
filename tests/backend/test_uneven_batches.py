"""Batches that do not divide by attention ranks x micro-batches, down to one sample; virtual ranks equal eager in every world."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import LanguageModel, Sizes
from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.testing.parity import Reference, assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, VirtualRun, capture_call, run_captured

# 8 experts on 3 FFN ranks; M and N of which neither divides the other; more attention ranks than samples
WORLDS = [((1, 1, 1), 2), ((2, 2, 1), 3), ((1, 3, 1), 2), ((3, 2, 1), 2), ((1, 1, 2), 3), ((2, 2, 2), 2)]
BATCHES = [7, 3, 1]
PAIRWISE = [(*world, BATCHES[i % 3]) for i, world in enumerate(WORLDS)]
FULL = [(*world, batch) for world in WORLDS for batch in (8, *BATCHES)]


@cache
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Sizes(n_layers=2, hidden=16, expert_hidden=12), GatheredEinsum)


def tokens(batch: int, length: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(batch))
    labels = ids.clone()
    for sample in range(batch):
        labels[sample, : sample % (length - 1)] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def captured(batch: int, length: int = 8) -> tuple[CapturedCall, Reference]:
    return capture_call(model(), tokens(batch, length)), eager_reference(model(), **tokens(batch, length))


@cache
def captured_without_loss(batch: int) -> CapturedCall:
    return capture_call(model(), {"input_ids": tokens(batch)["input_ids"]})


def run(call: CapturedCall, world: tuple[int, int, int], n_microbatches: int, **others: object) -> VirtualRun:
    attention, ffn, groups = world
    return run_captured(
        call,
        attention_group_size=attention,
        ffn_group_size=ffn,
        pipeline_groups=groups,
        n_microbatches=n_microbatches,
        **others,
    )


@pytest.mark.parametrize(("world", "n_microbatches", "batch"), PAIRWISE)
def test_loss_and_gradients_equal_eager(world, n_microbatches, batch):
    call, reference = captured(batch)
    found = run(call, world, n_microbatches)
    assert_parity(found.loss, found.gradients, reference)


@pytest.mark.slow
def test_inductor_compiles_stages_for_both_sizes_of_a_micro_batch():
    call, expected = captured(7)
    found = run(call, (2, 2, 1), 2, stage_compiler="inductor")
    assert {len(found.plan.samples_of(rank, one)) for rank in range(2) for one in range(2)} == {1, 2}
    assert_parity(found.loss, found.gradients, expected)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_rank_without_samples_has_zeros_where_the_others_have_gradients(compiler):
    call, reference = captured(1)
    workers = []
    found = run(call, (3, 2, 1), 2, stage_compiler=compiler, edit_workers=workers.extend)
    assert_parity(found.loss, found.gradients, reference)
    first, second, _ = (worker for worker in workers if isinstance(worker, AttentionWorker))
    assert list(second.samples(0)) == [] and not second.numerators
    assert first.gradients.keys() == second.gradients.keys()
    assert any(float(gradient.norm()) > 0 for gradient in second.gradients.values())  # summed over replicas


def test_one_sample_of_one_token_equals_eager():
    ids = torch.tensor([[5]])
    call = capture_call(model(), {"input_ids": ids})
    found = run(call, (2, 2, 1), 2, outside=lambda flat: logits_of(flat).square().mean())
    model().zero_grad()
    loss = model()(ids).logits.square().mean()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model().named_parameters() if p.grad is not None}
    model().zero_grad()
    assert_parity(found.loss, found.gradients, Reference(loss.item(), gradients))


def logits_of(flat: list[Tensor | None]) -> Tensor:
    return next(one for one in flat if one is not None)


def outside(flat: list[Tensor | None], labels: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(flat)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("batch", [8, 7, 1])
@pytest.mark.parametrize(("world", "n_microbatches"), WORLDS)
def test_a_loss_outside_the_model_equals_eager(world, n_microbatches, batch):
    labels = tokens(batch)["labels"]
    reference = captured(batch)[1]
    found = run(
        captured_without_loss(batch), world, n_microbatches, outside=lambda flat: outside(flat, labels)
    )
    assert found.plan.training.name == "two_phase"
    assert_parity(found.loss, found.gradients, reference)


def test_samples_in_the_place_of_others_fail_parity(monkeypatch):
    """Negative control: each rank takes its gradients from the other end of the batch."""
    from disagmoe_compile.runtime.worker import OutputGradient

    of_samples = OutputGradient.of_samples

    def mirrored(one: OutputGradient, samples: range, batch_size: int) -> Tensor | None:
        return of_samples(one, range(batch_size - samples.stop, batch_size - samples.start), batch_size)

    monkeypatch.setattr(OutputGradient, "of_samples", mirrored)
    labels, reference = tokens(7)["labels"], captured(7)[1]
    found = run(captured_without_loss(7), (1, 1, 1), 7, outside=lambda flat: outside(flat, labels))
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_parity(found.loss, found.gradients, reference)


def test_an_input_gets_the_gradient_of_all_ranks():
    class Embedded(LanguageModel):
        def forward(self, x_BSD: Tensor, labels: Tensor) -> Tensor:
            for block in self.blocks:
                x_BSD = block(x_BSD)
            logits = self.head(self.norm(x_BSD))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    embedded = Embedded(Sizes(n_layers=1, hidden=16, expert_hidden=12), GatheredEinsum)
    x_BSD = torch.randn(5, 8, 16, requires_grad=True)
    labels = tokens(5)["labels"]
    embedded(x_BSD, labels).backward()
    call = capture_call(embedded, {"x_BSD": x_BSD, "labels": labels})
    found = run(call, (2, 2, 1), 2)
    (gradient,) = found.input_gradients.values()
    torch.testing.assert_close(gradient, x_BSD.grad, rtol=1e-4, atol=1e-7)
