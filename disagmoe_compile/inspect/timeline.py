"""What the ranks did, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

One process a rank, named by its role; one row a stream (more where its messages were in flight together); one
slice an action, named by the plan's text. An arrow leads from a SEND to the end of the RECV that it fed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind, Stream
from disagmoe_compile.plan.ir import Plan

_LANES_PER_STREAM = 1000  # row number = stream * this + lane; no rank has that many messages in flight


class TimedAction(Protocol):
    """One executed action, as `runtime.timeline.Event`. Times in seconds."""

    @property
    def action(self) -> str: ...
    @property
    def stream(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def step(self) -> int: ...


_Timed = TypeVar("_Timed", bound=TimedAction)


@dataclass(frozen=True, slots=True)
class _Placed:
    """An event with its parsed action and the row it is drawn on."""

    rank: int
    row: int
    action: Action
    event: TimedAction


def to_chrome(events_by_rank: Mapping[int, Sequence[TimedAction]], plan: Plan) -> dict[str, Any]:
    """The trace as a JSON-ready dict; times in microseconds from the earliest event of any rank."""
    origin = min((e.start for events in events_by_rank.values() for e in events), default=0.0)
    placed = [
        _Placed(rank, row, Action.parse(event.action), event)
        for rank, events in sorted(events_by_rank.items())
        for row, event in rows_of(events)
    ]
    rows: list[dict[str, Any]] = []
    for rank in sorted(events_by_rank):
        rows += _name_rows(rank, sorted({p.row for p in placed if p.rank == rank}), plan)
    rows += [_slice(p, origin) for p in placed]
    rows += _arrows(placed, origin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": plan.fingerprint, "schedule": (plan.training or plan.forward_only).name},
        "traceEvents": rows,
    }


def rows_of(events: Sequence[_Timed]) -> Iterator[tuple[int, _Timed]]:
    """The events of a rank by start, each with its row. Slices of one row must nest, but messages in flight overlap freely: each
    takes the first free lane of its stream.
    """
    busy_until: dict[Stream, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        stream = Stream(event.stream)
        lanes = busy_until[stream]
        lane = next((i for i, end in enumerate(lanes) if end <= event.start), len(lanes))
        lanes[lane : lane + 1] = [event.end]
        yield list(Stream).index(stream) * _LANES_PER_STREAM + lane, event


def row_name(row: int) -> str:
    """Of a row of `rows_of`: `comm_send`, and `comm_send +1` for what overlaps that."""
    stream, lane = divmod(row, _LANES_PER_STREAM)
    return str(list(Stream)[stream]) + (f" +{lane}" if lane else "")


def _name_rows(rank: int, rows: Sequence[int], plan: Plan) -> Iterator[dict[str, Any]]:
    group = plan.topology.group_of_rank(rank)
    stages = ",".join(plan.stages[s].name for s in plan.topology.stages_of_group(group))
    yield _meta(rank, "process_name", name=f"rank {rank} {group} [{stages}]")
    yield _meta(rank, "process_sort_index", sort_index=rank)
    for row in rows:
        yield _meta(rank, "thread_name", row, name=row_name(row))
        yield _meta(rank, "thread_sort_index", row, sort_index=row)


def _meta(rank: int, what: str, row: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": args}


def _slice(placed: _Placed, origin: float) -> dict[str, Any]:
    action, event = placed.action, placed.event
    args: dict[str, Any] = {"step": event.step, "stage": action.stage}
    if action.microbatch is not None:
        args["microbatch"] = action.microbatch
    if event.nbytes:
        args["bytes"] = event.nbytes
    return {
        "ph": "X",
        "pid": placed.rank,
        "tid": placed.row,
        "name": event.action,
        "cat": "compute" if action.kind in COMPUTE_KINDS else action.kind.value.lower(),
        "ts": _microseconds(event.start - origin),
        "dur": _microseconds(event.end - event.start),
        "args": args,
    }


def _arrows(placed: Sequence[_Placed], origin: float) -> Iterator[dict[str, Any]]:
    """One arrow from every sending rank to every receiving rank of a transfer of a step and micro-batch."""
    receives: dict[tuple[str | None, int | None, int], list[_Placed]] = defaultdict(list)
    for p in placed:
        if p.action.kind is ActionKind.RECV:
            receives[_message(p)].append(p)
    number = 0
    for sent in placed:
        if sent.action.kind is not ActionKind.SEND:
            continue
        for received in receives[_message(sent)]:
            number += 1
            arrow = {"name": sent.action.transfer, "cat": "transfer", "id": number}
            start, end = _microseconds(sent.event.start - origin), _microseconds(received.event.end - origin)
            yield {**arrow, "ph": "s", "pid": sent.rank, "tid": sent.row, "ts": start}
            yield {**arrow, "ph": "f", "bp": "e", "pid": received.rank, "tid": received.row, "ts": end}


def _message(placed: _Placed) -> tuple[str | None, int | None, int]:
    return placed.action.transfer, placed.action.microbatch, placed.event.step


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
