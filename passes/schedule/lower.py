"""From a compute-only schedule to the one that runs: transfers, waits, frees and reductions, one small step each.

While it is lowered, a group's list is a list of blocks, one per compute action, in host order:

    [RECV, WAIT of what it needs]  [WAIT for its forward]  COMPUTE  [FREE what it used]  [WAIT[compute]@comm_send, SENDs]

so the weight gradient W, which needs and sends nothing, is a block of its own after the SENDs that its I feeds. The steps:

    add_transfers         what each compute action receives, waits for, frees and sends
    add_event_waits       order between streams of one group: sends after compute, backward after forward
    hoist_receives        post receives ahead of the compute actions before them
    add_grad_reductions   sum gradients over replicas, as soon as a stage's last one is made
    add_send_waits        give send buffers back as soon as this cannot block on a peer that depends on us
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind, Stream
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.happens_before import Clocks, host_order
from disagmoe_compile.plan.ir import Direction, Schedule, Transfer
from disagmoe_compile.plan.steps import BACKWARD_INPUTS, BACKWARD_WEIGHTS, number_steps, parts_of
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.plan.transfers import Routes

Blocks = list[list[Action]]


def lower(
    schedule: Schedule,
    topology: Topology,
    transfers: Sequence[Transfer],
    *,
    receive_ahead: int = 2,
    owned_stages: Collection[int],
) -> Schedule:
    """The lowered schedule. `owned_stages` own parameters; those of attention get a REDUCE_GRAD where there are replicas.

    Receives are posted up to `receive_ahead` compute actions early. Cost: O(S log S + X * G) for S steps, X of them WAITs, and G
    groups. Raises PlanError on a schedule that is lowered already, that has other groups than the topology, or whose order
    cannot run (groups that wait for each other).
    """
    if schedule.lowered:
        raise PlanError(f"schedule {schedule.name} is lowered already: lower the compute-only schedule")
    if set(schedule.actions) != set(topology.groups):
        groups = ", ".join(map(str, sorted(schedule.actions)))
        raise PlanError(
            f"schedule {schedule.name} is for groups {groups}, the topology has {len(topology.groups)}"
        )
    with_replicas = topology.groups if topology.attention_group_size > 1 else ()
    reduced = {group: owned_stages for group in with_replicas if group.role is Role.ATTENTION}
    return lower_lists(schedule, transfers, receive_ahead=receive_ahead, reduced=reduced)


@collector_paused()
def lower_lists(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    *,
    receive_ahead: int = 2,
    reduced: Mapping[Group, Collection[int]] | None = None,
    release_sends: bool = True,
) -> Schedule:
    """`lower` for lists of any pipeline, its stages on any groups. `reduced`: per group the stages that get a REDUCE_GRAD.

    Without `release_sends` the last step is left out, half of the time: such lists can be simulated, not run.
    """
    if receive_ahead < 0:
        raise PlanError(f"receive_ahead must not be negative, got {receive_ahead}")
    routes = Routes(transfers)
    lowered: dict[Group, Blocks] = {}
    for group, computed in schedule.actions.items():
        blocks = add_transfers(computed, routes)
        blocks = add_event_waits(blocks, routes)
        blocks = hoist_receives(blocks, routes, receive_ahead)
        if reduced and group in reduced:
            blocks = add_grad_reductions(blocks, reduced[group])
        lowered[group] = blocks
    if release_sends:
        lowered = add_send_waits(schedule.name, lowered, routes)
    actions = {
        group: tuple(action for block in blocks for action in block) for group, blocks in lowered.items()
    }
    return Schedule(schedule.name, lowered=True, actions=actions)


def add_transfers(actions: Sequence[Action], routes: Routes) -> Blocks:
    """One block per compute action, with the transfers that end at it and start from it."""
    return [_block(action, routes) for action in actions]


def _block(action: Action, routes: Routes) -> list[Action]:
    block: list[Action] = []
    frees: list[Action] = []
    sends: list[Action] = []
    for part in parts_of(action):
        direction = _direction(part.kind)
        if direction is None:
            continue
        stream = Stream.FORWARD if direction is Direction.FORWARD else Stream.BACKWARD
        for transfer in routes.into(part.stage, direction):
            block.append(_on(ActionKind.RECV, part, transfer))
            block.append(_on(ActionKind.WAIT, part, transfer, stream))
            frees.append(_on(ActionKind.FREE, part, transfer, stream))
        sends += [_on(ActionKind.SEND, part, transfer) for transfer in routes.out_of(part.stage, direction)]
    return [*block, action, *frees, *sends]


def _direction(kind: ActionKind) -> Direction | None:
    """Which transfers a compute action takes part in; None for W, which takes part in none."""
    if kind is ActionKind.FORWARD:
        return Direction.FORWARD
    return Direction.BACKWARD if kind in BACKWARD_INPUTS else None


def _on(kind: ActionKind, part: Action, transfer: Transfer, stream: Stream | None = None) -> Action:
    return Action(kind, part.stage, part.microbatch, transfer=transfer.name, stream=stream)


def add_event_waits(blocks: Blocks, routes: Routes) -> Blocks:
    """The send stream waits for the compute that makes what is sent. The backward stream waits for the forward of the same stage
    where no received gradient proves it done (the head: everything else gets its gradient from a stage that needed its output).
    """
    waiting: Blocks = []
    for block in blocks:
        at = next(p for p, action in enumerate(block) if _is_compute(action))
        parts = parts_of(block[at])
        starts = [
            _event(part.stage, part.microbatch, ActionKind.FORWARD, Stream.BACKWARD)
            for part in parts
            if part.kind in BACKWARD_INPUTS and not routes.into(part.stage, Direction.BACKWARD)
        ]
        ends = [
            _event(part.stage, part.microbatch, part.kind, Stream.COMM_SEND)
            for part in parts
            if any(
                action.kind is ActionKind.SEND and action.stage == part.stage for action in block[at + 1 :]
            )
        ]
        first_send = next((p for p, a in enumerate(block) if a.kind is ActionKind.SEND), len(block))
        waiting.append([*block[:at], *starts, *block[at:first_send], *ends, *block[first_send:]])
    return waiting


def _event(stage: int, microbatch: int | None, after: ActionKind, stream: Stream) -> Action:
    return Action(ActionKind.WAIT, stage, microbatch, after=after, stream=stream)


def _is_compute(action: Action) -> bool:
    return action.kind in COMPUTE_KINDS or action.kind is ActionKind.OVERLAP


def hoist_receives(blocks: Blocks, routes: Routes, ahead: int) -> Blocks:
    """Move each RECV to the head of the block `ahead` compute actions earlier, but not above the action that fixes its sizes.

    Receives keep their order wherever none of them waits for a size; dispatches never do, and their order is what the progress
    thread and the validator rely on.
    """
    kept = [[action for action in block if action.kind is not ActionKind.RECV] for block in blocks]
    block_of = {action: k for k, block in enumerate(kept) for action in block if action.transfer is not None}
    heads: defaultdict[int, list[Action]] = defaultdict(list)
    behind: defaultdict[Action, list[Action]] = defaultdict(list)
    for k, block in enumerate(blocks):
        for receive in (action for action in block if action.kind is ActionKind.RECV):
            slot = max(k - ahead, 0)
            source = _size_source(receive, routes)
            if source is not None and block_of.get(source, -1) >= slot:
                behind[source].append(receive)
            else:
                heads[slot].append(receive)
    return [
        [*heads[k], *(moved for action in block for moved in (action, *behind.get(action, ())))]
        for k, block in enumerate(kept)
    ]


def _size_source(receive: Action, routes: Routes) -> Action | None:
    assert receive.transfer is not None
    source = routes.size_source(routes.by_name[receive.transfer])
    if source is None:
        return None
    kind, name = source
    transfer = routes.by_name[name]
    stage = transfer.src if kind is ActionKind.SEND else transfer.dst
    return Action(kind, stage, receive.microbatch, transfer=name)


def add_grad_reductions(blocks: Blocks, owned_stages: Collection[int]) -> Blocks:
    """REDUCE_GRAD of a stage right after the last block that makes a weight gradient of it, beside what is still to come."""
    last = {
        part.stage: k
        for k, block in enumerate(blocks)
        for action in block
        for part in parts_of(action)
        if part.kind in BACKWARD_WEIGHTS
    }
    reductions: defaultdict[int, list[Action]] = defaultdict(list)
    for stage in sorted(set(owned_stages) & set(last)):
        reductions[last[stage]].append(Action(ActionKind.REDUCE_GRAD, stage, transfer=f"grads.{stage}"))
    return [[*block, *reductions[k]] for k, block in enumerate(blocks)]


def add_send_waits(name: str, lowered: Mapping[Group, Blocks], routes: Routes) -> dict[Group, Blocks]:
    """WAIT and FREE of every SEND on its sender, at the end of the first block by which an arrival has proved the receive posted.

    Such a wait adds nothing to what already happens before it, so it can neither deadlock nor hold up a peer. It comes after the
    block's compute and sends, not before them: by then more of the message is gone. What nothing proves is waited for at the end.
    """
    flat = {group: tuple(action for block in blocks for action in block) for group, blocks in lowered.items()}
    schedule = Schedule(name, lowered=True, actions=flat)
    steps = number_steps(schedule, routes)
    queues = host_order(steps, routes)
    clocks = Clocks(queues)
    if clocks.blocked:
        stuck = "; ".join(
            f"{b.queue} at {steps.all[b.node].action}" for b in clocks.blocked if b.node < len(steps.all)
        )
        raise PlanError(f"the order of schedule {name} cannot run, groups wait for each other: {stuck}")

    waiting: dict[Group, Blocks] = {}
    for group, blocks in lowered.items():
        numbers = steps.of_group[group]
        arrivals = [n for n in numbers if n in queues.after]
        seen = np.array([clocks.clock(n) for n in arrivals], np.int32).reshape(-1, len(queues.nodes)).T.copy()
        block_ends = np.cumsum([len(block) for block in blocks])
        block_of = np.searchsorted(block_ends, [steps.all[n].position for n in numbers], side="right")
        ends: defaultdict[int, list[Action]] = defaultdict(list)
        for n in numbers:
            action = steps.all[n].action
            if action.kind is not ActionKind.SEND or action.transfer is None or action.microbatch is None:
                continue
            posted = queues.posted[action.transfer, action.microbatch]
            proof = (
                int(np.searchsorted(seen[clocks.queue_of[posted]], clocks.index_of[posted]))
                if arrivals
                else 0
            )
            at = len(blocks) - 1
            if proof < len(arrivals):
                at = int(block_of[max(n, arrivals[proof]) - numbers.start])
            ends[at] += [_release(kind, action) for kind in (ActionKind.WAIT, ActionKind.FREE)]
        waiting[group] = [[*block, *ends[k]] for k, block in enumerate(blocks)]
    return waiting


def _release(kind: ActionKind, send: Action) -> Action:
    return Action(kind, send.stage, send.microbatch, send.transfer, stream=Stream.COMM_SEND)
