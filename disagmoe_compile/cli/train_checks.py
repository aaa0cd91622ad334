"""What `disagmoe train` refuses before it starts any process, and how many ranks it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.sizing import Sizing
from disagmoe_compile.plan.validate import check

DEFAULT_NPROC = 4


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """As given on the command line; None means the planner decides."""

    attention: int | None
    ffn: int | None
    pipeline_groups: int | None
    n_microbatches: int | None
    nproc: int | None

    def __post_init__(self) -> None:
        for flag, value in self._flags().items():
            if value is not None and value < 1:
                raise InputError(f"{flag} must be at least 1, got {value}")

    def _flags(self) -> dict[str, int | None]:
        return {
            "--attention-group-size": self.attention,
            "--ffn-group-size": self.ffn,
            "--pipeline-groups": self.pipeline_groups,
            "--n-microbatches": self.n_microbatches,
            "--nproc": self.nproc,
        }

    def world_size(self) -> int:
        """p * (M + N); where a size is left to the planner, --nproc ranks (4 by default).

        Raises InputError where the sizes given cannot make up that many ranks.
        """
        groups = self.pipeline_groups or 1
        if self.attention and self.ffn:
            pair = self.attention + self.ffn
            if self.pipeline_groups is None and self.nproc is not None and self.nproc % pair == 0:
                return self.nproc
            return self._agree(groups * pair)
        world = self.nproc or max(DEFAULT_NPROC, 2 * groups)
        given = self.attention or self.ffn or 1
        if world % groups or world // groups <= given:
            raise InputError(
                f"{world} ranks cannot be split: {self._asked()}; needed is pipeline_groups * (attention_group_size + "
                f"ffn_group_size) = number of ranks, each at least 1; the least is --nproc {groups * (given + 1)}"
            )
        return world

    def ffn_at(self, world_size: int) -> int | None:
        """N, given or left over by M; None where the planner decides."""
        if self.ffn is not None or self.attention is None:
            return self.ffn
        return world_size // (self.pipeline_groups or 1) - self.attention

    def _agree(self, world: int) -> int:
        if self.nproc not in (None, world):
            raise InputError(
                f"group sizes do not match --nproc {self.nproc}: {self._asked()} need {world} ranks"
            )
        return world

    def _asked(self) -> str:
        given = [f"{flag} {value}" for flag, value in self._flags().items() if value is not None]
        return ", ".join(given) or "no sizes given"


def check_experts(ffn_group_size: int | None, num_experts: int | None) -> None:
    """Raises InputError where an FFN rank would own no expert."""
    if ffn_group_size is not None and num_experts is not None and ffn_group_size > num_experts:
        raise InputError(
            f"--ffn-group-size {ffn_group_size} is more than the model's {num_experts} experts: an FFN rank would own none"
        )


def check_batch(batch_size: int) -> None:
    """Raises InputError where there is nothing to train on. A batch need not divide by ranks and micro-batches."""
    if batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, got {batch_size}")


def check_plan_sizes(plan: Plan | Sizing, sizes: GroupSizes, batch_size: int | None) -> tuple[int, int]:
    """World size and global batch of a plan file.

    Raises InputError where it and the flags beside it say different things, PlanError where the plan is not valid.
    """
    if isinstance(plan, Sizing):
        attention, ffn, groups = plan.attention_group_size, plan.ffn_group_size, plan.pipeline_groups
        n_microbatches, batch, world = plan.n_microbatches, plan.global_batch_size, plan.world_size
    else:
        check(plan)
        topology, workload = plan.topology, plan.workload
        attention, ffn = topology.attention_group_size, topology.ffn_group_size
        groups, world = topology.attention_groups, topology.world_size
        n_microbatches, batch = workload.n_microbatches, workload.global_batch_size
    for flag, given, planned in (
        ("--attention-group-size", sizes.attention, attention),
        ("--ffn-group-size", sizes.ffn, ffn),
        ("--pipeline-groups", sizes.pipeline_groups, groups),
        ("--n-microbatches", sizes.n_microbatches, n_microbatches),
        ("--nproc", sizes.nproc, world),
        ("--batch-size", batch_size, batch),
    ):
        if given is not None and given != planned:
            raise InputError(
                f"{flag} {given} contradicts the plan file, which has {planned}; leave the flag out"
            )
    return world, batch


def num_experts_of(model: torch.nn.Module) -> int | None:
    """Experts a layer as the model's config states them; None for a model without such a config."""
    from disagmoe_compile.models.config_names import ALIASES

    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((getattr(text, name) for name in ALIASES["num_experts"] if hasattr(text, name)), None)


def affordable_compiler(asked: str | None) -> tuple[str, str | None]:
    """The stage compiler to use, and why it is not the default one, if so. What the user asks for is taken as
    it is.
    """
    if asked is not None:
        return asked, None
    if any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "inductor", None
    return "aot_eager", "no C++ compiler found, which the default stage compiler (inductor) needs on a CPU"
