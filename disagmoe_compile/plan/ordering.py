"""Rules on order: what must come before what, in the lists and between streams, and that nobody waits for himself.

`dependencies` names every pair of steps of which one needs the other, with the rule that its absence breaks. A pair is checked
twice: in the list of its group (the order in which the host acts), and between streams, ordered by queues and WAITs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.completeness import Case
from disagmoe_compile.plan.happens_before import Clocks, host_order, stream_order
from disagmoe_compile.plan.ir import Direction, Transfer
from disagmoe_compile.plan.steps import BACKWARD_INPUTS, BACKWARD_WEIGHTS, Message
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.plan.violation import Violation, grid


class Dependency(NamedTuple):
    """Step `first` must come before step `second`; if not, `second` is at fault, as `why` says. `in_streams` is False where the
    host alone reads what `first` makes. (A tuple: a large plan has a million of them.)
    """

    first: int
    second: int
    rule: str
    why: str
    in_streams: bool = True


def dependencies(case: Case) -> Iterator[Dependency]:
    """Every dependency inside a group, O(number of actions) of them. Skips what completeness or matching already misses."""
    for message, transfer in case.messages:
        if len(case.steps.sends.get(message, ())) == 1 and len(case.steps.receives.get(message, ())) == 1:
            yield from _of_sender(case, message, transfer)
            yield from _of_receiver(case, message, transfer)
    yield from _of_compute(case)


def _of_sender(case: Case, message: Message, transfer: Transfer) -> Iterator[Dependency]:
    send = case.steps.sends[message][0]
    for producer in _computes(case, transfer.direction, transfer.src, message[1]):
        yield Dependency(producer, send, "order", "is sent before it is computed")
    for wait in case.steps.reuses.get(message, ()):
        yield Dependency(send, wait, "wait", "waits for a send buffer before it is sent", False)
        for free in case.steps.send_frees.get(message, ()):
            yield Dependency(wait, free, "free", "frees a send buffer before the WAIT on it")


def _of_receiver(case: Case, message: Message, transfer: Transfer) -> Iterator[Dependency]:
    receive, microbatch = case.steps.receives[message][0], message[1]
    source = case.routes.size_source(transfer)
    if source is not None:
        kind, name = source
        found = case.steps.sends if kind is ActionKind.SEND else case.steps.arrivals
        origins = found.get((name, microbatch), [])
        if len(origins) == 1:
            yield Dependency(origins[0], receive, "size-order", "is posted before its sizes are known", False)
    consumers = _computes(case, transfer.direction, transfer.dst, microbatch)
    for wait in case.steps.arrivals.get(message, ()):
        yield Dependency(receive, wait, "wait", "waits for a message before its RECV", False)
        for consumer in consumers:
            yield Dependency(wait, consumer, "wait", "uses a message before the WAIT for it")
    for free in case.steps.receive_frees.get(message, ()):
        for user in consumers or case.steps.arrivals.get(message, []):
            yield Dependency(user, free, "free", "frees a message before its last use")


def _of_compute(case: Case) -> Iterator[Dependency]:
    """Forward before backward, input before weight gradient, and what stages of one group hand on without a transfer."""
    topology, steps = case.plan.topology, case.steps
    for stage in range(topology.n_stages):
        heir = stage + 2
        is_local = (
            not stage % 2
            and heir < topology.n_stages
            and topology.group_of_stage(stage) == topology.group_of_stage(heir)
        )
        for i in range(case.plan.workload.n_microbatches):
            forward = _computes(case, Direction.FORWARD, stage, i)
            backward = _computes(case, Direction.BACKWARD, stage, i)
            for last in backward:
                for first in forward:
                    yield Dependency(first, last, "order", "runs before the forward of its stage")
                for weight in steps.computes((ActionKind.BACKWARD_WEIGHT,), stage, i):
                    yield Dependency(last, weight, "order", "runs before the input gradient of its stage")
            if is_local:
                for first in forward:
                    for last in _computes(case, Direction.FORWARD, heir, i):
                        yield Dependency(
                            first, last, "order", "runs before the stage that hands on to it in its group"
                        )
                for last in backward:
                    for first in _computes(case, Direction.BACKWARD, heir, i):
                        yield Dependency(
                            first,
                            last,
                            "order",
                            "runs before the stage that hands its gradient back in its group",
                        )


def _computes(case: Case, direction: Direction, stage: int, microbatch: int) -> list[int]:
    """The one compute action, or nothing where completeness has found none or several."""
    kinds = (ActionKind.FORWARD,) if direction is Direction.FORWARD else BACKWARD_INPUTS
    found = case.steps.computes(kinds, stage, microbatch)
    return found if len(found) == 1 else []


def check_lists(case: Case, found: Collection[Dependency]) -> Iterator[Violation]:
    """Every dependency holds in the list of its group."""
    for d in found:
        if _is_comparable(case, d) and not d.first < d.second:
            yield case.at(d.rule, d.second, f"{d.why}: must come after {case.steps.all[d.first].action}")


def check_streams(case: Case, found: Collection[Dependency]) -> Iterator[Violation]:
    """Every dependency that holds in the list also holds between streams. Silent while the streams wait for each other."""
    clocks = Clocks(stream_order(case.steps, case.routes))
    if clocks.blocked:
        return
    for d in found:
        if (
            d.in_streams
            and d.first < d.second
            and _is_comparable(case, d)
            and not clocks.before(d.first, d.second)
        ):
            first, second = case.steps.all[d.first].action, case.steps.all[d.second].action
            yield case.at(
                "race",
                d.second,
                f"no WAIT orders stream {second.stream} after {first} on stream {first.stream}",
            )
    yield from _check_reductions(case, clocks)


def _check_reductions(case: Case, clocks: Clocks) -> Iterator[Violation]:
    for numbers in case.steps.reductions.values():
        for number in numbers[:1]:
            stage = case.steps.all[number].action.stage
            for i in range(case.plan.workload.n_microbatches):
                for last in case.steps.computes(BACKWARD_WEIGHTS, stage, i):
                    if (
                        last < number
                        and case.steps.is_listed_before(last, number)
                        and not clocks.before(last, number)
                    ):
                        yield case.at(
                            "race", number, f"no WAIT orders it after {case.steps.all[last].action}"
                        )


def _is_comparable(case: Case, d: Dependency) -> bool:
    return case.steps.all[d.first].group is case.steps.all[d.second].group


def check_waits(case: Case) -> Iterator[Violation]:
    """Each message has one WAIT and one FREE on either side; each WAIT for a compute event comes after that compute."""
    group_of = case.plan.topology.group_of_stage
    steps = case.steps
    for message, transfer in case.messages:
        name, i = message
        sides = (
            (transfer.dst, steps.receives, steps.arrivals, steps.receive_frees),
            (transfer.src, steps.sends, steps.reuses, steps.send_frees),
        )
        for stage, posts, waits, frees in sides:
            if len(posts.get(message, ())) != 1:
                continue
            for rule, kind, found in (("wait", ActionKind.WAIT, waits), ("free", ActionKind.FREE, frees)):
                count = len(found.get(message, ()))
                if count != 1:
                    text = f"{stage}{kind}[{name}]{i} occurs {count} times, must occur once"
                    yield case.missing(rule, group_of(stage), text)
    for number in steps.events:
        action = steps.all[number].action
        assert action.after is not None and action.microbatch is not None
        recorded = steps.computes((action.after,), action.stage, action.microbatch)
        if not recorded and _is_whole(case, action.stage, action.microbatch):
            yield case.at(
                "wait", number, f"waits for {action.after} of stage {action.stage}, which never runs"
            )
        elif recorded and not any(steps.is_listed_before(n, number) for n in recorded):
            yield case.at(
                "wait", number, f"waits for {action.after} of stage {action.stage} before it is recorded"
            )


def _is_whole(case: Case, stage: int, microbatch: int) -> bool:
    """Whether forward and backward are there, so that a missing compute action is not already reported as such."""
    forward = case.steps.computes((ActionKind.FORWARD,), stage, microbatch)
    input_gradient = case.steps.computes(BACKWARD_INPUTS, stage, microbatch)
    weight_gradient = case.steps.computes(BACKWARD_WEIGHTS, stage, microbatch)
    return bool(forward and (not case.is_training or (input_gradient and weight_gradient)))


def check_deadlock(case: Case) -> Iterator[Violation]:
    """In host order, with rendezvous, every group gets to the end of its list."""
    queues = host_order(case.steps, case.routes)
    blocked = Clocks(queues).blocked
    if not blocked:
        return
    names = {node: message for message, node in queues.posted.items()}
    around: dict[Group, int] = {}
    texts = []
    for b in blocked:
        node = b.node
        if node >= len(case.steps.all):  # a progress thread: show the RECV that it serves
            node = case.steps.receives[names[node]][0]
        step = case.steps.all[node]
        around.setdefault(step.group, step.position)
        texts.append(f"{step.group} at {step.action} needs {_needed(case, names, b.needs)}")
    first = case.steps.all[min(n for n in (b.node for b in blocked) if n < len(case.steps.all))]
    yield Violation(
        "deadlock",
        f"{case.schedule.name}: groups wait for each other: " + "; ".join(texts),
        first.group,
        first.position,
        grid(case.schedule, set(around.items()), around),
    )


def _needed(case: Case, names: dict[int, Message], node: int) -> str:
    if node >= len(case.steps.all):
        name, microbatch = names[node]
        return f"the receive of {name} {microbatch} to be posted"
    step = case.steps.all[node]
    return f"{step.action} (step {step.position} of {step.group})"
