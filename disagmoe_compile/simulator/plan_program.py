"""A plan file, action by action, as a program: what the runtime will execute, with durations that are measured or estimated.

    measured     `Durations.of_timeline`: medians of a run's own timeline, per kind and stage; bytes/s of its messages
    estimated    FLOPs of the plan's stages on a cluster; a backward takes twice its forward, half of it for each gradient

The size of a routed message is the expected one: rows = T x expected copies of a token / N, pairs = T k / N.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind
from disagmoe_compile.plan.ir import Plan, Schedule, TokenDim, Transfer, TransferKind
from disagmoe_compile.plan.topology import Group, Role
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import expected_copies
from disagmoe_compile.simulator.engine import Leg
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
    """Seconds of compute actions by (kind, stage); bytes/s of one rank, one way; seconds a message takes beside its bytes."""

    seconds: Mapping[tuple[ActionKind, int], float]
    bytes_per_s: float
    latency: float

    @staticmethod
    def of_cluster(plan: Plan, cluster: Cluster) -> Durations:
        """Estimated: the plan's FLOPs at the cluster's speed."""
        speed = cluster.gpu.flops * cluster.efficiencies.gemm.value
        seconds: dict[tuple[ActionKind, int], float] = {}
        for stage in plan.stages:
            ranks = plan.topology.ffn_group_size if stage.role is Role.FFN else 1
            forward = stage.forward_flops / speed / ranks
            seconds |= {
                (ActionKind.FORWARD, stage.index): forward,
                (ActionKind.BACKWARD, stage.index): 2 * forward,
                (ActionKind.BACKWARD_INPUT, stage.index): forward,
                (ActionKind.BACKWARD_WEIGHT, stage.index): forward,
            }
        nic = cluster.nic_bytes_per_s * cluster.efficiencies.network.value
        return Durations(seconds, nic * cluster.nics_per_node / cluster.gpus_per_node, 0.0)

    @staticmethod
    def of_timeline(recorded: Iterable[Recorded]) -> Durations:
        """Measured: the median of each kind and stage, and messages by a line through (bytes, seconds) of the quickest ones.

        A message's slice begins when its receive is posted, so most of it may be waiting: only the quickest tenth counts.
        Raises InputError where a timeline has no compute actions.
        """
        found: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        moves: list[tuple[int, float]] = []
        for one in recorded:
            if one.action.kind in COMPUTE_KINDS:
                found[one.action.kind, one.action.stage].append(one.end - one.start)
            elif one.action.kind is ActionKind.RECV and one.nbytes:
                moves.append((one.nbytes, one.end - one.start))
        if not found:
            raise InputError("the timeline has no compute actions: record one with `disagmoe train`")
        seconds = {key: statistics.median(values) for key, values in found.items()}
        moves.sort(key=lambda move: move[1] / move[0])
        quick = moves[: max(1, len(moves) // 10)]
        rate = statistics.median(nbytes / taken for nbytes, taken in quick) if quick else float("inf")
        return Durations(seconds, rate, 0.0)


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
    links: dict[Any, float] = {}
    for group in plan.topology.groups:
        size = len(plan.topology.ranks_of_group(group))
        links |= {(str(group), way): size * durations.bytes_per_s for way in ("out", "in")}
    return Program(
        schedule=schedule,
        transfers=plan.transfers,
        seconds=durations.seconds,
        messages={t.name: _legs(plan, t) for t in plan.transfers},
        links=links,
        latency=durations.latency,
        queueing=queueing,
    )


def message_bytes(plan: Plan, transfer: Transfer) -> float:
    """Expected bytes between whole groups for one micro-batch."""
    topology = plan.topology
    ends = [topology.group_of_stage(s) for s in (transfer.src, transfer.dst)]
    if transfer.kind is TransferKind.COLLECTIVE:
        ranks = len(topology.ranks_of_group(ends[0]))
        return 2 * (ranks - 1) * transfer.nbytes()
    if transfer.kind is TransferKind.P2P:
        return topology.attention_group_size * transfer.nbytes()
    experts = next(s for s in (transfer.src, transfer.dst) if topology.role_of_stage(s) is Role.FFN)
    n_experts, ranks = plan.stages[experts].num_experts, topology.ffn_group_size
    assert n_experts is not None
    bounds = _token_bounds(plan, transfer)
    tokens = bounds.get("rows", 0)
    top_k = max(1, bounds.get("pairs", tokens) // max(tokens, 1))
    rows = tokens * expected_copies(n_experts, min(top_k, n_experts), ranks) / ranks
    sizes = {"rows": round(rows), "pairs": round(tokens * top_k / ranks)}
    return float(topology.attention_group_size * ranks * transfer.nbytes(sizes))


def _token_bounds(plan: Plan, transfer: Transfer) -> dict[str, int]:
    """Upper bounds of rows and pairs at a transfer's boundary; a combine has no pairs of its own."""
    boundary = transfer.name.split(".")[1]
    found: dict[str, int] = {}
    for other in plan.transfers:
        if other.name.split(".")[1] == boundary and other.kind is not TransferKind.COLLECTIVE:
            for spec in other.payload:
                found |= {dim.name: dim.upper_bound for dim in spec.shape if isinstance(dim, TokenDim)}
    return found


def _legs(plan: Plan, transfer: Transfer) -> tuple[Leg, ...]:
    amount = message_bytes(plan, transfer)
    src, dst = (plan.topology.group_of_stage(s) for s in (transfer.src, transfer.dst))
    return (Leg(amount, _ends(src, dst)),) if amount else ()


def _ends(src: Group, dst: Group) -> tuple[tuple[str, str], tuple[str, str]]:
    return (str(src), "out"), (str(dst), "in")


def _check_durations(schedule: Schedule, durations: Durations) -> None:
    for actions in schedule.actions.values():
        for action in actions:
            for part in action.parts or (action,):
                if part.kind in COMPUTE_KINDS and (part.kind, part.stage) not in durations.seconds:
                    raise InputError(
                        f"no duration of {part.stage}{part.kind}: the timeline is of another plan, or of no training step"
                    )
