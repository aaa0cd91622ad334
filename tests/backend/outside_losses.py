"""Scripts that compute their loss outside the model, in lockstep with eager on every rank; and what they are told if they err."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lockstep import Lockstep
from torch import Tensor, nn

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import LanguageModel, Sizes
from disagmoe_compile.runtime.executor import Executor

VOCAB = 40
SIZES = Sizes(vocab=VOCAB, hidden=16, n_layers=2, num_experts=6, expert_hidden=12)


class Outspoken(LanguageModel):
    """Returns much: logits, what each block made, rows of tokens, the sequence first, a number of the parameters alone."""

    def __init__(self) -> None:
        super().__init__(SIZES, GatheredEinsum)
        self.scores = nn.Linear(SIZES.hidden, 3)
        self.register_buffer("seen", torch.zeros(VOCAB))

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, embeddings: Tensor | None = None
    ) -> dict[str, Any]:
        x_BSD = self.embed(input_ids) if embeddings is None else embeddings
        hidden = []
        for block in self.blocks:
            x_BSD = block(x_BSD)
            hidden.append(x_BSD)
        logits = self.head(self.norm(x_BSD))
        if input_ids is not None:
            with torch.no_grad():
                self.seen += F.one_hot(input_ids, VOCAB).sum((0, 1))
        found = {
            "logits": logits,
            "hidden": hidden,
            "scores": self.scores(hidden[0].flatten(0, 1)),
            "length_first": x_BSD.transpose(0, 1),
            "scale": self.norm.weight.square().sum(),
            "cache": None,
            "done": True,
        }
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Outspoken()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def tokens(seed: int, batch: int, length: int = 6) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def cross_entropy(out: Mapping[str, Any], ids: Tensor) -> Tensor:
    return F.cross_entropy(out["logits"].flatten(0, 1), ids.flatten())


def of_every_output(out: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Every output that has a gradient, the logits twice."""
    others = [*out["hidden"], out["scores"], out["length_first"]]
    weights = torch.linspace(-1, 1, len(ids))  # samples differ, so that a mix-up shows
    first, length_first = out["hidden"][0], out["length_first"]
    mixed = (first.mean((1, 2)) * weights).sum() + (length_first.mean((0, 2)) * weights).sum()
    squares = sum(one.square().mean() for one in others)
    return cross_entropy(out, ids) + out["logits"].square().mean() + squares + mixed + 0.1 * out["scale"]


def run_outside_losses(options: Mapping[str, Any], batch: int) -> dict[str, float]:
    both = Lockstep(make_model, sgd, options)

    def train(name: str, loss: Callable[[Callable[..., Any]], Tensor]) -> None:
        ours, theirs = (loss(call) for call, _ in both.sides)
        ours.backward(), theirs.backward()
        both.note(name, ours, theirs)
        both.compare_gradients(name)
        both.step()

    a, b = tokens(1, batch), tokens(2, batch)
    train("outside loss", lambda call: cross_entropy(call(a), a))
    train("every output", lambda call: of_every_output(call(b), b))
    train("two calls", lambda call: cross_entropy(call(a), a) + 2 * of_every_output(call(b), b))
    train("first hidden state alone", lambda call: call(a)["hidden"][0].square().sum())
    train("scale alone", lambda call: call(a)["scale"])

    for call, _ in both.sides:
        call(a)  # no backward
        cross_entropy(call(a), a).backward()
        (0.5 * cross_entropy(call(b), b)).backward()
    both.compare_gradients("accumulation")
    both.step()

    with torch.no_grad():
        ours, theirs = (call(a) for call, _ in both.sides)
    for key in ("logits", "scores", "length_first", "scale"):
        both.note(f"no_grad {key}", ours[key], theirs[key])
    assert ours["cache"] is None and ours["done"] is True

    for size, length in ((batch + 1, 6), (1, 6), (3, 1), (2, 9)):
        ids = tokens(3, size, length)
        train(f"batch {size}, length {length}", lambda call, ids=ids: of_every_output(call(ids), ids))

    both.note("buffer", both.model.seen, both.twin.seen)

    embedded = [
        torch.randn(batch, 6, SIZES.hidden, generator=torch.Generator().manual_seed(4)) for _ in both.sides
    ]
    for x, (call, _) in zip(embedded, both.sides, strict=True):
        cross_entropy(call(embeddings=x.requires_grad_()), a).backward()
    both.note("gradient of an input", embedded[0].grad, embedded[1].grad)
    return both.errors


