"""A loss that rules misread is caught by numbers: refused, never silently scaled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_loss_terms import Head, batch, errors, flat_ce, token_losses

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.testing.graphs import capture_model

DOES_NOT_ADD_UP = {
    "normaliser inside the sum": lambda m, x, y, k: (token_losses(x, y) * k / k.sum()).sum(),
    "count inside the sum": lambda m, x, y, k: (token_losses(x, y) / (y != -100).sum()).sum(),
    "batch size inside the sum": lambda m, x, y, k: (token_losses(x, y) / x.shape[0]).sum(),
    "term without samples": lambda m, x, y, k: (
        flat_ce(x, y) + F.cross_entropy(m.layer.weight[:, :5], torch.arange(5), reduction="sum")
    ),
    "weighted regression": lambda m, x, y, k: F.mse_loss(x.sum(-1), k, weight=k + 1),
    "contrastive": lambda m, x, y, k: F.cross_entropy(x.mean(1) @ x.mean(1).t(), torch.arange(x.shape[0])),
    "neighbouring samples": lambda m, x, y, k: (x * torch.roll(x, 1, 0)).mean(),
    "pairs of samples": lambda m, x, y, k: (x[1:] * x[:-1]).mean(),
    "normalised over the batch": lambda m, x, y, k: (
        token_losses(x, y).sum(1) * (k.sum(1) - k.sum(1).mean()) / k.sum(1).std()
    ).mean(),
    "halves of the batch": lambda m, x, y, k: (
        -F.logsigmoid(torch.sub(*token_losses(x, y).sum(1).chunk(2))).mean()
    ),
}


@pytest.mark.parametrize("name", DOES_NOT_ADD_UP)
def test_a_loss_that_is_not_a_sum_over_samples_is_refused(name):
    captured, _ = capture_model(Head(DOES_NOT_ADD_UP[name]), batch())
    with pytest.raises(UnsupportedModelError, match=r"does not add up over samples|cannot be shared out"):
        partition_model(captured)


def test_a_loss_of_per_sample_means_is_exact():
    def loss(m, x, y, k):
        return ((token_losses(x, y) * k).sum(1) / k.sum(1)).mean()

    assert errors(loss, 2) < 1e-5


def test_predictions_that_depend_on_other_samples_are_named_and_their_loss_still_adds_up():
    def centred(m, x, y, k):
        return flat_ce(x - x.mean(0, keepdim=True), y)

    captured, _ = capture_model(Head(centred), batch())
    assert [line.split()[0] for line in partition_model(captured).batch_coupled] == ["`mean`"]


def test_scores_under_a_normaliser_of_the_batch_are_refused():
    def weighted(m, x, y, k):
        scores = x.log_softmax(-1) * (k / k.sum()).unsqueeze(-1)
        return F.nll_loss(scores.flatten(0, 1), y.flatten(), reduction="sum")

    captured, _ = capture_model(Head(weighted), batch())
    with pytest.raises(UnsupportedModelError, match="does not add up over samples"):
        partition_model(captured)


def test_the_user_may_accept_the_loss_of_each_microbatch_and_is_told():
    captured, _ = capture_model(Head(DOES_NOT_ADD_UP["contrastive"]), batch())
    coupled = partition_model(captured, loss_reduction="mean").batch_coupled
    assert any("the loss" in line and "sample by sample" in line for line in coupled)


class Flips(torch.nn.Module):
    """Besides its loss it returns each sample plus another one: no reduction, which a rule would see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        return y.square().sum(), y + y.flip(0)


def test_an_operation_that_mixes_samples_is_named():
    captured, _ = capture_model(Flips(), {"x": torch.randn(4, 7, 6)})
    assert [line.split()[0] for line in partition_model(captured).batch_coupled] == ["`flip`"]


class ByPlace(torch.nn.Module):
    """A shared table is read by a sample's place in the batch, which in a micro-batch is another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x, table):
        y = self.layer(x)
        return y.square().sum(), y + table[torch.arange(x.shape[0])][:, None]


def test_what_depends_on_a_samples_place_in_the_batch_is_named():
    inputs = {"x": torch.randn(4, 7, 6), "table": torch.randn(9, 6)}
    captured, _ = capture_model(ByPlace(), inputs)
    assert len(partition_model(captured).batch_coupled) == 1


class FirstTokens(torch.nn.Module):
    """A capacity: tokens beyond the first ten of the batch count half. The first sample never notices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        place = torch.ones_like(y[..., 0]).flatten().cumsum(0).view(x.shape[0], -1, 1)
        return y.square().sum(), torch.where(place <= 10, y, y / 2)


def test_a_capacity_that_earlier_samples_use_up_is_named():
    captured, _ = capture_model(FirstTokens(), {"x": torch.randn(4, 7, 6)})
    assert any("cumsum" in line for line in partition_model(captured).batch_coupled)


class MasksARow(torch.nn.Module):
    """A softmax over nothing gives NaN, in the whole batch as in a sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        nowhere = torch.full_like(y, float("-inf")).softmax(-1)
        return y.square().sum(), torch.cat([y, nowhere], 1)


def test_values_that_are_nan_for_every_sample_mix_nothing():
    captured, _ = capture_model(MasksARow(), {"x": torch.randn(4, 7, 6)})
    assert partition_model(captured).batch_coupled == ()


class SequenceFirst(torch.nn.Module):
    """Inputs [length, batch, features]: what attends over dimension 0 is right, and what takes it for the batch is not."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.layer, self.attend = torch.nn.Linear(6, 6), attend

    def forward(self, x):
        y = self.layer(x)
        return y.square().sum(), x + self.attend(y)


def with_torch(y):
    heads = y.unflatten(-1, (2, 3)).permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(heads, heads, heads).permute(2, 0, 1, 3).flatten(2)


def written_out(y):
    batch_first = y.transpose(0, 1)
    return ((batch_first @ batch_first.mT).softmax(-1) @ batch_first).transpose(0, 1)


@pytest.mark.parametrize("attend", [with_torch, written_out])
def test_attention_over_what_would_be_the_batch_is_refused(attend):
    captured, _ = capture_model(SequenceFirst(attend), {"x": torch.randn(7, 4, 6)})
    with pytest.raises(UnsupportedModelError, match="pass inputs with the batch first"):
        partition_model(captured)


@pytest.mark.parametrize("attend", [with_torch, written_out])
def test_attention_within_samples_is_not(attend):
    captured, _ = capture_model(
        SequenceFirst(lambda y: attend(y.transpose(0, 1)).transpose(0, 1)), {"x": torch.randn(7, 4, 6)}
    )
    assert partition_model(captured).batch_coupled == ()
