"""Every action of a schedule as a numbered step, and where to find it. Shared by lowering and validation.

An OVERLAP becomes one step per part (all at its position in the list): its parts are independent, so running them one after the
other is one of the orders it allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.plan.transfers import Routes

BACKWARD_INPUTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)  # make the gradient of a stage's inputs
BACKWARD_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)  # make the gradient of its parameters

Message = tuple[str, int]  # transfer, micro-batch


@dataclass(frozen=True, slots=True)
class Step:
    """`position` is the index in the group's list. Steps of one list share one Group object, so `is` compares groups."""

    group: Group
    position: int
    action: Action


@dataclass(frozen=True, slots=True)
class Steps:
    """A step's number is its index in `all`; `of_group` has each group's in host order. The rest finds steps by what they do.

    `arrivals` are WAITs on the receiver, `reuses` WAITs on the sender; `events` WAITs for a compute event.
    """

    all: list[Step] = field(default_factory=list)
    of_group: dict[Group, range] = field(default_factory=dict)
    compute: defaultdict[tuple[ActionKind, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    sends: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    receives: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    arrivals: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    reuses: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    receive_frees: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    send_frees: defaultdict[Message, list[int]] = field(default_factory=lambda: defaultdict(list))
    events: list[int] = field(default_factory=list)
    reductions: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def computes(self, kinds: Iterable[ActionKind], stage: int, microbatch: int) -> list[int]:
        """Steps that compute any of `kinds` for this stage and micro-batch."""
        return [n for kind in kinds for n in self.compute.get((kind, stage, microbatch), ())]

    def is_listed_before(self, first: int, second: int) -> bool:
        """Whether both are of one group and `first` comes earlier in its list."""
        a, b = self.all[first], self.all[second]
        return a.group is b.group and first < second


def parts_of(action: Action) -> tuple[Action, ...]:
    """The compute actions of an OVERLAP, or the action itself."""
    return action.parts or (action,)


def number_steps(schedule: Schedule, routes: Routes) -> Steps:
    """Number and index the steps of a schedule. Actions on unknown transfers are numbered but not indexed. O(actions)."""
    steps = Steps()
    for group, actions in schedule.actions.items():
        start = len(steps.all)
        for step in _steps_of(group, actions):
            _file(steps, len(steps.all), step.action, routes)
            steps.all.append(step)
        steps.of_group[group] = range(start, len(steps.all))
    return steps


def _steps_of(group: Group, actions: Iterable[Action]) -> Iterator[Step]:
    for position, action in enumerate(actions):
        for part in parts_of(action):
            yield Step(group, position, part)


def _file(steps: Steps, number: int, action: Action, routes: Routes) -> None:
    kind, name, microbatch = action.kind, action.transfer, action.microbatch
    if kind is ActionKind.REDUCE_GRAD and name is not None:
        steps.reductions[name].append(number)
    elif name is not None and microbatch is not None:
        transfer = routes.by_name.get(name)
        if transfer is None:
            return
        on_receiver = transfer.dst == action.stage
        if kind is ActionKind.SEND:
            steps.sends[name, microbatch].append(number)
        elif kind is ActionKind.RECV:
            steps.receives[name, microbatch].append(number)
        elif kind is ActionKind.WAIT:
            (steps.arrivals if on_receiver else steps.reuses)[name, microbatch].append(number)
        else:
            (steps.receive_frees if on_receiver else steps.send_frees)[name, microbatch].append(number)
    elif action.after is not None:
        steps.events.append(number)
    elif microbatch is not None:
        steps.compute[kind, action.stage, microbatch].append(number)
