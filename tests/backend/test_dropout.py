"""Random numbers in training: equal between reruns, different between micro-batches, unbiased, and none inside an expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import Output, Sizes
from disagmoe_compile.testing.virtual import capture_call, run_captured

SAMPLES, LENGTH = 4, 6
PLAN = {"attention_group_size": 1, "ffn_group_size": 2, "n_microbatches": SAMPLES}


class Dropping(nn.Module):
    """Dropout on what is embedded and inside attention; every token of the batch is another one."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = Sizes(n_layers=1)
        self.p = p
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.moe = GatheredEinsum(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x_BSD = nn.functional.dropout(self.embed(input_ids), self.p, self.training)
        p = self.p if self.training else 0.0
        mixed_BSD = nn.functional.scaled_dot_product_attention(x_BSD, x_BSD, x_BSD, dropout_p=p)
        x_TD = (x_BSD + mixed_BSD).flatten(0, 1)
        logits = self.head(x_TD + self.moe(x_TD))
        return Output(nn.functional.cross_entropy(logits, labels.flatten()), logits)


def batch() -> dict[str, Tensor]:
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    return {"input_ids": ids, "labels": (ids * 7 + 5) % 128}


@pytest.fixture(scope="module")
def call():
    return capture_call(Dropping(), batch())


def test_reruns_of_one_call_are_bitwise_equal(call):
    first, second = (run_captured(call, **PLAN) for _ in range(2))
    assert first.loss == second.loss
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


def test_evaluation_between_steps_switches_dropout_off_and_training_on_again():
    """The mode of each call, also after a call in the other mode was compiled."""
    model = Dropping()
    losses = {}
    for mode in (True, False, True):
        model.train(mode)
        losses.setdefault(mode, []).append(run_captured(capture_call(model, batch()), **PLAN).loss)
    with torch.no_grad():
        eager = float(model.eval()(**batch()).loss)
    assert losses[False] == [pytest.approx(eager, rel=1e-5)]
    assert losses[True][0] == losses[True][1] != pytest.approx(eager, rel=1e-3)


def test_masks_differ_between_micro_batches(call):
    """A dropped feature of a token's embedding has no gradient."""
    dropped = run_captured(call, **PLAN).gradients["embed.weight"][: SAMPLES * LENGTH] == 0
    masks = dropped.view(SAMPLES, -1)
    assert 0.3 < masks.float().mean() < 0.7
    agreement = [(masks[i] == masks[j]).float().mean() for i in range(SAMPLES) for j in range(i)]
    assert max(agreement) < 0.7  # of independent masks: a half


def test_the_loss_is_near_eagers_in_the_mean(call):
    model = Dropping()
    with torch.no_grad():
        torch.manual_seed(1)
        eager = torch.stack([model(**batch()).loss for _ in range(50)])
    assert abs(run_captured(call, **PLAN).loss - eager.mean()) < 4 * eager.std()


def test_random_numbers_inside_an_expert_are_refused_by_line(monkeypatch):
    from disagmoe_compile.models.styles import gathered_einsum

    class Functional:
        silu = staticmethod(lambda h: nn.functional.dropout(nn.functional.silu(h), 0.5))
        __getattr__ = staticmethod(lambda name: getattr(nn.functional, name))

    monkeypatch.setattr(gathered_einsum, "F", Functional())
    partition = capture_call(Dropping(p=0.0), batch()).partition
    assert partition.programs.n_boundaries == 0
    reasons = dict(partition.reports)["find_regions"].skipped
    assert any("dropout" in reason and "random numbers" in reason and ".py:" in reason for reason in reasons)
