"""What each rank of a multi-process test runs: an ordinary training loop, and a look at what became of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disagmoe_compile.errors import PeerError
from disagmoe_compile.models import hf, styles
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action
from disagmoe_compile.plan.ir import Plan
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.plan.validate import validate
from disagmoe_compile.runtime.executor import Executor

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """A world and what it trains. `options` go to torch.compile.

    `family`: of transformers, or a hand-written style, which Dynamo traces in a fraction of the time.
    """

    family: str = "qwen3_moe"
    attention: int = 2
    ffn: int = 2
    groups: int = 1
    n_microbatches: int = 2
    schedule: str = "af_pipe"
    compiler: str = "eager"
    steps: int = 3
    batch_size: int = 8
    seq_length: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def world_size(self) -> int:
        return self.groups * (self.attention + self.ffn)

    @property
    def compile_options(self) -> dict[str, Any]:
        return {
            "attention_group_size": self.attention,
            "ffn_group_size": self.ffn,
            "pipeline_groups": self.groups,
            "n_microbatches": self.n_microbatches,
            "schedule": self.schedule,
            "stage_compiler": self.compiler,
            "timeout_s": 60,
            **self.options,
        }

    def __str__(self) -> str:
        return f"{self.family}-M{self.attention}N{self.ffn}p{self.groups}-mb{self.n_microbatches}-{self.schedule}-{self.compiler}"


@dataclass
class RankResult:
    """What one rank saw. Gradients are those of the last step, before the optimizer's."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    ranges: dict[str, tuple[int, int] | None]
    optimizer_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    sent_bytes: dict[str, int]
    events: list[Any]
    plan: Any
    expert_rows: list[int]


def batch(case: Case, step: int) -> dict[str, torch.Tensor]:
    """Labels of -100 are spread unevenly over samples."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, 250, (case.batch_size, case.seq_length), generator=generator)
    labels = ids.clone()
    for sample in range(case.batch_size):
        labels[sample, : int(torch.randint(0, case.seq_length - 2, (), generator=generator))] = -100
    return {"input_ids": ids, "labels": labels}


def make_model(case: Case) -> torch.nn.Module:
    if case.family in styles.STYLES:
        return styles.build(case.family, seed=0, vocab=256, **case.model)
    return hf.build(case.family, seed=0, **case.model)[0]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    # a large eps keeps AdamW from turning gradients near zero, whose sign is rounding, into full steps
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-3)


class ExpertCalls(TorchDispatchMode):
    """Rows of every expert matmul that this process computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.disagmoe.grouped_mm.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def of_the_pipeline(self) -> Iterator[None]:
        """Watches while actions run; a mode around the compiled call itself would turn Dynamo off."""

        def watched(executor: Executor, actions: Sequence[Action]) -> None:
            with self:
                run(executor, actions)

        run, Executor.run = Executor.run, watched
        try:
            yield
        finally:
            Executor.run = run


def train(case: Case, model: torch.nn.Module | None = None) -> RankResult:
    """The loop a user writes, optimizer built before the first call. The last step's forward and backward are watched."""
    torch.manual_seed(0)
    model = make_model(case) if model is None else model
    optimizer = optimizer_of(model)
    compiled = torch.compile(model, backend="disagmoe", options=case.compile_options)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    calls = ExpertCalls()
    for step in range(case.steps):
        with calls.of_the_pipeline() if step == case.steps - 1 else nullcontext():
            loss = compiled(**batch(case, step)).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _result(model, optimizer, losses, gradients, calls.rows)


def _result(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    gradients: dict[str, torch.Tensor],
    rows: list[int],
) -> RankResult:
    from disagmoe_compile.runtime.binding import holder_of
    from disagmoe_compile.runtime.session import active_sessions

    session = active_sessions()[-1]
    ranges: dict[str, tuple[int, int] | None] = {}
    for name, parameter in model.named_parameters():
        holder = holder_of(parameter)
        assert holder is not None, name
        if holder.bound.is_owned:
            ranges[name] = holder.bound.placement.ranges[session.rank]
    state = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return RankResult(
        losses=losses,
        gradients=gradients,
        parameters={n: p.detach().clone() for n, p in model.named_parameters() if n in ranges},
        ranges=ranges,
        optimizer_bytes=sum(v.untyped_storage().nbytes() for v in state),
        gradient_bytes=sum(g.untyped_storage().nbytes() for g in gradients.values()),
        parameter_bytes=sum(p.untyped_storage().nbytes() for p in model.parameters()),
        sent_bytes=dict(session.sent_bytes),
        events=session.events,
        plan=session.plan,
        expert_rows=rows,
    )


def train_twice(case: Case) -> tuple[RankResult, RankResult]:
    return train(case), train(case)


def swap_two_computations(plan: Plan) -> Plan:
    """The plan with two independent computations of its first group exchanged."""
    group = plan.topology.groups[0]
    n_actions = len(plan.training.of(group))
    position = next(i for i in range(n_actions - 1) if _validates_swapped(plan, group, i))
    return swapped(plan, group, position)


def swapped(plan: Plan, group: Group, position: int) -> Plan:
    actions = list(plan.training.of(group))
    actions[position : position + 2] = reversed(actions[position : position + 2])
    return replace(
        plan, training=replace(plan.training, actions={**plan.training.actions, group: tuple(actions)})
    )


def _validates_swapped(plan: Plan, group: Group, position: int) -> bool:
    """Only swaps of two computations: they show in the order of work, not only of messages."""
    here, following = plan.training.of(group)[position : position + 2]
    is_compute = here.kind in COMPUTE_KINDS and following.kind in COMPUTE_KINDS
    return is_compute and not validate(swapped(plan, group, position))


def die_in_the_middle_of_a_step(case: Case, victim: int, folder: str) -> None:
    """The victim kills itself at its tenth action of the second step; the others write down what they were told and exit."""
    model = make_model(case)
    compiled = torch.compile(model, backend="disagmoe", options=case.compile_options)
    compiled(**batch(case, 0)).loss.backward()
    if torch.distributed.get_rank() == victim:
        run_action, done = Executor.run_action, iter(range(10))

        def until_the_tenth(executor: Executor, action: Action) -> None:
            if next(done, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            run_action(executor, action)

        Executor.run_action = until_the_tenth
    try:
        compiled(**batch(case, 1)).loss.backward()
    except PeerError as error:
        Path(folder, str(torch.distributed.get_rank())).write_text(str(error))
        os._exit(1)
