"""Runs lowered lists with no tensors, to see whether they really work. Written apart from the validator, on purpose.

Everything that may happen next is a task; a seeded generator picks one at a time, so that other seeds see other timings. Values
appear when an action runs and disappear with FREE; whoever needs one that is not there fails. Two machines:

    host      each group runs its list in order and blocks in every WAIT (CPU)
    streams   each stream of a group runs its actions in order, and only WAITs block (CUDA)

A message travels once it was sent and its receive was posted (rendezvous). The receive of a dispatch is posted by a thread of the
receiving group, which takes one header after the other in the order of the RECVs.
"""

from __future__ import annotations

import random
from collections import defaultdict

from disagmoe_compile.plan import Action, ActionKind, Direction, Plan, Schedule, Transfer, TransferKind

BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


class Failure(Exception):
    """The schedule cannot run, or uses what is not there."""


class Machine:
    def __init__(self, plan: Plan, schedule: Schedule, mode: str, seed: int) -> None:
        self.plan, self.topology = plan, plan.topology
        self.transfers = {t.name: t for t in plan.transfers}
        self.random = random.Random(seed)
        self.computed: set[tuple[ActionKind, int, int]] = set()
        self.executed: set[tuple[object, int]] = set()
        self.sent: set[tuple[str, int]] = set()
        self.posted: set[tuple[str, int]] = set()
        self.travelling: list[tuple[str, int]] = []
        self.arrived: set[tuple[str, int]] = set()
        self.freed: set[tuple[str, int, int]] = set()
        self.headers: defaultdict[object, list[tuple[str, int]]] = defaultdict(list)
        self.queues: defaultdict[object, list[tuple[object, int, Action]]] = defaultdict(list)
        self.recorded: dict[tuple[object, ...], int] = {}
        for group, actions in schedule.actions.items():
            for position, action in enumerate(actions):
                self.recorded[group, action.kind, action.stage, action.microbatch] = position
                key = group if mode == "host" else (group, action.stream)
                self.queues[key].append((group, position, action))
        self.mode = mode

    def run(self) -> None:
        at = dict.fromkeys(self.queues, 0)
        while True:
            runnable = [
                q for q, k in at.items() if k < len(self.queues[q]) and self.ready(*self.queues[q][k])
            ]
            headers = [g for g, waiting in self.headers.items() if waiting and waiting[0] in self.sent]
            n_tasks = len(runnable) + len(self.travelling) + len(headers)
            if not n_tasks:
                break
            task = self.random.randrange(n_tasks)
            if task < len(runnable):
                group, position, action = self.queues[runnable[task]][at[runnable[task]]]
                self.execute(group, action)
                self.executed.add((group, position))
                at[runnable[task]] += 1
            elif task < len(runnable) + len(self.travelling):
                self.arrived.add(self.travelling.pop(task - len(runnable)))
            else:
                self.post(self.headers[headers[task - len(runnable) - len(self.travelling)]].pop(0))
        stuck = [str(self.queues[q][k][2]) for q, k in at.items() if k < len(self.queues[q])]
        if stuck:
            raise Failure(f"deadlock at {stuck}")
        self.check_end()

    def check_end(self) -> None:
        ends = {(t, i, s) for t, i in self.arrived for s in (self.transfers[t].src, self.transfers[t].dst)}
        if self.sent != self.arrived or self.freed != ends:
            raise Failure(f"lost or leaked: {self.sent ^ self.arrived} {self.freed ^ ends}")

    def ready(self, group: object, position: int, action: Action) -> bool:
        """Whether a WAIT lets its queue go on; everything else always does."""
        if action.kind is not ActionKind.WAIT:
            return True
        i = action.microbatch
        if action.after is not None:
            recorded = self.recorded.get((group, action.after, action.stage, i), position)
            return recorded >= position or (group, recorded) in self.executed
        message = (action.transfer, i)
        is_receiver = self.transfers[action.transfer].dst == action.stage
        return message in (self.arrived if is_receiver else self.posted)

    def need(self, condition: bool, action: Action, what: str) -> None:
        if not condition:
            raise Failure(f"{action}: {what}")

    def execute(self, group: object, action: Action) -> None:
        kind, i = action.kind, action.microbatch
        if kind is ActionKind.SEND:
            self.execute_send(action, self.transfers[action.transfer])
        elif kind is ActionKind.RECV:
            self.execute_receive(group, action, self.transfers[action.transfer])
        elif kind is ActionKind.FREE:
            self.execute_free(action, self.transfers[action.transfer])
        elif kind is ActionKind.REDUCE_GRAD:
            for j in range(self.plan.workload.n_microbatches):
                done = self.computed & {
                    (k, action.stage, j) for k in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
                }
                self.need(bool(done), action, f"gradient of {j} is missing")
        elif kind is not ActionKind.WAIT:
            self.execute_compute(action)
            self.need((kind, action.stage, i) not in self.computed, action, "runs twice")
            self.computed.add((kind, action.stage, i))

    def execute_send(self, action: Action, transfer: Transfer) -> None:
        message = (transfer.name, action.microbatch)
        kinds = (ActionKind.FORWARD,) if transfer.direction is Direction.FORWARD else BACKWARD
        self.need(self.has(kinds, action.stage, action.microbatch), action, "nothing to send yet")
        self.need(message not in self.sent, action, "sent twice")
        self.sent.add(message)
        if message in self.posted:
            self.travelling.append(message)

    def execute_receive(self, group: object, action: Action, transfer: Transfer) -> None:
        message = (transfer.name, action.microbatch)
        self.need(message not in self.posted and message not in self.headers[group], action, "posted twice")
        if self.mode == "host":
            self.need(self.sizes_known(transfer, action.microbatch), action, "sizes unknown")
        if transfer.kind is TransferKind.DISPATCH and transfer.direction is Direction.FORWARD:
            self.headers[group].append(message)
        else:
            self.post(message)

    def post(self, message: tuple[str, int]) -> None:
        self.posted.add(message)
        if message in self.sent:
            self.travelling.append(message)

    def sizes_known(self, transfer: Transfer, i: int) -> bool:
        kind, _, boundary = transfer.name.partition(".")
        residual = f"residual.{boundary}"
        if kind == "combine":
            return (
                (residual, i) in self.arrived
                if residual in self.transfers
                else (f"dispatch.{boundary}", i) in self.sent
            )
        if kind == "combine_bwd":
            return (f"dispatch.{boundary}", i) in self.arrived
        return kind != "dispatch_bwd" or (f"dispatch.{boundary}", i) in self.sent

    def execute_free(self, action: Action, transfer: Transfer) -> None:
        i, is_receiver = action.microbatch, transfer.dst == action.stage
        key = (transfer.name, i, action.stage)
        self.need(key not in self.freed, action, "freed twice")
        if is_receiver:
            kinds = (ActionKind.FORWARD,) if transfer.direction is Direction.FORWARD else BACKWARD
            self.need(self.has(kinds, action.stage, i), action, "freed before use")
        else:
            self.need((transfer.name, i) in self.sent & self.posted, action, "freed while being sent")
        self.freed.add(key)

    def execute_compute(self, action: Action) -> None:
        kind, stage, i = action.kind, action.stage, action.microbatch
        if kind is ActionKind.BACKWARD_WEIGHT:
            self.need(self.has((ActionKind.BACKWARD_INPUT,), stage, i), action, "no input gradient yet")
            return
        is_forward = kind is ActionKind.FORWARD
        direction = Direction.FORWARD if is_forward else Direction.BACKWARD
        for t in self.transfers.values():
            if t.dst == stage and t.direction is direction and t.kind is not TransferKind.COLLECTIVE:
                self.need((t.name, i) in self.arrived, action, f"{t.name} has not arrived")
                self.need((t.name, i, stage) not in self.freed, action, f"{t.name} is freed")
        if not is_forward:
            self.need(self.has((ActionKind.FORWARD,), stage, i), action, "no forward yet")
        neighbour = stage - 2 if is_forward else stage + 2
        if stage % 2 == 0 and self.are_local(stage, neighbour):
            kinds = (ActionKind.FORWARD,) if is_forward else BACKWARD
            self.need(self.has(kinds, neighbour, i), action, f"stage {neighbour} has handed on nothing")

    def are_local(self, stage: int, other: int) -> bool:
        group_of = self.topology.group_of_stage
        return 0 <= other < self.topology.n_stages and group_of(stage) == group_of(other)

    def has(self, kinds: tuple[ActionKind, ...], stage: int, i: int) -> bool:
        return any((kind, stage, i) in self.computed for kind in kinds)


def run(plan: Plan, schedule: Schedule, seeds: int = 1) -> None:
    """Run on both machines with `seeds` timings each. Raises Failure."""
    for seed in range(seeds):
        for mode in ("host", "streams"):
            Machine(plan, schedule, mode, seed).run()
