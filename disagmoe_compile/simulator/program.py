"""A lowered schedule with durations and bytes, and its tasks: what each action of each group comes after.

Three readings of a list (`Queueing`), from today's CPU runtime to an ideal GPU:
    host      the list is one queue, and every WAIT holds it up, that for a send buffer included. A message moves once it is sent
              AND its receive is posted (rendezvous, as gloo does), beside others; receives of dispatches are posted by a
              progress thread that takes them in list order, as the runtime's does
    list      compute runs one action at a time in list order; sends leave as soon as what they wait for has run, those to one
              group one after the other and those to another beside them (ProcessGroupNCCL has a stream for each pair of ranks),
              into buffers that are there already (one-sided writes, as DeepEP does)
    stream    as list, but each stream is a queue; forward and backward share the group's compute when both have work, so that two
              streams make no more FLOPs than one

An action that takes no time and waits for nothing (RECV, FREE) is no task: it happens when the one before it ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind, Stream
from disagmoe_compile.plan.ir import Direction, Schedule, Transfer, TransferKind
from disagmoe_compile.plan.sharing import Leg, Link, Number
from disagmoe_compile.plan.steps import Message, parts_of
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.plan.violation import grid
from disagmoe_compile.simulator.engine import Deadlock, Tasks, Times, run


class Queueing(StrEnum):
    HOST = "host"
    LIST = "list"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Program:
    """`seconds[kind, stage]` of a compute action; `pairs[(kind, stage), (kind, stage)]` of two at once in an OVERLAP (default:
    one after the other). `messages`: per transfer its legs, in bytes over links; `links`: bytes/s. `latency` is added to each
    message, `overhead` to each compute action, `host` (where `queueing` is host) to each other action by kind. Any unit of time
    and amount will do, if it is the same everywhere.
    """

    schedule: Schedule
    transfers: Sequence[Transfer]
    seconds: Mapping[tuple[ActionKind, int], Number]
    messages: Mapping[str, tuple[Leg, ...]] = field(default_factory=dict)
    links: Mapping[Link, Number] = field(default_factory=dict)
    pairs: Mapping[tuple[tuple[ActionKind, int], ...], Number] = field(default_factory=dict)
    latency: Number = 0
    overhead: Number = 0
    host: Mapping[ActionKind, Number] = field(default_factory=dict)
    queueing: Queueing = Queueing.LIST

    def __post_init__(self) -> None:
        if not self.schedule.lowered:
            raise PlanError(f"schedule {self.schedule.name} is compute-only: lower it before it is simulated")
        for what, value in (("latency", self.latency), ("overhead", self.overhead)):
            if value < 0:
                raise PlanError(f"{what} must not be negative, got {value}")
        for table in (self.seconds, self.pairs):
            for key, value in table.items():
                if not value >= 0:
                    raise PlanError(f"time of {key} must not be negative, got {value}")

    def duration(self, action: Action) -> Number:
        """Of a compute action or an OVERLAP of them."""
        if action.parts:
            pair = tuple((part.kind, part.stage) for part in action.parts)
            if pair in self.pairs:
                return self.pairs[pair] + self.overhead
            return sum((self.duration(part) for part in action.parts), start=0 * self.overhead)
        return self.seconds[action.kind, action.stage] + self.overhead


@dataclass(slots=True)
class Placed:
    """Where the actions of a schedule went. `task[group][k]` is the task of the k-th action of a group, or the last one before it
    (-1: none, it happens at once); `is_own[group][k]` whether the task is the action's own. `message`: the move of each message.
    """

    tasks: Tasks = field(default_factory=Tasks)
    task: dict[Group, list[int]] = field(default_factory=dict)
    is_own: dict[Group, list[bool]] = field(default_factory=dict)
    message: dict[Message, int] = field(default_factory=dict)
    reduction: dict[tuple[Group, int], int] = field(default_factory=dict)
    name: dict[int, tuple[Group, int]] = field(default_factory=dict)


def simulate_tasks(program: Program) -> tuple[Placed, Times]:
    """The tasks of a program and their times. Raises PlanError, with the cycle and the grid around it, on a deadlock."""
    placed = place(program)
    capacities = dict(program.links)
    if program.queueing is Queueing.STREAM:
        capacities |= {compute_link(group): 1 for group in program.schedule.actions}
    try:
        return placed, run(placed.tasks, capacities)
    except Deadlock as deadlock:
        raise _described(program, placed, deadlock) from None


def compute_link(group: Group) -> Link:
    """Compute as a link: what overlaps on it shares it."""
    return ("compute", str(group))


def place(program: Program) -> Placed:
    """Every list as tasks. O(actions)."""
    builder = _Builder(program)
    for group, actions in program.schedule.actions.items():
        builder.add_list(group, actions)
    for what, found in (("sent", builder.sends), ("received", builder.receives)):
        missing = sorted(set(builder.placed.message) - found)
        if missing:
            raise PlanError(
                f"schedule {program.schedule.name}: message {missing[0][0]} {missing[0][1]} is never {what}"
            )
    return builder.placed


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program, self.placed = program, Placed()
        self.tasks = self.placed.tasks
        self.transfers = {transfer.name: transfer for transfer in program.transfers}
        self.header: dict[Message, int] = {}
        self.sends: set[Message] = set()
        self.receives: set[Message] = set()
        self.is_host = program.queueing is Queueing.HOST
        self.is_stream = program.queueing is Queueing.STREAM
        self.receiver = {
            (action.transfer, action.microbatch): group
            for group, actions in program.schedule.actions.items()
            for action in actions
            if action.kind is ActionKind.RECV
        }

    def add_list(self, group: Group, actions: Sequence[Action]) -> None:
        last: dict[Hashable, int] = {}  # per queue its last task so far
        computed: dict[tuple[ActionKind, int, int | None], int] = {}
        listed: list[int] = []
        own: list[bool] = []
        self.placed.task[group], self.placed.is_own[group] = listed, own
        for action in actions:
            queue = self._queue(action)
            before = [last[queue]] if queue in last else []
            task = self._task(group, len(listed), action, before, computed, last)
            if task is not None:
                last[queue] = task
                self.placed.name[task] = (group, len(listed))
            listed.append(last.get(queue, -1))
            own.append(task is not None)

    def _queue(self, action: Action) -> Hashable:
        if self.is_stream:
            return action.stream
        return "sends" if action.stream is Stream.COMM_SEND and not self.is_host else "list"

    def _task(
        self,
        group: Group,
        position: int,
        action: Action,
        before: list[int],
        computed: dict[tuple[ActionKind, int, int | None], int],
        last: dict[Hashable, int],
    ) -> int | None:
        """The action's own task in its queue, if it has one; a message's move is a task beside it."""
        kind = action.kind
        if kind in COMPUTE_KINDS or kind is ActionKind.OVERLAP:
            task = self._compute(group, action, before)
            for part in parts_of(action):
                computed[part.kind, part.stage, part.microbatch] = task
            return task
        if kind is ActionKind.FREE:
            return self._on_host(kind, before)
        if kind is ActionKind.REDUCE_GRAD:
            return self._reduce(group, position, action, before)
        if kind is ActionKind.WAIT and action.after is not None:
            awaited = computed.get((action.after, action.stage, action.microbatch))
            if awaited is None or before == [awaited]:
                return None
            return self.tasks.add(after=[*before, awaited])
        assert action.transfer is not None and action.microbatch is not None
        key = (action.transfer, action.microbatch)
        message, transfer = self._message(key), self.transfers[action.transfer]
        if kind is ActionKind.SEND:
            self.sends.add(key)
            own = self._on_host(kind, before)
            before = before if own is None else [own]
            self.tasks.after[self.header.get(key, message)] += before
            if not self.is_host:
                channel = ("sent to", self.receiver.get(key))
                self.tasks.after[message] += [last[channel]] if channel in last else []
                last[channel] = message
            return own
        if kind is ActionKind.RECV:
            self.receives.add(key)
            own = self._on_host(kind, before)
            before = before if own is None else [own]
            if self.is_host:
                self.tasks.after[message] += self._posted(key, before, last)
            return own
        if transfer.dst == action.stage or self.is_host:
            delay = self.program.host.get(kind, 0) if self.is_host else 0
            return self.tasks.add(delay, after=[*before, message])
        return None  # beside the host nothing waits for a send buffer: its memory is free when the message is gone

    def _on_host(self, kind: ActionKind, before: list[int]) -> int | None:
        """A task of its own for an action that takes time of the host."""
        taken = self.program.host.get(kind, 0) if self.is_host else 0
        return self.tasks.add(taken, before) if taken else None

    def _compute(self, group: Group, action: Action, before: list[int]) -> int:
        seconds = self.program.duration(action)
        if self.is_stream and seconds:
            return self.tasks.add(after=before, legs=[Leg(seconds, (compute_link(group),))])
        return self.tasks.add(seconds, before)

    def _message(self, key: Message) -> int:
        """The task of its move; a dispatch also has a header, which tells the receiver to post."""
        if key not in self.placed.message:
            legs, transfer = self.program.messages.get(key[0], ()), self.transfers[key[0]]
            if (
                self.is_host
                and transfer.kind is TransferKind.DISPATCH
                and transfer.direction is Direction.FORWARD
            ):
                self.header[key] = self.tasks.add()
            self.placed.message[key] = self.tasks.add(self.program.latency, legs=legs)
        return self.placed.message[key]

    def _posted(self, key: Message, before: list[int], last: dict[Hashable, int]) -> list[int]:
        """What must have ended for the receive to be posted."""
        if key not in self.header:
            return before
        earlier = [last["progress"]] if "progress" in last else []
        last["progress"] = self.tasks.add(after=[*before, *earlier, self.header[key]])
        return [last["progress"]]

    def _reduce(self, group: Group, position: int, action: Action, before: list[int]) -> int | None:
        assert action.transfer is not None
        legs = self.program.messages.get(action.transfer, ())
        move = self.tasks.add(self.program.latency if legs else 0, before, legs)
        self.placed.reduction[group, position] = move
        return move if self.is_host else None


def _described(program: Program, placed: Placed, deadlock: Deadlock) -> PlanError:
    """The cycle in words, and the grid of the lists around it."""
    message_of = {task: message for message, task in placed.message.items()}
    around: dict[Group, int] = {}
    texts = []
    for task in deadlock.cycle:
        if task in placed.name:
            group, position = placed.name[task]
            around.setdefault(group, position)
            texts.append(f"{group} at {program.schedule.of(group)[position]} (step {position})")
        elif task in message_of:
            texts.append("message {} {}".format(*message_of[task]))
    text = " waits for ".join([*texts, texts[0]]) if texts else "a cycle"
    detail = grid(program.schedule, set(around.items()), around)
    return PlanError(f"schedule {program.schedule.name} deadlocks: {text}", [f"{text}\n{detail}"])
