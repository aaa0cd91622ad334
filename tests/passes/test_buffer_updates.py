"""Buffers that forward updates: several ranks refuse them, with the line and the way out; one process does as eager does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capturing import capture_model
from torch import Tensor, nn

from disagmoe_compile.passes.pipeline import partition_model


class Counts(nn.Module):
    """Counts how many tokens each of four classes gets; `update(module, counts)` writes it down."""

    def __init__(self, update) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(4, 4), update
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.update(self, torch.histc(y.argmax(-1).float(), bins=4, min=0, max=3))
        return y.square().mean()


def assign(module, n):
    module.counts = module.counts + n


def augment(module, n):
    module.counts += n


UPDATES = {
    "add_": lambda m, n: m.counts.add_(n),
    "copy_": lambda m, n: m.counts.copy_(m.counts + n),
    "moving average": lambda m, n: m.counts.mul_(0.9).add_(n, alpha=0.1),
    "assignment": assign,
    "augmented assignment": augment,
}


@pytest.mark.parametrize("update", UPDATES)
def test_several_ranks_refuse_an_update_at_its_line_and_say_what_to_do(update):
    with pytest.raises(
        Exception, match=r"updates its buffer `counts`.*test_buffer_updates\.py:\d+"
    ) as caught:
        partition_model(capture_model(Counts(UPDATES[update]), {"x": torch.randn(4, 5, 4)})[0])
    assert "gather_outputs" in str(caught.value) and "UnsupportedModelError" in repr(caught.value)


@pytest.mark.parametrize("update", UPDATES)
def test_one_process_updates_as_eager_does(update):
    torch._dynamo.reset()
    model, twin = Counts(UPDATES[update]), Counts(UPDATES[update])
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="disagmoe", options={"stage_compiler": "eager"})
    for seed in range(3):
        x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(model.counts, twin.counts)


def test_a_buffer_that_is_only_read_is_not_refused():
    captured, _ = capture_model(Counts(lambda m, n: n * m.counts), {"x": torch.randn(4, 5, 4)})
    assert partition_model(captured).batch_coupled == ()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.layer(x).flatten(0, 1), self.mean, self.variance, training=self.training)
        return y.square().mean()


def test_running_statistics_are_updates_though_nothing_in_the_graph_writes_them():
    with pytest.raises(Exception, match=r"updates its buffer `mean` at `batch_norm`"):
        partition_model(capture_model(Normalised(), {"x": torch.randn(4, 5, 4)})[0])


def test_running_statistics_that_are_only_read_are_not_refused():
    captured, _ = capture_model(Normalised().eval(), {"x": torch.randn(4, 5, 4)})
    assert partition_model(captured).batch_coupled == ()
