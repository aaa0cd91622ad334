"""The loop that `disagmoe train` runs, an ordinary one: on every rank with a compiled model, for `--check`
with the bare one.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.source import Source, load_source
from disagmoe_compile.models.text import BYTE_VOCABULARY, batches


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What all ranks and the eager run must agree on. `options` are those of `torch.compile`."""

    source: str
    steps: int
    batch_size: int
    seq_length: int
    lr: float
    seed: int
    data: str | None
    options: Mapping[str, Any]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))

    @staticmethod
    def load(path: Path) -> TrainSettings:
        return TrainSettings(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    loss: float
    seconds: float
    tokens: int


class Training:
    """`wrap` turns the model into what is called: `torch.compile(...)` on a rank, nothing in eager.

    `slices`: the parts of the batch that are called one by one. The loss must be the mean over them, as that of texts is.
    """

    def __init__(
        self,
        settings: TrainSettings,
        source: Source,
        wrap: Callable[[torch.nn.Module], Callable[..., Any]] = lambda model: model,
        slices: Sequence[range] | None = None,
    ) -> None:
        self.slices = slices or [range(settings.batch_size)]
        self.settings, self.source = settings, source
        self.optimizer = torch.optim.AdamW(source.model.parameters(), lr=settings.lr)
        self.model = wrap(source.model)

    def run(self) -> Iterator[StepResult]:
        source = self.source
        for step, batch in enumerate(itertools.islice(_calls(source, self.settings), self.settings.steps)):
            start = time.perf_counter()
            loss = 0.0
            for part, share in self._parts(batch):
                one = _loss_of(self.model(*source.args, **part), source.name) * share
                one.backward()
                loss += float(one.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds = time.perf_counter() - start
            yield StepResult(step, loss, seconds, self.settings.batch_size * self.settings.seq_length)

    def _parts(self, batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        """Each slice of the batch, and its share of the samples."""
        if len(self.slices) == 1:
            yield dict(batch), 1.0
            return
        for rows in self.slices:
            part = {
                name: value[rows.start : rows.stop] if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
            yield part, len(rows) / self.settings.batch_size


def load_for_training(settings: TrainSettings) -> Source:
    """The model of the settings' source, checked against the text. Raises InputError."""
    source = load_source(settings.source, seed=settings.seed)
    if source.vocab_size is not None and source.vocab_size < BYTE_VOCABULARY:
        raise InputError(
            f"source {settings.source!r} knows {source.vocab_size} token ids; text as bytes needs {BYTE_VOCABULARY}"
        )
    if source.vocab_size is not None:
        batches(settings.data, settings.batch_size, settings.seq_length)  # raises for missing or short data
    elif settings.data is not None:
        raise InputError(
            f"source {settings.source!r} takes no input_ids and labels, so --data cannot be used with it"
        )
    return source


def _calls(source: Source, settings: TrainSettings) -> Iterator[dict[str, Any]]:
    """Keyword arguments of each call: batches of text, or the source's own example again and again."""
    if source.vocab_size is None:
        yield from itertools.repeat(source.kwargs)
    fixed = {k: v for k, v in source.kwargs.items() if not isinstance(v, torch.Tensor)}
    for batch in batches(settings.data, settings.batch_size, settings.seq_length, settings.seed):
        yield {**fixed, **batch}


def _loss_of(output: Any, source: str) -> torch.Tensor:
    """The scalar of a model's output: `.loss`, `["loss"]`, the first of a tuple, or the output itself."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError(
            f"source {source!r}: the model must return a scalar loss that requires grad (as .loss, ['loss'], first of "
            f"a tuple, or alone), got {type(output).__name__}"
        )
    return loss
