"""A plan file, action by action, as a program: what the runtime will execute, with durations that are measured or estimated.

    measured     `Durations.of_timeline`: means of a run's own timeline, per kind and stage; of its messages, per transfer; of
                 what the host spends on other actions, per kind
    estimated    FLOPs of the plan's stages on a cluster; a backward takes twice its forward, half of it for each gradient, and
                 once more where the plan recomputes it

The size of a routed message is the expected one: rows = T x expected copies of a token / N, pairs = T k / N.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind
from disagmoe_compile.plan.ir import Plan, Schedule, TokenDim, Transfer, TransferKind
from disagmoe_compile.plan.sharing import Leg, Link
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import expected_copies
from disagmoe_compile.simulator.program import Program, Queueing


@dataclass(frozen=True, slots=True)
class Recorded:
    """One slice of a run's timeline: seconds from its beginning."""

    rank: int
    action: Action
    step: int
    start: float
    end: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Durations:
    """`seconds` of compute actions by (kind, stage); `messages` of a transfer by its name; `host` of other actions by kind.

    `shares_links`: messages were timed alone and slow each other down. Measured ones had their share of that already.
    """

    seconds: Mapping[tuple[ActionKind, int], float]
    messages: Mapping[str, float]
    host: Mapping[ActionKind, float] = field(default_factory=dict)
    shares_links: bool = True

    @staticmethod
    def of_cluster(plan: Plan, cluster: Cluster) -> Durations:
        """Estimated: the plan's FLOPs and bytes at the cluster's speed."""
        speed = cluster.gpu.flops * cluster.efficiencies.gemm.value
        seconds: dict[tuple[ActionKind, int], float] = {}
        for stage in plan.stages:
            ranks = plan.topology.ffn_group_size if stage.role is Role.FFN else 1
            forward = plan.mean_fill * stage.forward_flops / speed / ranks
            again = forward if plan.recomputes(stage.role) else 0.0
            seconds |= {
                (ActionKind.FORWARD, stage.index): forward,
                (ActionKind.BACKWARD, stage.index): again + 2 * forward,
                (ActionKind.BACKWARD_INPUT, stage.index): again + forward,
                (ActionKind.BACKWARD_WEIGHT, stage.index): forward,
            }
        nic = cluster.nic_bytes_per_s * cluster.efficiencies.network.value
        rate = nic * cluster.nics_per_node / cluster.gpus_per_node
        sizes = {g: len(plan.topology.ranks_of_group(g)) for g in plan.topology.groups}
        messages = {}
        for transfer in plan.transfers:
            ends = (plan.topology.group_of_stage(s) for s in (transfer.src, transfer.dst))
            messages[transfer.name] = message_bytes(plan, transfer) / (rate * min(sizes[g] for g in ends))
        return Durations(seconds, messages)

    @staticmethod
    def of_timeline(plan: Plan, recorded: Sequence[Recorded]) -> Durations:
        """Measured, from steps of a run. Raises InputError where a timeline has no compute actions."""
        found: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        for one in recorded:
            if one.action.kind in COMPUTE_KINDS:
                found[one.action.kind, one.action.stage].append(one.end - one.start)
        if not found:
            raise InputError("the timeline has no compute actions: record one with `disagmoe train`")
        seconds = {key: statistics.mean(values) for key, values in found.items()}
        return Durations(
            seconds, _message_seconds(plan, recorded), _host_seconds(recorded), shares_links=False
        )


_BLOCKED_S = 2e-4
"""A WAIT that took longer did wait."""


