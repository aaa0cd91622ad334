"""What `disagmoe plan` found: sizes of groups and micro-batches, predicted times, and everything they were made from. No torch.

A `Sizing` is a plan before there is a traced model: `torch.compile(options={"plan": file})` takes the sizes from it and builds
stages, transfers and schedule of the model it compiles; a `Plan` file (`plan/serialize.py`) has all of these already. Which of
the two a file holds, its `kind` says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import PlanError

SCHEMA_VERSION = 1
KIND = "sizing"

_WHOLE = (
    "world_size", "attention_gpus", "ffn_gpus", "pipeline_groups", "attention_group_size", "ffn_group_size", "n_microbatches",
    "micro_batch_size", "microbatches_in_flight", "global_batch_size", "seq_length",
    "n_boundaries", "num_experts",
)  # fmt: skip
_POSITIVE = ("t_attention_s", "t_ffn_s", "t_star_s", "step_s", "tokens_per_s", "attention_nics", "ffn_nics")


@dataclass(frozen=True, slots=True)
class Sizing:
    """GPUs and NICs are of all groups of a role, group sizes of one. Raises PlanError naming numbers that contradict each other.

    `t_attention_s`, `t_ffn_s`: seconds of one stage and micro-batch on its busiest resource, forward and backward; `t_star_s` the
    larger. `step_s` adds filling and stalls. `memory_bytes`: of one rank, by role. `solver`: name, status, bound (tokens a
    second that no plan exceeds), gap (relative) and seconds. `binding`: what limits the plan, by name. `inputs`: model, cluster,
    workload and options that it was made from.
    """

    world_size: int
    attention_gpus: int
    ffn_gpus: int
    pipeline_groups: int
    attention_group_size: int
    ffn_group_size: int
    attention_nics: float
    ffn_nics: float
    n_microbatches: int
    micro_batch_size: int
    microbatches_in_flight: int
    global_batch_size: int
    seq_length: int
    n_boundaries: int
    num_experts: int
    recompute: Mapping[str, str]
    shared_experts_on: str
    shard_optimizer: bool
    dedup: str
    t_attention_s: float
    t_ffn_s: float
    t_star_s: float
    step_s: float
    balance_score: float
    tokens_per_s: float
    memory_bytes: Mapping[str, float]
    solver: Mapping[str, Any]
    binding: tuple[str, ...]
    alternatives: tuple[Mapping[str, Any], ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise PlanError(f"{name} must be a positive number, got {value!r}")
        p, m, n = self.pipeline_groups, self.attention_group_size, self.ffn_group_size
        for name, found, needed, why in (
            ("attention_gpus", self.attention_gpus, p * m, "pipeline_groups * attention_group_size"),
            ("ffn_gpus", self.ffn_gpus, p * n, "pipeline_groups * ffn_group_size"),
            (
                "world_size",
                self.world_size,
                p * (m + n),
                "pipeline_groups * (attention_group_size + ffn_group_size)",
            ),
            (
                "global_batch_size",
                self.global_batch_size,
                m * self.micro_batch_size * self.n_microbatches,
                "attention_group_size * micro_batch_size * n_microbatches",
            ),
        ):
            if found != needed:
                raise PlanError(f"{name} is {found}, and {why} is {needed}")

    def to_dict(self) -> dict[str, Any]:
        """The document of a plan file, and of `disagmoe plan --json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "fingerprint": self.fingerprint,
            **json.loads(json.dumps(asdict(self), allow_nan=False)),
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of everything but what the solver reports, which differs between runs."""
        content = {name: value for name, value in asdict(self).items() if name != "solver"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def dump_sizing(sizing: Sizing, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(json.dumps(sizing.to_dict(), indent=1) + "\n", encoding="utf-8")


def parse_sizing(document: Mapping[str, Any]) -> Sizing:
    """Inverse of `to_dict`. Raises PlanError naming the key that is unknown, missing, malformed or contradicts another.

    A file that was edited must lose its `fingerprint`: one that does not fit the content is refused.
    """
    if document.get("schema_version") != SCHEMA_VERSION:
        version = document.get("schema_version")
        raise PlanError(
            f"sizing has schema_version {version!r}, this version reads {SCHEMA_VERSION}: write it again"
        )
    content = {k: v for k, v in document.items() if k not in ("schema_version", "kind", "fingerprint")}
    known = [f.name for f in fields(Sizing)]
    for key in content:
        if key not in known:
            raise PlanError(f"unknown key {key}; known: {', '.join(known)}")
    missing = [name for name in known if name not in content]
    if missing:
        raise PlanError(f"missing key {', '.join(missing)}")
    for name in ("binding", "alternatives"):
        if not isinstance(content[name], list):
            raise PlanError(f"{name} must be a list, got {content[name]!r}")
        content[name] = tuple(content[name])
    sizing = Sizing(**content)
    stated = document.get("fingerprint", sizing.fingerprint)
    if stated != sizing.fingerprint:
        raise PlanError(
            f"its fingerprint is {stated}, its content has {sizing.fingerprint}: it was edited; remove the fingerprint to use it "
            "nevertheless"
        )
    return sizing
