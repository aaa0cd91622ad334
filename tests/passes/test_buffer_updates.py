"""Buffers that forward updates: sums over samples are added once, what is no such sum is refused at its line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.pipeline import PartitionResult, partition_model
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.testing.graphs import capture_model


class Counts(nn.Module):
    """Counts how many tokens each of four classes gets. `update(module, counts, ids, x)` writes it down."""

    def __init__(self, update, read=lambda counts: 0.0) -> None:
        super().__init__()
        self.layer, self.update, self.read = nn.Linear(4, 4), update, read
        self.register_buffer("counts", torch.arange(4.0))
        self.register_buffer("n", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        ids = y.argmax(-1).flatten()
        with torch.no_grad():
            self.update(self, torch.histc(ids.float(), bins=4, min=0, max=3), ids, x)
        return y.square().mean() + self.read(self.counts)


def assign(m, n, ids, x):
    m.counts = m.counts + n


def assign_twice(m, n, ids, x):
    m.counts = m.counts + n
    m.counts = torch.bincount(ids, minlength=4) * 2 + m.counts


def augment(m, n, ids, x):
    m.counts += n
    m.n += x.shape[0] * x.shape[1]


def overwrite(m, n, ids, x):
    m.counts = n


def copy_back(m, n, ids, x):
    old = m.counts + n
    m.counts.add_(n)
    m.counts.copy_(old)


UPDATES = {
    "add_": lambda m, n, ids, x: m.counts.add_(n),
    "add_ with alpha": lambda m, n, ids, x: m.counts.add_(n, alpha=0.5),
    "sub_": lambda m, n, ids, x: m.counts.sub_(n),
    "data": lambda m, n, ids, x: m.counts.data.add_(n),
    "twice": lambda m, n, ids, x: m.counts.add_(n).add_(n / 2),
    "copy_": lambda m, n, ids, x: m.counts.copy_(n + m.counts),
    "index_add_": lambda m, n, ids, x: m.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float)),
    "scatter_add_": lambda m, n, ids, x: m.counts.scatter_add_(
        0, ids, torch.ones_like(ids, dtype=torch.float)
    ),
    "scatter_add": lambda m, n, ids, x: m.counts.add_(torch.zeros(4).scatter_add(0, ids, ids.float())),
    "one_hot": lambda m, n, ids, x: m.counts.add_(F.one_hot(ids, 4).sum(0)),
    "stack": lambda m, n, ids, x: m.counts.add_(torch.stack([(ids == e).sum() for e in range(4)])),
    "whole numbers": lambda m, n, ids, x: m.n.add_((ids == 2).sum()),
    "cast of counts": lambda m, n, ids, x: m.n.add_(n.to(torch.long).sum()),
    "inputs alone": lambda m, n, ids, x: m.n.add_((x > 0).sum()),
    "size": lambda m, n, ids, x: m.n.add_(x.shape[0] * x.shape[1]),
    "number": lambda m, n, ids, x: m.n.add_(1),
    "assignment": assign,
    "two assignments": assign_twice,
    "augmented assignment": augment,
}
REFUSED = {
    "moving average": lambda m, n, ids, x: m.counts.mul_(0.9).add_(n, alpha=0.1),
    "difference to the old value": lambda m, n, ids, x: m.counts.add_(n - m.counts),
    "copy of another value": lambda m, n, ids, x: m.counts.copy_(0.5 * m.counts + n),
    "overwritten": overwrite,
    "filled": lambda m, n, ids, x: m.counts.zero_(),
    "overwrites its own update": copy_back,
    "mean": lambda m, n, ids, x: m.counts.add_(x.mean((0, 1))),
    "maximum": lambda m, n, ids, x: m.counts.add_(x.amax((0, 1))),
    "share": lambda m, n, ids, x: m.counts.add_(n / n.sum()),
    "share of the batch": lambda m, n, ids, x: m.counts.add_(n / x.shape[0]),
    "sign": lambda m, n, ids, x: m.counts.add_((n - n.mean()).sign()),
    "square": lambda m, n, ids, x: m.counts.add_(n * n),
    "any": lambda m, n, ids, x: m.counts.add_((ids == 1).any()),
    "rounded": lambda m, n, ids, x: m.n.add_(x.sum().to(torch.long)),
    "centered": lambda m, n, ids, x: m.counts.add_((x - x.mean(0)).relu().sum((0, 1))),
    "range of the values": lambda m, n, ids, x: m.counts.add_(torch.histc(ids.float(), bins=4)),
    "numbered rows": lambda m, n, ids, x: m.n.add_(torch.arange(x.shape[0]).sum()),
    "size and one": lambda m, n, ids, x: m.n.add_(x.shape[0] + 1),
    "part": lambda m, n, ids, x: m.counts[1:].add_(n[1:]),
}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))}


def partitioned(model: nn.Module) -> PartitionResult:
    return partition_model(capture_model(model, batch())[0])


class Each(nn.Module):
    """Every update of `UPDATES` on buffers of its own: one graph for all."""

    def __init__(self) -> None:
        super().__init__()
        self.holders = nn.ModuleList(Counts(update) for update in UPDATES.values())

    def forward(self, x: Tensor) -> Tensor:
        return sum(holder(x) for holder in self.holders)


@pytest.fixture(scope="module")
def each() -> tuple[PartitionResult, dict[str, Tensor], dict[str, Tensor]]:
    """(the partition, buffers after a call of the partitioned graph, and after one of eager)."""
    model = Each()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    captured, arguments = capture_model(model, batch())  # runs the captured graph once, which is eager
    partition = partition_model(captured)
    inputs = {i: one.name for i, one in enumerate(captured.inputs) if one.kind == "buffer"}
    results = partition.graph_module(
        *(buffers[inputs[i]] if i in inputs else argument for i, argument in enumerate(arguments))
    )
    for output, position in captured.assigned_buffers.items():
        buffers[inputs[position]] = results[output]
    return partition, buffers, dict(model.named_buffers())


@pytest.mark.parametrize("update", UPDATES)
def test_a_sum_over_samples_is_added_as_eager_adds_it(each, update):
    _, ours, eager = each
    for name in ("counts", "n"):
        key = f"holders.{list(UPDATES).index(update)}.{name}"
        torch.testing.assert_close(ours[key], eager[key])


def test_sums_that_only_updates_read_couple_no_samples(each):
    assert each[0].batch_coupled == ()


@pytest.mark.parametrize("update", REFUSED)
def test_what_is_no_sum_over_samples_is_refused_at_its_line_with_the_way_out(update):
    with pytest.raises(
        Exception, match=r"updates its buffer `(counts|n)`.*test_buffer_updates\.py:\d+"
    ) as caught:
        partitioned(Counts(REFUSED[update]))
    assert "gather_outputs" in str(caught.value) and "UnsupportedModelError" in repr(caught.value)


def test_reading_a_buffer_after_its_update_is_refused_at_the_reader():
    with pytest.raises(
        UnsupportedModelError, match=r"`counts` at `sum` .*: it reads the buffer after the model updated it"
    ):
        partitioned(Counts(UPDATES["add_"], read=lambda counts: counts.sum()))


def test_an_update_that_carries_a_gradient_is_refused():
    class Mass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mass", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mass = self.mass + y.sum((0, 1))
            return y.square().mean()

    with pytest.raises(UnsupportedModelError, match=r"`mass` at `add` .*carries a gradient .*no_grad"):
        partitioned(Mass())


def test_a_number_counts_once_a_call_and_a_sum_for_its_samples():
    def update(m, n, ids, x):
        m.n.add_(1)
        m.counts.add_(n)

    (program,) = partitioned(Counts(update)).programs.attention
    assert [delta.once for delta in program.buffer_deltas.values()] == [True, False]


def test_training_steps_keep_the_deltas_and_drop_the_outputs():
    class Predicts(Counts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x + 1

    (program,) = partitioned(Predicts(UPDATES["assignment"])).programs.attention
    assert len(program.model_outputs) == 1 and list(program.buffer_deltas) == [1]
    short = without_outputs(program)
    assert not short.model_outputs and list(short.buffer_deltas) == [0] and short.loss_numerators == (1,)


@pytest.mark.parametrize("update", ["add_", "assignment", "augmented assignment"])
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
    captured, _ = capture_model(Counts(lambda m, n, ids, x: n * m.counts), {"x": torch.randn(4, 5, 4)})
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
