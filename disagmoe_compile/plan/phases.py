"""A training schedule as two lists for each group: the forward, and the backward that runs when the script calls `backward()`."""

from __future__ import annotations

from collections.abc import Mapping

from disagmoe_compile.errors import PlanError
from disagmoe_compile.plan.action import Action, ActionKind, Stream
from disagmoe_compile.plan.ir import Direction, Plan
from disagmoe_compile.plan.topology import Group

Lists = Mapping[Group, tuple[Action, ...]]


def phases(plan: Plan) -> tuple[Lists, Lists]:
    """The forward and the backward part of `plan.training`, which must have every forward action of a group before its first
    backward one. Nothing then reaches from one part into the other: a message is sent, awaited and freed in the phase of its
    direction.

    Raises PlanError naming the first action that is too late, and for a plan without training.
    """
    if plan.training is None:
        raise PlanError("the plan has no training schedule: it was made for a graph without gradients")
    directions = {transfer.name: transfer.direction for transfer in plan.transfers}
    first: dict[Group, tuple[Action, ...]] = {}
    second: dict[Group, tuple[Action, ...]] = {}
    for group, actions in plan.training.actions.items():
        found = [_phase(action, directions) for action in actions]
        start = next((k for k, phase in enumerate(found) if phase is Direction.BACKWARD), len(found))
        late = next((k for k in range(start, len(found)) if found[k] is Direction.FORWARD), None)
        if late is not None:
            raise PlanError(
                f"schedule {plan.training.name} runs {actions[late]} (step {late} of {group}) after the backward has begun "
                f"({actions[start]}, step {start}), and a loss computed outside the model needs every forward first: use a "
                "plan that was made for this model without a loss"
            )
        first[group], second[group] = actions[:start], actions[start:]
    return first, second


def _phase(action: Action, directions: Mapping[str, Direction]) -> Direction:
    if action.kind is ActionKind.REDUCE_GRAD:
        return Direction.BACKWARD
    if action.transfer is not None:
        return directions[action.transfer]
    if action.after is not None:
        is_forward = action.after is ActionKind.FORWARD and action.stream is not Stream.BACKWARD
        return Direction.FORWARD if is_forward else Direction.BACKWARD
    parts = action.parts or (action,)
    is_forward = all(part.kind is ActionKind.FORWARD for part in parts)
    return Direction.FORWARD if is_forward else Direction.BACKWARD
