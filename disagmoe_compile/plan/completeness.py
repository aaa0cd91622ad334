"""Rules on which actions a schedule must have, and where: nothing missing, nothing twice, everything on its own group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagmoe_compile.plan.action import COMPUTE_KINDS, Action, ActionKind
from disagmoe_compile.plan.ir import Direction, Plan, Schedule, Transfer, TransferKind
from disagmoe_compile.plan.steps import BACKWARD_INPUTS, BACKWARD_WEIGHTS, Message, Step, Steps, parts_of
from disagmoe_compile.plan.structure import reduced_stages
from disagmoe_compile.plan.topology import Group, Role
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.plan.violation import Violation


@dataclass(frozen=True, slots=True)
class Case:
    """One schedule under validation, with all that the rules look up."""

    plan: Plan
    schedule: Schedule
    routes: Routes
    steps: Steps
    is_training: bool

    @property
    def messages(self) -> Iterator[tuple[Message, Transfer]]:
        """Every message that this schedule must move."""
        for transfer in self.plan.transfers:
            if transfer.kind is TransferKind.COLLECTIVE:
                continue
            if self.is_training or transfer.direction is Direction.FORWARD:
                for microbatch in range(self.plan.workload.n_microbatches):
                    yield (transfer.name, microbatch), transfer

    def at(self, rule: str, number: int, message: str) -> Violation:
        """A violation of a step, which is named behind the message."""
        step = self.steps.all[number]
        where = f"{self.schedule.name}: {message} ({step.action}, step {step.position} of {step.group})"
        return Violation(rule, where, step.group, step.position)

    def missing(self, rule: str, group: Group | None, message: str) -> Violation:
        return Violation(rule, f"{self.schedule.name}: {message}", group)


def check_placement(case: Case) -> Iterator[Violation]:
    """Every action is on the group of its stage, and names a stage, micro-batch and transfer that the plan has."""
    topology, n_microbatches = case.plan.topology, case.plan.workload.n_microbatches
    owner = [topology.group_of_stage(stage) for stage in range(topology.n_stages)]
    for number, step in enumerate(case.steps.all):
        action = step.action
        if action.stage >= len(owner):
            yield case.at("placement", number, f"there is no stage {action.stage}")
        elif action.microbatch is not None and action.microbatch >= n_microbatches:
            yield case.at("placement", number, f"there is no micro-batch {action.microbatch}")
        elif owner[action.stage] != step.group:
            yield case.at("placement", number, f"stage {action.stage} runs on {owner[action.stage]}")
        else:
            fault = _transfer_fault(action, case.routes, case.is_training)
            if fault:
                yield case.at("placement", number, fault)


def _transfer_fault(action: Action, routes: Routes, is_training: bool) -> str | None:
    if action.transfer is None:
        return None
    transfer = routes.by_name.get(action.transfer)
    if transfer is None:
        return f"there is no transfer {action.transfer}"
    if not is_training and transfer.direction is Direction.BACKWARD:
        return f"{transfer.name} is a backward transfer in a schedule without backward"
    if (transfer.kind is TransferKind.COLLECTIVE) != (action.kind is ActionKind.REDUCE_GRAD):
        return f"{transfer.name} is a {transfer.kind}"
    ends = {
        ActionKind.SEND: (transfer.src,),
        ActionKind.RECV: (transfer.dst,),
    }.get(action.kind, (transfer.src, transfer.dst))
    if action.stage not in ends:
        return f"{transfer.name} goes from stage {transfer.src} to stage {transfer.dst}"
    return None


def check_completeness(case: Case) -> Iterator[Violation]:
    """Every stage and micro-batch: F once and, training, B once or I and W once each. Stage 0 has no I."""
    topology = case.plan.topology
    for stage in range(topology.n_stages):
        for microbatch in range(case.plan.workload.n_microbatches):
            found = {k: len(case.steps.compute.get((k, stage, microbatch), ())) for k in COMPUTE_KINDS}
            f, b = found[ActionKind.FORWARD], found[ActionKind.BACKWARD]
            i, w = found[ActionKind.BACKWARD_INPUT], found[ActionKind.BACKWARD_WEIGHT]
            whole = (b, i, w) == (1, 0, 0)
            split = (b, i, w) == (0, 1, 1) and stage > 0
            if f != 1 or not (whole or split if case.is_training else b == i == w == 0):
                expected = "F once" + (
                    ", and B once" + (" or I and W once each" if stage else "")
                    if case.is_training
                    else " and no backward"
                )
                yield case.missing(
                    "completeness",
                    topology.group_of_stage(stage),
                    f"stage {stage}, micro-batch {microbatch} has F x{f}, B x{b}, I x{i}, W x{w}; expected {expected}",
                )


def check_matching(case: Case) -> Iterator[Violation]:
    """Every message is sent exactly once and received exactly once."""
    group_of = case.plan.topology.group_of_stage
    for message, transfer in case.messages:
        name, microbatch = message
        for kind, stage, found in (
            (ActionKind.SEND, transfer.src, case.steps.sends.get(message, ())),
            (ActionKind.RECV, transfer.dst, case.steps.receives.get(message, ())),
        ):
            if len(found) != 1:
                yield case.missing(
                    "matching",
                    group_of(stage),
                    f"{stage}{kind}[{name}]{microbatch} occurs {len(found)} times, must occur once",
                )


def check_reductions(case: Case) -> Iterator[Violation]:
    """One REDUCE_GRAD per attention stage that owns parameters with replicas, after everything that adds to these gradients."""
    expected = reduced_stages(case.plan) if case.is_training else []
    group_of = case.plan.topology.group_of_stage
    last_gradient = _last_weight_gradients(case.steps)
    for name, numbers in case.steps.reductions.items():
        if case.steps.all[numbers[0]].action.stage not in expected:
            yield case.at("reduce-grad", numbers[0], f"nothing to reduce for {name}")
    for stage in expected:
        group = group_of(stage)
        names = [t.name for t in case.plan.transfers if t.kind is TransferKind.COLLECTIVE and t.src == stage]
        numbers = [n for name in names for n in case.steps.reductions.get(name, ())]
        if len(numbers) != 1:
            yield case.missing(
                "reduce-grad",
                group,
                f"gradients of stage {stage} are reduced {len(numbers)} times, must be once",
            )
            continue
        owned = set(case.plan.stages[stage].owned_fqns)
        adders = [s.index for s in case.plan.stages if s.index == stage or not owned.isdisjoint(s.param_fqns)]
        for adder in adders:
            last = last_gradient.get((group, adder), -1)
            if last > numbers[0]:
                yield case.at(
                    "reduce-grad", last, f"adds to gradients of stage {stage} after they were reduced"
                )


def _last_weight_gradients(steps: Steps) -> dict[tuple[Group, int], int]:
    """Of each group and stage the last step that adds to the gradients of its parameters."""
    return {
        (step.group, step.action.stage): number
        for number, step in enumerate(steps.all)
        if step.action.kind in BACKWARD_WEIGHTS
    }


def check_overlaps(case: Case) -> Iterator[Violation]:
    """Parts of an OVERLAP do not depend on each other: of one micro-batch, only W may run beside another stage's action."""
    for group, actions in case.schedule.actions.items():
        for position, action in enumerate(actions):
            for k, part in enumerate(action.parts):
                for other in action.parts[:k]:
                    if _dependent(part, other):
                        text = f"{case.schedule.name}: {other} and {part} depend on each other in {action}"
                        yield Violation("order", f"{text}, step {position} of {group}", group, position)


