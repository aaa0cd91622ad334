"""A training run from the command line's request to its result: check, launch, collect, compare."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from disagmoe_compile.cli.launch import check_port, launch
from disagmoe_compile.cli.output import Output
from disagmoe_compile.cli.run_folder import RunFolder
from disagmoe_compile.cli.train_checks import (
    GroupSizes,
    affordable_compiler,
    check_batch,
    check_experts,
    check_plan_sizes,
    num_experts_of,
)
from disagmoe_compile.cli.train_loop import Training, TrainSettings, load_for_training
from disagmoe_compile.cli.train_progress import Follower
from disagmoe_compile.cli.train_report import render_result
from disagmoe_compile.config import Options
from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.inspect.timeline import to_chrome
from disagmoe_compile.models.source import Source
from disagmoe_compile.plan.files import load_plan
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.serialize import load
from disagmoe_compile.runtime.ports import free_port

MAX_RELATIVE_ERROR = 1e-4
"""Of a loss against eager's, over all steps of a run in fp32 (`--check`)."""

_WORKER = "disagmoe_compile.cli.train_worker"
_BATCH_SIZE = 8
_OF_THE_RUN = ("sent_bytes_by_transfer", "mixes_samples")  # in a rank's report, and no row of its own


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The options of `disagmoe train`; None where it decides itself."""

    source: str
    attention_group_size: int | None = None
    ffn_group_size: int | None = None
    pipeline_groups: int | None = None
    n_microbatches: int | None = None
    nproc: int | None = None
    steps: int = 20
    batch_size: int | None = None
    seq_length: int = 64
    lr: float = 1e-3
    seed: int = 0
    data: Path | None = None
    check: bool = False
    stage_compiler: str | None = None
    schedule: str = "af_pipe"
    dedup: str | None = None
    payload_dtype: str | None = None
    recompute: str | None = None
    plan: Path | None = None
    output_dir: Path | None = None
    log_jsonl: Path | None = None
    timeout: float = 600
    master_port: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"--steps must be at least 1, got {self.steps}")
        if self.seq_length < 2:
            raise InputError(
                f"--seq-length must be at least 2, as each token predicts the next one, got {self.seq_length}"
            )
        if not self.lr > 0:
            raise InputError(f"--lr must be positive, got {self.lr}")
        for flag, value in self._in_a_plan().items():
            if self.plan is not None and value is not None:
                raise InputError(
                    f"--{flag.replace('_', '-')} is in the plan file already: leave it out, or plan anew without --plan"
                )

    def _in_a_plan(self) -> dict[str, str | None]:
        return {"dedup": self.dedup, "payload_dtype": self.payload_dtype, "recompute": self.recompute}

    @property
    def chosen(self) -> dict[str, str]:
        """Those options of the plan that were given; the others have the defaults of torch.compile's options."""
        return {name: value for name, value in self._in_a_plan().items() if value is not None}

    @property
    def sizes(self) -> GroupSizes:
        return GroupSizes(
            self.attention_group_size,
            self.ffn_group_size,
            self.pipeline_groups,
            self.n_microbatches,
            self.nproc,
        )


def run(request: TrainRequest, *, quiet: bool) -> Output:
    """Everything that can be wrong with the request is raised before a process is started."""
    console = Console(quiet=quiet)
    world_size, batch_size = _world_and_batch(request)
    compiler, why = affordable_compiler(request.stage_compiler)
    settings = _settings(request, batch_size, compiler)
    Options.from_mapping(settings.options)
    port = free_port() if request.master_port is None else check_port(request.master_port)
    with console.status("loading the model"):
        source = load_for_training(settings)
    check_experts(request.sizes.ffn_at(world_size), num_experts_of(source.model))
    if why is not None:
        console.print(f"stage compiler: {compiler} ({why})")
    folder = RunFolder.create(request.output_dir)
    traced = replace(settings, options={**settings.options, "trace_dir": str(folder.graphs)})
    traced.save(folder.settings)
    with Follower(console, folder, request.steps, world_size, request.log_jsonl):
        launch(_WORKER, folder, world_size, port)
    plan = load(folder.plan)
    _save_timeline(folder, plan, world_size)
    mixes_samples = bool((folder.report(0) or {}).get("mixes_samples"))
    slices = _slices(plan, source) if mixes_samples else None
    eager = _eager_losses(console, settings, source, slices) if request.check else None
    document = _document(folder, plan, world_size, eager, compiler)
    failure = (
        None
        if eager is None
        else _compare(document["losses"], eager, folder, mixes_samples and slices is None)
    )
    return Output(finite(document), lambda console: render_result(console, document), failure)


