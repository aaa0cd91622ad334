"""Losses are shared out over micro-batches exactly, or refused with advice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.graphs import (
    capture_model,
    loss_and_gradients,
    loss_position,
    relative_error,
    worst_error,
)
from disagmoe_compile.testing.programs import run_programs

CLASSES = 5


class Head(torch.nn.Module):
    """A linear layer under a given loss of (logits, labels, mask)."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, CLASSES)
        self.register_buffer("class_weights", torch.rand(CLASSES))
        self.loss = loss

    def forward(self, x, labels, mask):
        return self.loss(self, self.layer(x), labels, mask)


def batch():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (4, 7), generator=generator)
    labels[0] = -100
    labels[1, :3] = -100
    mask = (torch.rand(4, 7, generator=generator) > 0.3).float()
    return {"x": torch.randn(4, 7, 6, generator=generator), "labels": labels, "mask": mask}


def flat_ce(logits, labels, **kwargs):
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **kwargs)


def token_losses(logits, labels):
    return flat_ce(logits, labels, reduction="none").view(labels.shape)


LINEAR = {
    "mean": lambda m, logits, labels, mask: flat_ce(logits, labels),
    "sum": lambda m, logits, labels, mask: flat_ce(logits, labels, reduction="sum"),
    "smoothed": lambda m, logits, labels, mask: flat_ce(logits, labels, label_smoothing=0.1),
    "class weights": lambda m, logits, labels, mask: flat_ce(logits, labels, weight=m.class_weights),
    "nll": lambda m, logits, labels, mask: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "over a given number": lambda m, logits, labels, mask: flat_ce(logits, labels, reduction="sum") / 17,
    "over an input": lambda m, logits, labels, mask: flat_ce(logits, labels, reduction="sum") / mask.sum(),
    "times an input": lambda m, logits, labels, mask: flat_ce(logits, labels) * mask.mean(),
    "masked": lambda m, logits, labels, mask: (token_losses(logits, labels) * mask).sum() / mask.sum(),
    "mean of tokens": lambda m, logits, labels, mask: token_losses(logits, labels).mean(),
    "two terms": lambda m, logits, labels, mask: 0.5 * flat_ce(logits, labels) + 1e-2 * logits.pow(2).mean(),
    "z-loss": lambda m, logits, labels, mask: (
        flat_ce(logits, labels) + 1e-2 * torch.logsumexp(logits, dim=-1).square().mean()
    ),
    "difference": lambda m, logits, labels, mask: flat_ce(logits, labels) - logits.square().mean() / 3,
    "regression": lambda m, logits, labels, mask: F.mse_loss(logits.sum(-1), mask),
}


def errors(loss, n_microbatches, reduction="auto"):
    captured, args = capture_model(Head(loss), batch())
    position = loss_position(captured.graph_module(*args))
    expected = loss_and_gradients(captured.graph_module, args, position)
    programs = partition_model(captured, loss_reduction=reduction).programs

    def run(*flat):
        return run_programs(captured, programs, flat, n_microbatches)

    actual = loss_and_gradients(run, args, 0)
    return max(relative_error(actual[0], expected[0]), worst_error(actual[1], expected[1]))


@pytest.mark.parametrize("name", LINEAR)
def test_loss_over_two_microbatches_equals_the_whole_batch(name):
    assert errors(LINEAR[name], 2) < 1e-6


def test_mean_of_microbatch_means_would_be_wrong():
    """Negative control: with uneven labels, the answer of the word "mean" differs from the loss."""

    def opaque(m, logits, labels, mask):
        return flat_ce(logits, labels).square().sqrt()

    assert errors(opaque, 2, reduction="mean") > 1e-2


def test_user_says_how_an_unknown_loss_adds_up():
    def log_of_each_sample(m, logits, labels, mask):
        return torch.stack([logits.sigmoid().mean((1, 2))]).mean()

    assert errors(log_of_each_sample, 2, reduction="mean") < 1e-6


def test_unknown_loss_is_refused_with_advice():
    def product(m, logits, labels, mask):
        return flat_ce(logits, labels) * logits.mean()

    captured, _ = capture_model(Head(product), batch())
    with pytest.raises(UnsupportedModelError, match=r"test_loss_terms.py.*loss_reduction"):
        partition_model(captured)


def test_two_independent_losses_are_refused():
    def two(m, logits, labels, mask):
        return flat_ce(logits, labels), logits.square().mean()

    captured, _ = capture_model(Head(two), batch())
    with pytest.raises(UnsupportedModelError, match="2 independent scalars"):
        partition_model(captured)


def test_auxiliary_output_inside_the_loss_is_not_the_loss():
    def with_part(m, logits, labels, mask):
        part = logits.square().mean()
        return part, flat_ce(logits, labels) + 0.1 * part

    captured, _ = capture_model(Head(with_part), batch())
    loss = partition_model(captured).programs.loss
    assert loss is not None and loss.output_index == 1
    assert len(loss.coefficients) == 2


def test_evaluation_without_gradients_still_shares_out_the_loss():
    captured, args = capture_model(Head(LINEAR["mean"]), batch(), grad=False)
    programs = partition_model(captured).programs
    assert programs.loss is not None
    with torch.no_grad():
        loss, _ = run_programs(captured, programs, args, 2)
        assert relative_error(loss, captured.graph_module(*args)[0]) < 1e-6