def _message_seconds(plan: Plan, recorded: Sequence[Recorded]) -> dict[str, float]:
    """Per transfer the lower quartile of the time from when it was sent and its receive posted to the end of the WAIT for it.

    Each is an upper bound of what the message took, as a WAIT may come long after the arrival: hence the lower ones.
    """
    began: dict[tuple[int, str, int | None], float] = {}
    for one in recorded:
        if one.action.kind in (ActionKind.SEND, ActionKind.RECV) and one.action.transfer is not None:
            key = (one.step, one.action.transfer, one.action.microbatch)
            began[key] = max(began.get(key, one.start), one.start)
    stage_of = {t.name: t.dst for t in plan.transfers}
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for one in recorded:
        name = one.action.transfer
        if one.action.kind is ActionKind.WAIT and name is not None and stage_of[name] == one.action.stage:
            start = began.get((one.step, name, one.action.microbatch))
            if start is not None:
                taken[name].append(max(one.end - start, 0.0))
        elif one.action.kind is ActionKind.REDUCE_GRAD and name is not None:
            taken[name].append(one.end - one.start)
    return {name: sorted(values)[len(values) // 4] for name, values in taken.items()}


_HOST_KINDS = (ActionKind.SEND, ActionKind.RECV, ActionKind.FREE)


def _host_seconds(recorded: Sequence[Recorded]) -> dict[ActionKind, float]:
    """Per kind the mean time until the host got to its next action; of a WAIT, those that did not wait."""
    lists: defaultdict[tuple[int, int], list[Recorded]] = defaultdict(list)
    for one in recorded:
        lists[one.rank, one.step].append(one)
    spent: defaultdict[ActionKind, list[float]] = defaultdict(list)
    for listed in lists.values():
        listed.sort(key=lambda one: one.start)
        for one, following in pairwise(listed):
            if one.action.kind in _HOST_KINDS:
                spent[one.action.kind].append(following.start - one.start)
            elif one.action.kind is ActionKind.WAIT and one.end - one.start <= _BLOCKED_S:
                spent[ActionKind.WAIT].append(one.end - one.start)
    return {kind: statistics.mean(values) for kind, values in spent.items()}


def read_timeline(document: Any) -> list[Recorded]:
    """Slices of a Chrome trace that `disagmoe train` wrote. Raises InputError where it is none."""
    try:
        rows = document["traceEvents"]
        return [
            Recorded(
                int(row["pid"]),
                Action.parse(row["name"]),
                int(row["args"]["step"]),
                row["ts"] * 1e-6,
                (row["ts"] + row["dur"]) * 1e-6,
                int(row["args"].get("bytes", 0)),
            )
            for row in rows
            if row.get("ph") == "X"
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not a timeline of `disagmoe train`: {type(error).__name__} {error}") from None


def plan_program(
    plan: Plan, durations: Durations, *, training: bool = True, queueing: Queueing = Queueing.HOST
) -> Program:
    """Raises InputError where a duration is missing, or the plan has no training schedule to simulate."""
    schedule = plan.training if training else plan.forward_only
    if schedule is None:
        raise InputError("the plan has no training schedule: it was made for a graph without gradients")
    _check_durations(schedule, durations)
    legs: dict[str, tuple[Leg, ...]] = {}
    for transfer in plan.transfers:
        src, dst = (plan.topology.group_of_stage(s) for s in (transfer.src, transfer.dst))
        ends: tuple[Link, ...] = ((str(src), "out"), (str(dst), "in"))
        alone: tuple[Link, ...] = ((transfer.name, "alone"),)
        taken = durations.messages.get(transfer.name, 0.0)
        legs[transfer.name] = (Leg(taken, ends if durations.shares_links else alone),) if taken else ()
    return Program(
        schedule=schedule,
        transfers=plan.transfers,
        seconds=durations.seconds,
        messages=legs,
        links={link: 1.0 for found in legs.values() for leg in found for link in leg.links},
        host=durations.host,
        queueing=queueing,
    )


def message_bytes(plan: Plan, transfer: Transfer) -> float:
    """Expected bytes between whole groups for one micro-batch; for the mean one, where micro-batches differ by a sample."""
    topology = plan.topology
    ends = [topology.group_of_stage(s) for s in (transfer.src, transfer.dst)]
    if transfer.kind is TransferKind.COLLECTIVE:
        ranks = len(topology.ranks_of_group(ends[0]))
        return 2 * (ranks - 1) * transfer.nbytes()
    if transfer.kind is TransferKind.P2P:
        return plan.mean_fill * topology.attention_group_size * transfer.nbytes()
    experts = next(s for s in (transfer.src, transfer.dst) if topology.role_of_stage(s) is Role.FFN)
    n_experts, ranks = plan.stages[experts].num_experts, topology.ffn_group_size
    assert n_experts is not None
    bounds = _token_bounds(plan, transfer)
    pairs = bounds.get("pairs", 0)
    tokens = bounds.get("rows", pairs)  # no de-duplication: everything has a row for each pair
    top_k = max(1, pairs // max(tokens, 1))
    rows = tokens * expected_copies(n_experts, min(top_k, n_experts), ranks) / ranks
    sizes = {"rows": round(rows), "pairs": round(pairs / ranks)}
    return plan.mean_fill * topology.attention_group_size * ranks * transfer.nbytes(sizes)


def _token_bounds(plan: Plan, transfer: Transfer) -> dict[str, int]:
    """Upper bounds of rows and pairs at a transfer's boundary; a combine has no pairs of its own."""
    boundary = transfer.name.split(".")[1]
    found: dict[str, int] = {}
    for other in plan.transfers:
        if other.name.split(".")[1] == boundary and other.kind is not TransferKind.COLLECTIVE:
            for spec in other.payload:
                found |= {dim.name: dim.upper_bound for dim in spec.shape if isinstance(dim, TokenDim)}
    return found


def _check_durations(schedule: Schedule, durations: Durations) -> None:
    for actions in schedule.actions.values():
        for action in actions:
            for part in action.parts or (action,):
                if part.kind in COMPUTE_KINDS and (part.kind, part.stage) not in durations.seconds:
                    raise InputError(
                        f"no duration of {part.stage}{part.kind}: the timeline is of another plan, or of no training step"
                    )