def run_losses_of_both_kinds(options: Mapping[str, Any], batch: int) -> dict[str, float]:
    """The model has a loss, and the script uses the other outputs too."""
    both = Lockstep(make_model, sgd, {**options, "gather_outputs": True})
    ids = tokens(1, batch)
    for call, _ in both.sides:
        out = call(ids, labels=ids)
        (3 * out["loss"] + of_every_output(out, ids)).backward()
    both.compare_gradients("loss and outputs")
    both.step()
    for call, _ in both.sides:
        call(ids, labels=ids)["loss"].backward()
    both.compare_gradients("loss alone")
    both.step()
    return both.errors


def run_uneven_batches(options: Mapping[str, Any], batches: tuple[int, ...]) -> dict[str, float]:
    """Losses of the model, batches that do not divide; gradients of an input."""
    both = Lockstep(make_model, sgd, options)

    def train(name: str, **inputs: Tensor) -> None:
        for call, _ in both.sides:
            call(**inputs)["loss"].backward()
        both.compare_gradients(name)
        both.step()

    for size in batches:
        ids = tokens(size, size)
        train(f"batch {size}", input_ids=ids, labels=ids.masked_fill(ids % 3 == 0, -100))
    short = tokens(5, 4, 1)
    train("length 1", input_ids=short, labels=short)
    ids, size = tokens(6, batches[0]), (batches[0], 6, SIZES.hidden)
    embedded = [torch.randn(size, generator=torch.Generator().manual_seed(4)) for _ in both.sides]
    for x, (call, _) in zip(embedded, both.sides, strict=True):
        (2 * call(embeddings=x.requires_grad_(), labels=ids)["loss"]).backward()
    both.note("gradient of an input", embedded[0].grad, embedded[1].grad)
    return both.errors


def outcomes_of_bad_backwards(options: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank was told, and how many executors were left by calls without backward."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="disagmoe", options=dict(options))
    ids = tokens(1, 4)
    found: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"

    def twice() -> None:
        loss = cross_entropy(compiled(ids), ids)
        loss.backward(retain_graph=True)
        loss.backward()

    def after_step() -> None:
        loss, other = cross_entropy(compiled(ids), ids), cross_entropy(compiled(ids), ids)
        loss.backward()
        optimizer.step()
        other.backward()

    attempt("twice", twice)
    attempt("second derivative", lambda: _second_derivative(model, compiled, ids))
    attempt("other losses", lambda: ((1 + rank) * cross_entropy(compiled(ids), ids)).backward())
    attempt("parameter changed", after_step)
    skipped = cross_entropy(compiled(ids), ids)
    attempt("skipped", skipped.backward if rank == 0 else optimizer.step)
    del skipped
    before = _executors()
    for _ in range(3):
        compiled(ids)
    found["executors left"] = _executors() - before
    attempt("afterwards", lambda: cross_entropy(compiled(ids), ids).backward())
    return found


def _executors() -> int:
    gc.collect()
    return sum(type(one) is Executor for one in gc.get_objects())


def _second_derivative(model: nn.Module, compiled: Callable[..., Any], ids: Tensor) -> None:
    loss = cross_entropy(compiled(ids), ids)
    owned = [p for p in model.parameters() if p.numel()]
    gradients = torch.autograd.grad(loss, owned, create_graph=True, allow_unused=True)
    sum(g.sum() for g in gradients if g is not None).backward()
