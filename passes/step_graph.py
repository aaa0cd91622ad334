"""The whole training step of all worker groups as one FX graph, made from the lowered schedule, for people to look at.

Dynamo's graph is the forward of one process. What the ranks do in a step (forward stages, loss seed, input and
weight gradients, sends and receives both ways) is in the schedule's lists; here each action becomes a node, in an
order that respects every list and every wait between groups. `node.meta` has `action`, `group`, `stream`, and for
communication the `transfer`. Data edges lead from what makes a value to what reads it, through m2n_send and
m2n_recv; a WAIT for an arrival is where its value becomes readable, so it is the m2n_recv.

Running the graph computes nothing: every node returns the text of its action, m2n nodes pass on what they are given,
and the result is what the step's last actions return.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from disagmoe_compile.errors import PlanError
from disagmoe_compile.passes.m2n_ops import m2n_recv, m2n_send
from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.happens_before import host_order
from disagmoe_compile.plan.ir import Direction, Plan, TransferKind
from disagmoe_compile.plan.steps import BACKWARD_INPUTS, BACKWARD_WEIGHTS, Steps, number_steps
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.plan.transfers import Routes


def forward_stage(*inputs: object, action: str) -> str:
    """F: a stage's forward for one micro-batch."""
    return action


def backward_stage(*inputs: object, action: str) -> str:
    """B: a stage's full backward."""
    return action


def input_gradient(*inputs: object, action: str) -> str:
    """I: the gradients of a stage's inputs."""
    return action


def weight_gradient(*inputs: object, action: str) -> str:
    """W: the gradients of a stage's parameters."""
    return action


def post_receive(*inputs: object, action: str) -> str:
    """RECV: buffers stand ready; nothing has arrived."""
    return action


def wait_event(*inputs: object, action: str) -> str:
    """WAIT for a compute event, or for a send buffer to be free again."""
    return action


def free_buffers(*inputs: object, action: str) -> str:
    """FREE: the buffers of a transfer."""
    return action


def reduce_gradients(*inputs: object, action: str) -> str:
    """REDUCE_GRAD: sums gradients over the replicas of a group."""
    return action


def loss_seed() -> str:
    """The incoming gradient of the loss, one per denominator, from the whole batch."""
    return "seed"


_FUNCTIONS = {
    ActionKind.FORWARD: forward_stage,
    ActionKind.BACKWARD: backward_stage,
    ActionKind.BACKWARD_INPUT: input_gradient,
    ActionKind.BACKWARD_WEIGHT: weight_gradient,
    ActionKind.RECV: post_receive,
    ActionKind.WAIT: wait_event,
    ActionKind.FREE: free_buffers,
    ActionKind.REDUCE_GRAD: reduce_gradients,
}


def step_graph(plan: Plan) -> fx.GraphModule:
    """One node per action of the plan's training schedule, plus the loss seed.

    Raises PlanError for a plan without training, and for a schedule whose groups wait for each other.
    """
    schedule = plan.training
    if schedule is None:
        raise PlanError("the plan has no training schedule: it was made for a graph without gradients")
    routes = Routes(plan.transfers)
    steps = number_steps(schedule, routes)
    builder = _Builder(steps, routes, plan.topology)
    for number in _topological(steps, routes, schedule.name):
        builder.add(number)
    return builder.finish()