def _world_and_batch(request: TrainRequest) -> tuple[int, int]:
    """Number of ranks and samples a step, from the plan file or from the sizes given."""
    batch_size = _BATCH_SIZE if request.batch_size is None else request.batch_size
    if request.plan is not None:
        return check_plan_sizes(load_plan(request.plan), request.sizes, request.batch_size)
    check_batch(batch_size)
    return request.sizes.world_size(), batch_size


def _settings(request: TrainRequest, batch_size: int, compiler: str) -> TrainSettings:
    options = {
        "attention_group_size": request.attention_group_size,
        "ffn_group_size": request.ffn_group_size,
        "pipeline_groups": request.pipeline_groups,
        "n_microbatches": request.n_microbatches,
        "schedule": request.schedule,
        **request.chosen,
        "stage_compiler": compiler,
        "timeout_s": request.timeout,
        "plan": None if request.plan is None else str(request.plan.resolve()),
    }
    return TrainSettings(
        source=request.source,
        steps=request.steps,
        batch_size=batch_size,
        seq_length=request.seq_length,
        lr=request.lr,
        seed=request.seed,
        data=None if request.data is None else str(request.data),
        options=options,
    )


def _save_timeline(folder: RunFolder, plan: Plan, world_size: int) -> None:
    events = {rank: folder.events(rank) for rank in range(world_size)}
    folder.timeline.write_text(json.dumps(to_chrome(events, plan)))


def _slices(plan: Plan, source: Source) -> list[range] | None:
    """The samples that ranks take at once. None where the source brings its own inputs: how their losses add up is unknown."""
    if source.vocab_size is None:
        return None
    members, microbatches = range(plan.topology.attention_group_size), range(plan.workload.n_microbatches)
    slices = [plan.samples_of(member, microbatch) for member in members for microbatch in microbatches]
    return [rows for rows in slices if rows]


def _eager_losses(
    console: Console, settings: TrainSettings, source: Source, slices: Sequence[range] | None
) -> list[float]:
    if slices is not None:
        console.print(
            f"the model mixes the samples of a call: eager takes the {len(slices)} slices of the batch that ranks do"
        )
    with console.status("the same steps in eager, in one process"):
        return [result.loss for result in Training(settings, source, slices=slices).run()]


def _document(
    folder: RunFolder, plan: Plan, world_size: int, eager: list[float] | None, compiler: str
) -> Mapping[str, Any]:
    steps = [json.loads(line) for line in folder.losses.read_text().splitlines()]
    losses = [step["loss"] for step in steps]
    warm = steps[1:] or steps  # the first step compiles
    ranks = [folder.report(rank) or {} for rank in range(world_size)]
    return {
        "ranks": [{k: v for k, v in rank.items() if k not in _OF_THE_RUN} for rank in ranks],
        "losses": losses,
        "eager_losses": eager,
        "max_relative_error": None if eager is None else max_relative_error(losses, eager),
        "tokens_per_s": warm[0]["tokens"] / statistics.median(step["seconds"] for step in warm),
        "first_step_s": steps[0]["seconds"],
        "stage_compiler": compiler,
        "plan": plan.fingerprint,
        "run_dir": str(folder.path),
    }


def max_relative_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest |a - b| / |b|; NaN counts as infinite, so that it can never pass."""
    errors = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, reference, strict=True)]
    return max(float("inf") if error != error else error for error in errors)


def _compare(
    losses: Sequence[float], eager: Sequence[float], folder: RunFolder, is_other_oracle: bool
) -> DisagMoEError | None:
    """`is_other_oracle`: the model mixes samples, and eager took the whole batch all the same."""
    error = max_relative_error(losses, eager)
    if error <= MAX_RELATIVE_ERROR:
        return None
    return DisagMoEError(
        f"losses differ from eager's by up to {error:.1e} relative, more than {MAX_RELATIVE_ERROR:.0e}; "
        f"the run is in {folder.path}"
        + (
            "; the model mixes the samples of a call, and eager took the whole batch at once"
            * is_other_oracle
        )
    )


def finite(value: Any) -> Any:
    """The document with NaN and infinity, which JSON has not, as null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
