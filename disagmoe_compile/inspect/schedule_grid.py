"""A schedule on a common clock: which action of which group falls into which slot, and that as a table in text.

    ranks  group        lane     0    1    2     3
    0-1    attention.0  compute  0F0  0F1        2F0
                        send     D0.0 D0.1
    2-3    ffn.0        compute            1F0  1F1

The clock counts slots, not seconds: a stage's forward or backward for one micro-batch takes one, so does a message on its way,
and everything else takes none. What a list must wait for moves it to a later slot (`host_order`: the strictest reading).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind
from disagmoe_compile.plan.happens_before import Queues, host_order
from disagmoe_compile.plan.ir import Direction, Plan, Schedule, TransferKind
from disagmoe_compile.plan.steps import Steps, number_steps
from disagmoe_compile.plan.topology import Group, Topology
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.plan.violation import grid

_LINE_WIDTH = 150
_TAKES_A_SLOT = COMPUTE_KINDS | {ActionKind.SEND, ActionKind.REDUCE_GRAD}
_LEGEND = """\
0F1: stage 0, forward of micro-batch 1. B: backward. I, W: gradients of its inputs, its weights. R: sums gradients over replicas.
D0.1, C0.1, P0.1: dispatch, combine, residual of boundary 0 and micro-batch 1 leave; with ' their gradients.
A column is a slot, not a time: a compute action takes one, a message takes one, nothing else does."""


class Lane(StrEnum):
    COMPUTE = "compute"
    SEND = "send"
    WAIT = "wait"  # with what is posted and freed


@dataclass(frozen=True, slots=True)
class Placed:
    """An action and the slot it runs in; `look` is what it is for a reader: forward, backward, weight, reduce, dispatch, combine,
    residual, wait, post or free."""

    action: Action
    slot: int
    lane: Lane
    look: str


def place(plan: Plan, schedule: Schedule) -> dict[Group, list[Placed]]:
    """Every action of every group, in the order of its list. Raises PlanError for a schedule whose groups wait for each other."""
    routes = Routes(plan.transfers)
    steps = number_steps(schedule, routes)
    starts = _starts(steps, host_order(steps, routes), schedule.name)
    return {
        group: [_placed(steps.all[number].action, starts[number], routes) for number in numbers]
        for group, numbers in steps.of_group.items()
    }


def schedule_text(plan: Plan, schedule: Schedule) -> str:
    """The table of slots, then the lists action by action."""
    placed = place(plan, schedule)
    rows = [row for group in placed for row in _rows(group, placed[group], plan)]
    n_slots = 1 + max((p.slot for actions in placed.values() for p in actions), default=0)
    head = (
        f"schedule {schedule.name}, {plan.workload.n_microbatches} micro-batches, "
        f"{n_slots} slots, {sum(map(len, placed.values()))} actions"
    )
    return "\n".join(
        [head, _LEGEND, "", *_blocks(rows, n_slots), "Every action, in order:", "", grid(schedule), ""]
    )


def rank_range(topology: Topology, group: Group) -> str:
    ranks = topology.ranks_of_group(group)
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _starts(steps: Steps, queues: Queues, name: str) -> dict[int, int]:
    """Node -> slot. Each queue runs until it must wait for a node that has no slot yet."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    clock: defaultdict[Hashable, int] = defaultdict(int)
    progress: defaultdict[Hashable, int] = defaultdict(int)
    sleepers: defaultdict[int, list[Hashable]] = defaultdict(list)
    runnable = list(queues.nodes)
    while runnable:
        queue = runnable.pop()
        nodes = queues.nodes[queue]
        while progress[queue] < len(nodes):
            node = nodes[progress[queue]]
            needed = queues.after.get(node, ())
            missing = next((n for n in needed if n not in ends), None)
            if missing is not None:
                sleepers[missing].append(queue)
                break
            starts[node] = clock[queue] = max([clock[queue], *(ends[n] for n in needed)])
            kind = steps.all[node].action.kind if node < len(steps.all) else None
            ends[node] = starts[node] + (kind in _TAKES_A_SLOT)
            if kind is not ActionKind.SEND:  # a message travels while its sender goes on
                clock[queue] = ends[node]
            progress[queue] += 1
            runnable += sleepers.pop(node, ())
    if any(sleepers.values()):
        raise PlanError(f"schedule {name} cannot run: its groups wait for each other")
    return starts


def _placed(action: Action, slot: int, routes: Routes) -> Placed:
    kind = action.kind
    if kind in COMPUTE_KINDS or kind is ActionKind.REDUCE_GRAD:
        looks = {
            ActionKind.FORWARD: "forward",
            ActionKind.BACKWARD_WEIGHT: "weight",
            ActionKind.REDUCE_GRAD: "reduce",
        }
        return Placed(action, slot, Lane.COMPUTE, looks.get(kind, "backward"))
    if kind is ActionKind.SEND:
        transfer = routes.by_name[action.transfer or ""]
        return Placed(
            action, slot, Lane.SEND, "residual" if transfer.kind is TransferKind.P2P else str(transfer.kind)
        )
    looks = {ActionKind.WAIT: "wait", ActionKind.RECV: "post", ActionKind.FREE: "free"}
    return Placed(action, slot, Lane.WAIT, looks[kind])


@dataclass(frozen=True, slots=True)
class _Row:
    head: tuple[str, str, str]
    cells: Mapping[int, str]


def _rows(group: Group, placed: Sequence[Placed], plan: Plan) -> list[_Row]:
    compute: defaultdict[int, list[str]] = defaultdict(list)
    sent: defaultdict[int, list[str]] = defaultdict(list)
    directions = {t.name: t.direction for t in plan.transfers}
    for one in placed:
        if one.lane is Lane.COMPUTE:
            short = f"{one.action.stage}R" if one.look == "reduce" else str(one.action).partition("@")[0]
            compute[one.slot].append(short)
        elif one.lane is Lane.SEND:
            sent[one.slot].append(_message(one, directions))
    first = _Row((rank_range(plan.topology, group), str(group), "compute"), _joined(compute))
    return [first, _Row(("", "", "send"), _joined(sent))]


def _joined(cells: Mapping[int, list[str]]) -> dict[int, str]:
    return {slot: "+".join(texts) for slot, texts in cells.items()}


def _message(one: Placed, directions: Mapping[str, Direction]) -> str:
    name = one.action.transfer or ""
    letter = {"dispatch": "D", "combine": "C", "residual": "P"}[one.look]
    prime = "'" if directions[name] is Direction.BACKWARD else ""
    return f"{letter}{name.rpartition('.')[2]}{prime}.{one.action.microbatch}"


def _blocks(rows: Sequence[_Row], n_slots: int) -> Iterable[str]:
    """Lines, broken into blocks of slots that fit a page."""
    heads = [("ranks", "group", "lane"), *(row.head for row in rows)]
    widths = [max(len(head[i]) for head in heads) for i in range(3)]
    columns = [[str(slot), *(row.cells.get(slot, "") for row in rows)] for slot in range(n_slots)]
    start = 0
    while start < n_slots:
        used, end = sum(widths) + 6, start
        while end < n_slots and (end == start or used + 2 + max(map(len, columns[end])) <= _LINE_WIDTH):
            used += 2 + max(map(len, columns[end]))
            end += 1
        for i, head in enumerate(heads):
            cells = [text.ljust(width) for text, width in zip(head, widths)]
            cells += [column[i].ljust(max(map(len, column))) for column in columns[start:end]]
            yield "  ".join(cells).rstrip()
        yield ""
        start = end