def _topological(steps: Steps, routes: Routes, name: str) -> list[int]:
    """Step numbers so that each comes after what its group lists before it and what it waits for; lowest number first."""
    queues = host_order(steps, routes)
    needs: defaultdict[int, int] = defaultdict(int)
    then: defaultdict[int, list[int]] = defaultdict(list)
    nodes: set[int] = set()
    for listed in queues.nodes.values():
        nodes.update(listed)
        for first, second in itertools.pairwise(listed):
            then[first].append(second)
            needs[second] += 1
    for node, before in queues.after.items():
        for first in before:
            then[first].append(node)
            needs[node] += 1
    ready = [node for node in nodes if not needs[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for following in then[node]:
            needs[following] -= 1
            if not needs[following]:
                heapq.heappush(ready, following)
    if len(order) != len(nodes):
        stuck = min(nodes - set(order))
        action = steps.all[stuck].action if stuck < len(steps.all) else "a progress thread"
        raise PlanError(f"schedule {name} cannot run: groups wait for each other, first at {action}")
    return [node for node in order if node < len(steps.all)]  # above are the progress threads' postings


class _Builder:
    def __init__(self, steps: Steps, routes: Routes, topology: Topology) -> None:
        self.steps, self.routes, self.topology = steps, routes, topology
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.seed: fx.Node | None = None

    def add(self, number: int) -> None:
        step = self.steps.all[number]
        action = step.action
        if action.kind is ActionKind.SEND:
            node = self.graph.call_function(m2n_send, self._sent(action), {"transfer": action.transfer})
        elif number in self.steps.arrivals[self._message(action)]:
            sends = self._made(self.steps.sends[self._message(action)])
            node = self.graph.call_function(m2n_recv, tuple(sends), {"transfer": action.transfer})
        else:
            inputs = self._inputs(action)
            node = self.graph.call_function(_FUNCTIONS[action.kind], tuple(inputs), {"action": str(action)})
        node.meta = {"action": str(action), "group": str(step.group), "stream": action.stream}
        if action.transfer is not None:
            node.meta["transfer"] = self.routes.by_name[action.transfer]
        self.nodes[number] = node

    def finish(self) -> fx.GraphModule:
        last = {step.group: self.nodes[number] for number, step in enumerate(self.steps.all)}
        self.graph.output(tuple(last.values()))
        self.graph.lint()
        return fx.GraphModule({}, self.graph, class_name="TrainingStep")

    @staticmethod
    def _message(action: Action) -> tuple[str, int]:
        return (action.transfer or "", -1 if action.microbatch is None else action.microbatch)

    def _made(self, numbers: Iterable[int]) -> list[fx.Node]:
        return [self.nodes[number] for number in numbers if number in self.nodes]

    def _sent(self, action: Action) -> tuple[fx.Node, ...]:
        """The compute whose outputs a SEND takes: the stage's forward, or the gradient of its inputs."""
        assert action.transfer is not None and action.microbatch is not None, "a SEND names both"
        is_forward = self.routes.by_name[action.transfer].direction is Direction.FORWARD
        kinds = (ActionKind.FORWARD,) if is_forward else BACKWARD_INPUTS
        return tuple(self._made(self.steps.computes(kinds, action.stage, action.microbatch)))

    def _inputs(self, action: Action) -> list[fx.Node]:
        if action.kind is ActionKind.REDUCE_GRAD:
            return self._made(
                number
                for number, step in enumerate(self.steps.all)
                if step.action.kind in BACKWARD_WEIGHTS and step.action.stage == action.stage
            )
        microbatch = action.microbatch
        assert microbatch is not None, "every other action has a micro-batch"
        if action.after is not None:
            return self._made(self.steps.computes((action.after,), action.stage, microbatch))
        if action.kind is ActionKind.FORWARD:
            return self._arrived(action, Direction.FORWARD) + self._handed(action, -2, (ActionKind.FORWARD,))
        if action.kind in BACKWARD_INPUTS:
            own = self._made(self.steps.computes((ActionKind.FORWARD,), action.stage, microbatch))
            if action.stage == self.topology.n_stages - 1:
                return [*own, self._seed()]
            return own + self._arrived(action, Direction.BACKWARD) + self._handed(action, 2, BACKWARD_INPUTS)
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return self._made(self.steps.computes((ActionKind.BACKWARD_INPUT,), action.stage, microbatch))
        return []

    def _arrived(self, action: Action, direction: Direction) -> list[fx.Node]:
        messages = [(t.name, action.microbatch) for t in self.routes.into(action.stage, direction)]
        return [n for m in messages if m[1] is not None for n in self._made(self.steps.arrivals[m[0], m[1]])]

    def _handed(self, action: Action, offset: int, kinds: Iterable[ActionKind]) -> list[fx.Node]:
        """What the neighbouring attention stage of the same group hands over without a transfer."""
        neighbour = action.stage + offset
        if action.stage % 2 or not 0 <= neighbour < self.topology.n_stages or action.microbatch is None:
            return []
        direction = Direction.FORWARD if offset < 0 else Direction.BACKWARD
        if any(t.kind is TransferKind.P2P for t in self.routes.into(action.stage, direction)):
            return []
        return self._made(self.steps.computes(kinds, neighbour, action.microbatch))

    def _seed(self) -> fx.Node:
        if self.seed is None:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                self.seed = self.graph.call_function(loss_seed)
            self.seed.meta = {"action": "seed", "group": "", "stream": None}
        return self.seed
