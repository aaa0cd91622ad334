"""What must have happened before what, over all groups: vector clocks on ordered queues.

Two views of one schedule:
  host order     each group's list is one queue, and every WAIT blocks it. The strictest reading (CPU): stuck here may hang.
  stream order   each stream of a group is a queue, ordered with others by WAIT alone (CUDA); what is unordered here is a race.
In both, a WAIT on the receiver comes after the SEND and after the receive was posted; a WAIT on the sender after the receive
was posted (rendezvous). The receive of a dispatch is posted by the receiver's progress thread, itself a queue: it takes the
headers in the order of the RECVs, so it gets to one only after all earlier dispatches were sent.

A SEND never blocks its own queue: transports send asynchronously.

Steps of one queue are ordered, so what happens before a step is one position per queue: its vector clock. With S steps, X of them
WAITs, and Q queues, clocks cost O(S + X*Q) and a question costs O(1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from disagmoe_compile.plan.ir import Direction, TransferKind
from disagmoe_compile.plan.steps import Message, Steps
from disagmoe_compile.plan.transfers import Routes


@dataclass(frozen=True, slots=True)
class Queues:
    """`nodes`: per queue its nodes in order; `after`: node -> nodes of other queues that must come before it.

    Nodes are step numbers, and above them one number per dispatch RECV for the progress thread's posting of it. `posted`: the
    node at which the receive of a message is known to be posted.
    """

    nodes: Mapping[Hashable, Sequence[int]]
    after: Mapping[int, Sequence[int]]
    posted: Mapping[Message, int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A queue that cannot go on: `node` is its next, `needs` has not happened and never will."""

    queue: Hashable
    node: int
    needs: int


class Clocks:
    """The vector clocks of queues. `blocked` lists a cycle of queues that wait for each other; empty where all nodes happened."""

    def __init__(self, queues: Queues) -> None:
        self._names = list(queues.nodes)
        self._lists = [queues.nodes[name] for name in self._names]
        size = 1 + max((node for nodes in self._lists for node in nodes), default=-1)
        self.queue_of = np.full(size, -1, np.int32)
        self.index_of = np.full(size, -1, np.int32)
        for q, nodes in enumerate(self._lists):
            self.queue_of[nodes] = q
            self.index_of[nodes] = np.arange(len(nodes))
        self._row_of = [-1] * size  # of each node that has happened, the row that holds its clock
        n_rows = len(self._lists) + len(queues.after)
        self.rows: npt.NDArray[np.int32] = np.full((n_rows, len(self._lists)), -1, np.int32)
        self.blocked = self._run(queues.after)

    def before(self, first: int, second: int) -> bool:
        """Whether `first` happens before `second`. Both must have happened."""
        q = self.queue_of[first]
        if q == self.queue_of[second]:
            return bool(self.index_of[first] < self.index_of[second])
        return bool(self.rows[self._row_of[second], q] >= self.index_of[first])

    def clock(self, node: int) -> npt.NDArray[np.int32]:
        """Per queue, in the order of the queues, the index of its last node known to happen before; -1 for none."""
        clock: npt.NDArray[np.int32] = self.rows[self._row_of[node]]
        return clock

    def _run(self, after: Mapping[int, Sequence[int]]) -> tuple[Blocked, ...]:
        """Let every queue run until it must wait; each node is visited once, each wait at most twice."""
        rows, row_of = self.rows, self._row_of
        queue_of, index_of = self.queue_of.tolist(), self.index_of.tolist()
        row_of_queue = list(range(len(self._lists)))
        next_row = len(self._lists)
        progress = [0] * len(self._lists)
        sleepers: defaultdict[int, list[int]] = defaultdict(list)
        runnable = list(range(len(self._lists)))
        while runnable:
            q = runnable.pop()
            nodes = self._lists[q]
            while progress[q] < len(nodes):
                node = nodes[progress[q]]
                needed = after.get(node)
                if needed is not None:
                    missing = next((n for n in needed if row_of[n] < 0), None)
                    if missing is not None:
                        sleepers[missing].append(q)
                        break
                    row = rows[next_row]
                    row[:] = rows[row_of_queue[q]]
                    for n in needed:
                        np.maximum(row, rows[row_of[n]], out=row)
                        if row[queue_of[n]] < index_of[n]:
                            row[queue_of[n]] = index_of[n]
                    row_of_queue[q] = next_row
                    next_row += 1
                row_of[node] = row_of_queue[q]
                progress[q] += 1
                runnable += sleepers.pop(node, ())
        return self._cycle({q: n for n, waiting in sleepers.items() for q in waiting}, progress)

    def _cycle(self, missing: Mapping[int, int], progress: Sequence[int]) -> tuple[Blocked, ...]:
        """Each blocked queue waits for the queue of the node it misses; some of them must form a cycle."""
        if not missing:
            return ()
        waits_for = nx.DiGraph([(q, int(self.queue_of[n])) for q, n in missing.items()])
        cycle = nx.find_cycle(waits_for)
        return tuple(Blocked(self._names[q], self._lists[q][progress[q]], missing[q]) for q, *_ in cycle)


def host_order(steps: Steps, routes: Routes) -> Queues:
    """Queues where every group's list is one queue."""
    return _order(steps, routes, steps.of_group, {})


def stream_order(steps: Steps, routes: Routes) -> Queues:
    """Queues per stream of a group; a WAIT for a compute event comes after it, if it was recorded earlier in the list."""
    queues: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, step in enumerate(steps.all):
        queues[step.group, step.action.stream].append(number)
    recorded: dict[int, list[int]] = {}
    for number in steps.events:
        action = steps.all[number].action
        assert action.after is not None and action.microbatch is not None
        found = steps.computes((action.after,), action.stage, action.microbatch)
        earlier = [n for n in found if steps.is_listed_before(n, number)]
        if earlier:
            recorded[number] = earlier
    return _order(steps, routes, queues, recorded)


def _order(
    steps: Steps,
    routes: Routes,
    queues: Mapping[Any, Sequence[int]],
    recorded: Mapping[int, list[int]],
) -> Queues:
    nodes: dict[Hashable, Sequence[int]] = dict(queues)
    after: dict[int, list[int]] = dict(recorded)
    posted, threads = _post_receives(steps, routes, after)
    nodes.update(threads)
    for message, waits in steps.arrivals.items():
        for wait in waits:
            listed = any(steps.is_listed_before(n, wait) for n in steps.receives[message])
            after[wait] = [*steps.sends[message], *((posted[message],) if listed else ())]
    for message, waits in steps.reuses.items():
        for wait in waits:
            after[wait] = [posted[message]] if message in posted else []
    return Queues(nodes, after, posted)


def _post_receives(
    steps: Steps, routes: Routes, after: dict[int, list[int]]
) -> tuple[dict[Message, int], dict[Hashable, list[int]]]:
    """Where each receive is posted, and the progress threads' queues; what the threads wait for is added to `after`."""
    posted: dict[Message, int] = {}
    dispatches: list[tuple[int, Message]] = []
    for message, receives in steps.receives.items():
        if not receives:
            continue
        transfer = routes.by_name[message[0]]
        posted[message] = receives[0]
        if transfer.kind is TransferKind.DISPATCH and transfer.direction is Direction.FORWARD:
            dispatches.append((receives[0], message))
    threads: defaultdict[Hashable, list[int]] = defaultdict(list)
    node = len(steps.all)
    for receive, message in sorted(dispatches):
        threads["progress", steps.all[receive].group].append(node)
        after[node] = [receive, *steps.sends.get(message, ())]
        posted[message] = node
        node += 1
    return posted, dict(threads)
