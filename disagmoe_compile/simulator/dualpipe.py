"""DualPipe (DeepSeek-V3, arXiv 2412.19437): micro-batches enter at both ends, and the forward of one runs beside the backward of
another. Phase by phase as its authors' `step()`.

Rank r of p holds stage r of direction 0 (stages 0..p-1) and stage 2p-1-r of direction 1 (stages p..2p-1, from rank p-1 to 0).
Seen from a rank, `near` is the direction that enters at the end it is closer to, `far` the other. With h = distance to that
end, H = p / 2 and n micro-batches each way:

    1   2 (H-1-h)   F near
    2   h + 1       F near, F far
    3   H-1-h       I far, W, F far                     (no wait between I and W: the weight gradients fill the bubble)
    4   n-p+h+1     F near with B far, F far with B near
    5   H-1-h       B far, F far with B near
    6   h + 1       B far, B near; I instead of B from the middle on, W put off
    7   H-1-h       W, I near
    8   h + 1       W
"""

from __future__ import annotations

from collections import deque

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.action import Action, ActionKind, overlap
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.simulator.pipelines import pipeline_rank


def dualpipe(ranks: int, n_microbatches: int) -> Schedule:
    """Compute-only. Half of the micro-batches go each way: 0, 1, .. n/2-1 in direction 0, the others in direction 1.

    Raises InputError unless `ranks` and `n_microbatches` are even and there are at least two micro-batches a rank.
    """
    if ranks < 2 or ranks % 2:
        raise InputError(f"dualpipe needs an even number of ranks of at least 2, got {ranks}")
    if n_microbatches % 2 or n_microbatches < 2 * ranks:
        raise InputError(
            f"dualpipe needs an even number of at least 2 x ranks = {2 * ranks} micro-batches, got {n_microbatches}"
        )
    actions: dict[Group, tuple[Action, ...]] = {}
    for rank in range(ranks):
        actions[pipeline_rank(rank)] = tuple(_Rank(rank, ranks, n_microbatches).actions())
    return Schedule("dualpipe", lowered=False, actions=actions)


def chains(ranks: int) -> list[range]:
    """The stages of each direction in order."""
    return [range(ranks), range(ranks, 2 * ranks)]


class _Rank:
    def __init__(self, rank: int, ranks: int, n_microbatches: int) -> None:
        self.half, self.ranks, self.each_way = ranks // 2, ranks, n_microbatches // 2
        self.distance = min(rank, ranks - 1 - rank)
        stages, microbatches = (rank, 2 * ranks - 1 - rank), (0, self.each_way)
        near = 0 if rank < self.half else 1
        self.stage = (stages[near], stages[1 - near])
        self.forwards = [microbatches[near], microbatches[1 - near]]
        self.backwards = list(self.forwards)
        self.weights: deque[Action] = deque()
        self.list: list[Action] = []

    def actions(self) -> list[Action]:
        near, far = 0, 1
        inner = self.half - 1 - self.distance
        is_middle = inner == 0
        for _ in range(2 * inner):
            self.list.append(self.forward(near))
        for _ in range(self.distance + 1):
            self.list += [self.forward(near), self.forward(far)]
        for _ in range(inner):
            self.input_gradient(far)
            self.weight()
            self.list.append(self.forward(far))
        for k in range(self.each_way - self.ranks + self.distance + 1):
            if k == 0 and is_middle:
                self.list += [self.forward(near), self.backward(far)]
            else:
                self.list.append(overlap(self.forward(near), self.backward(far)))
            self.list.append(overlap(self.forward(far), self.backward(near)))
        for _ in range(inner):
            self.list.append(self.backward(far))
            self.list.append(overlap(self.forward(far), self.backward(near)))
        self.last_backwards(near, far)
        for _ in range(inner):
            self.weight()
            self.input_gradient(near)
        while self.weights:
            self.weight()
        return self.list

    def last_backwards(self, near: int, far: int) -> None:
        middle = (self.distance + 1) // 2
        puts_off = False
        for k in range(self.distance + 1):
            for direction, is_odd in ((far, True), (near, False)):
                if k == middle and (self.distance % 2 == 1) == is_odd:
                    puts_off = True
                if puts_off:
                    self.input_gradient(direction)
                else:
                    self.list.append(self.backward(direction))

    def forward(self, direction: int) -> Action:
        return Action(ActionKind.FORWARD, self.stage[direction], self._next(self.forwards, direction))

    def backward(self, direction: int) -> Action:
        return Action(ActionKind.BACKWARD, self.stage[direction], self._next(self.backwards, direction))

    def input_gradient(self, direction: int) -> None:
        microbatch = self._next(self.backwards, direction)
        self.list.append(Action(ActionKind.BACKWARD_INPUT, self.stage[direction], microbatch))
        self.weights.append(Action(ActionKind.BACKWARD_WEIGHT, self.stage[direction], microbatch))

    def weight(self) -> None:
        self.list.append(self.weights.popleft())

    @staticmethod
    def _next(counters: list[int], direction: int) -> int:
        counters[direction] += 1
        return counters[direction] - 1
