"""Operations that mix samples: named with their line, and each micro-batch computes what eager computes on that slice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models import styles
from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import LanguageModel, Sizes
from disagmoe_compile.testing.parity import Reference, assert_parity
from disagmoe_compile.testing.virtual import capture_call, run_captured

BATCH, LENGTH, SLICE = 8, 6, 2


class NormalisedOverTokens(GatheredEinsum):
    """Mean and variance over all tokens. The sum keeps the scale of what comes in, which has no gradient else."""

    def forward(self, tokens_TD: Tensor) -> Tensor:
        return super().forward(tokens_TD + F.batch_norm(tokens_TD, None, None, training=True))


def router_loss() -> nn.Module:
    pytest.importorskip("transformers")
    from disagmoe_compile.models import hf

    model, _ = hf.build("qwen3_moe", n_layers=1, output_router_logits=True, router_aux_loss_coef=0.1)
    ids = batch()["input_ids"]
    model(input_ids=ids)  # transformers installs its hooks at the first call, under a lock
    return model


COUPLED = {
    "batch_norm": lambda: LanguageModel(Sizes(n_layers=1), NormalisedOverTokens),
    "cumsum": lambda: styles.build("gshard", n_layers=1),
    "topk": lambda: styles.build("expert_choice", n_layers=1),
    "histc": router_loss,
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 120, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def eager_on_slices(model: nn.Module) -> Reference:
    """The mean over slices of two samples, as two ranks with two micro-batches each take them."""
    model.zero_grad()
    total = 0.0
    for first in range(0, BATCH, SLICE):
        loss = model(**{name: x[first : first + SLICE] for name, x in batch().items()}).loss
        (loss * SLICE / BATCH).backward()
        total += float(loss) * SLICE / BATCH
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Reference(total, gradients)


@pytest.mark.parametrize("operation", COUPLED)
def test_what_mixes_samples_is_named_and_equals_eager_on_each_slice(operation):
    torch.manual_seed(0)
    model = COUPLED[operation]()
    call = capture_call(model, batch(), loss_reduction="mean")
    assert any(f"`{operation}` (" in line and ".py:" in line for line in call.partition.batch_coupled)
    run = run_captured(call, attention_group_size=2, ffn_group_size=1, n_microbatches=2)
    assert_parity(run.loss, run.gradients, eager_on_slices(model))


def test_with_padding_a_routers_loss_is_that_of_each_slice_and_cross_entropy_that_of_the_batch():
    """Slices have between 5 and 10 valid labels: the mean over slices would weigh their cross entropies wrongly."""
    model = router_loss()
    is_token = torch.arange(LENGTH) >= torch.arange(BATCH)[:, None] % 4
    whole = batch() | {"attention_mask": is_token.long()}
    whole["labels"] = whole["labels"].where(is_token, -100)
    n_valid = (whole["labels"][:, 1:] != -100).sum()
    run = run_captured(
        capture_call(model, whole, loss_reduction="mean"),
        attention_group_size=2,
        ffn_group_size=1,
        n_microbatches=2,
    )
    model.zero_grad()
    total = torch.zeros(())
    for first in range(0, BATCH, SLICE):
        one = {name: x[first : first + SLICE] for name, x in whole.items()}
        output = model(**one)
        auxiliary = 0.1 * output.aux_loss
        share = (one["labels"][:, 1:] != -100).sum() / n_valid
        total = total + (output.loss - auxiliary) * share + auxiliary * SLICE / BATCH
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert_parity(run.loss, run.gradients, Reference(float(total.detach()), gradients))


def test_a_softmax_over_as_many_keys_as_there_are_samples_mixes_nothing():
    ids = torch.randint(3, 120, (LENGTH, LENGTH), generator=torch.Generator().manual_seed(1))
    call = capture_call(
        LanguageModel(Sizes(n_layers=1), GatheredEinsum), {"input_ids": ids, "labels": ids.clone()}
    )
    assert call.partition.batch_coupled == ()
