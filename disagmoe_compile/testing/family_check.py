"""One family of transformers against eager PyTorch: what is captured, how it is split, and how exact it is.

    report = check_family("qwen3_moe")        report.worst_errors -> {1: 2e-7, 2: 3e-7, 3: 3e-7, 4: 2e-7}

Every virtual rank of a plan runs in this process. The oracle is eager on the whole batch, or, where an operation of the
model mixes samples, eager on each part of the batch that one attention rank sees at once. A model whose training draws
random numbers is compared in eval mode, gradients included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from disagmoe_compile.graph_breaks import where_and_why
from disagmoe_compile.inspect.parity import gradient_errors
from disagmoe_compile.models import hf
from disagmoe_compile.testing.parity import Reference, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, capture_call, run_captured

BATCH, LENGTH = 6, 16
# FFN ranks -> (attention ranks, micro-batches of each): every number of FFN ranks under another shape of plan.
PLANS: Mapping[int, tuple[int, int]] = {1: (1, 1), 2: (1, 3), 3: (2, 1), 4: (1, 2)}


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """`graphs`: captured by torch.compile, 0 where it failed. `worst_errors`: FFN ranks -> largest relative error of the
    loss and of every gradient. `reason`: why the family is not split, or not at all supported. `notes`: what to know."""

    family: str
    model: str
    n_layers: int
    graphs: int = 0
    styles: tuple[str, ...] = ()
    stages: int = 0
    worst_errors: Mapping[int, float] | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_family(family: str, *, n_layers: int | None = None, **overrides: Any) -> FamilyReport:
    """Builds the family tiny, with every kind of its layers, and compares. What goes wrong is the report's `reason`."""
    report = FamilyReport(family, "-", n_layers or 0)
    try:
        with (
            torch.enable_grad()
        ):  # a trace that fails inside no_grad leaves gradients off for the next family
            depth = n_layers or max(2, hf.layer_kinds(family))
            model, _ = hf.build(family, n_layers=depth, **overrides)
            report = FamilyReport(family, type(model).__name__, depth)
            return _check(report, model)
    except Exception as error:  # any failure of a family is a line of the table
        return FamilyReport(report.family, report.model, report.n_layers, reason=_one_line(error))


def _check(report: FamilyReport, model: torch.nn.Module) -> FamilyReport:
    batch = token_batch()
    notes = []
    if _is_random(model, batch):
        model.eval()
        notes.append("compared in eval mode: training draws random numbers")
    call = capture_call(model, batch)
    partition = call.partition
    regions = partition.programs.n_boundaries
    styles = tuple(dict.fromkeys(experts.style for experts in partition.programs.experts))
    report = replace(report, graphs=1, styles=styles, stages=2 * regions + 1)
    if not regions:
        skipped = dict(partition.reports)["find_regions"].skipped
        return replace(
            report, reason=_short(skipped[0]) if skipped else "it routes nothing", notes=tuple(notes)
        )
    if partition.batch_coupled:
        notes.append(f"mixes samples: {'; '.join(map(_short, partition.batch_coupled))}")
    errors = {n: _worst_error(call, model, batch, n) for n in PLANS}
    return replace(report, worst_errors=errors, notes=tuple(notes))


def token_batch() -> dict[str, torch.Tensor]:
    """Token ids and labels; samples have different numbers of labels, so that a wrong denominator shows."""
    ids = torch.randint(3, 128, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample in range(BATCH):
        labels[sample, : 2 * sample + 1] = -100
    return {"input_ids": ids, "labels": labels}


def _is_random(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    losses = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            losses.append(model(**batch).loss)
    return not torch.equal(*losses)


def _worst_error(
    call: CapturedCall, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], ffn_ranks: int
) -> float:
    attention_ranks, n_microbatches = PLANS[ffn_ranks]
    run = run_captured(
        call,
        attention_group_size=attention_ranks,
        ffn_group_size=ffn_ranks,
        n_microbatches=n_microbatches,
    )
    parts = attention_ranks * n_microbatches if call.partition.batch_coupled else 1
    reference = eager_in_parts(model, batch, parts)
    errors = gradient_errors(run.gradients, reference.gradients)
    return max(abs(run.loss - reference.loss) / abs(reference.loss), *errors.values())


def eager_in_parts(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], parts: int) -> Reference:
    """Eager on each part of the batch alone, the losses weighted by their numbers of labels."""
    if parts == 1:
        return eager_reference(model, **batch)
    labels = [int((part != -100).sum()) for part in batch["labels"][:, 1:].chunk(parts)]
    loss = 0.0
    gradients: dict[str, torch.Tensor] = {}
    for index, count in enumerate(labels):
        one = eager_reference(model, **{name: value.chunk(parts)[index] for name, value in batch.items()})
        share = count / sum(labels)
        loss += share * one.loss
        for name, gradient in one.gradients.items():
            gradients[name] = gradients.get(name, torch.zeros(())) + share * gradient
    return Reference(loss, gradients)


def _one_line(error: Exception) -> str:
    """The message without what torch wraps around it."""
    found = where_and_why(error)
    if found is not None:
        return _short(f"{found[0]}: {found[1]}", limit=400)
    text = str(error)
    for wrapper in ("raised:\n", "UserError: ", "UnsupportedModelError: ", "CaptureError: "):
        text = text.split(wrapper, 1)[-1]
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return _short(lines[0] if lines else type(error).__name__)


def _short(text: str, limit: int = 300) -> str:
    """Paths from the package's name on."""
    text = " ".join(re.sub(r"/\S*?site-packages/", "", text).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