def _dependent(one: Action, other: Action) -> bool:
    if one.microbatch != other.microbatch:
        return False
    return one.stage == other.stage or ActionKind.BACKWARD_WEIGHT not in (one.kind, other.kind)


def check_residency(case: Case) -> Iterator[Violation]:
    """Activations that a group holds at once, from F to the end of B or W, stay within `resident_limit`."""
    if not case.is_training:
        return
    for numbers in case.steps.of_group.values():
        held = 0
        for number in numbers:
            held += _held_by(case.steps.all[number])
            if held > case.plan.resident_limit:
                yield case.at(
                    "memory",
                    number,
                    f"holds {held} activations at once, resident_limit is {case.plan.resident_limit}",
                )
                break


def _held_by(step: Step) -> int:
    if step.action.kind is ActionKind.FORWARD:
        return 1
    return -1 if step.action.kind in BACKWARD_WEIGHTS else 0


def peak_residency(schedule: Schedule) -> dict[Group, int]:
    """The most (stage, micro-batch) activations each group holds at once in a training schedule, lowered or not."""
    return _peaks(schedule, kept=lambda _: 1, made_again=lambda _: 0)


def peak_activation_bytes(plan: Plan) -> dict[Group, float]:
    """The most bytes that a rank of each group keeps for backwards at once, where routing shares tokens out evenly."""
    if plan.training is None:
        return dict.fromkeys(plan.topology.groups, 0.0)
    held = _peaks(
        plan.training,
        kept=lambda stage: plan.stages[stage].activation_bytes,
        made_again=lambda stage: plan.stages[stage].second_forward_bytes,
    )
    ranks = {g: plan.topology.ffn_group_size if g.role is Role.FFN else 1 for g in held}
    return {group: nbytes / ranks[group] for group, nbytes in held.items()}


def _peaks(
    schedule: Schedule, *, kept: Callable[[int], int], made_again: Callable[[int], int]
) -> dict[Group, int]:
    """`kept` of a stage is held from its F to the end of B or W, `made_again` from when its backward begins."""
    peaks: dict[Group, int] = {}
    for group, actions in schedule.actions.items():
        held = peak = 0
        for part in (part for action in actions for part in parts_of(action)):
            if part.kind is ActionKind.FORWARD:
                held += kept(part.stage)
            elif part.kind in BACKWARD_INPUTS:
                held += made_again(part.stage)
            peak = max(peak, held)
            if part.kind in BACKWARD_WEIGHTS:
                held -= kept(part.stage) + made_again(part.stage)
        peaks[group] = peak
    return peaks
