"""The compute-only order shared by all generators: rounds of micro-batches through the stages.

Micro-batches go in groups of `interleave`. Round q takes group q forward through stages 0..2B and, beside it, group q-1 backward
through stages 2B..0, one backward then one forward at a time:

    round q:   for s = 0..2B:   B(2B-s, (q-1).0)  F(s, q.0)   B(2B-s, (q-1).1)  F(s, q.1)   ...

A backward comes before the forward beside it: what it frees, the forward may take. With q = 4p on p groups (L layers, p divides
L) an attention group so holds at most 4L + 4p activations of layers. In order (`in_order.py`) it is one less, and no order of
phases holds less: group 0 begins a round with q L/p = 4L of the old set; phase 0 adds the q = 4p of F(0, i); the first release is
B(2B-2p, 0), in phase 2p. Nor can group 0 alone put F(0, q-1) off until then, for p > 1: B(2B-2p, 0) needs B(2B-2p+1, 0) of FFN
group 0, in phase 2p - 1, and FFN group 0 has F(1, q-1) before it, in phase 1, which needs F(0, q-1): deadlock.

Read as one list over all stages this is a valid serial execution of the whole step: whatever an action needs comes earlier. Each
worker group takes its own stages out of it in that order, so a blocking execution can never deadlock, ragged groups included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from disagmoe_compile.plan.action import Action, ActionKind
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.ir import Schedule
from disagmoe_compile.plan.topology import Group, Topology

Pass = tuple[bool, int, int]  # is forward, stage, micro-batch


def interleaved(n_stages: int, n_microbatches: int, interleave: int) -> Iterator[Pass]:
    """Forward and backward passes of a training step, in the order above."""
    groups = _groups(n_microbatches, interleave)
    for forward, backward in zip([*groups, range(0)], [range(0), *groups]):
        for stage in range(n_stages):
            for i, j in zip_longest(forward, backward):
                if j is not None:
                    yield False, n_stages - 1 - stage, j
                if i is not None:
                    yield True, stage, i


def forwards(n_stages: int, n_microbatches: int, interleave: int) -> Iterator[Pass]:
    """Forward passes alone: group by group, stage by stage."""
    for group in _groups(n_microbatches, interleave):
        for stage in range(n_stages):
            for microbatch in group:
                yield True, stage, microbatch


def backwards(n_stages: int, n_microbatches: int, interleave: int) -> Iterator[Pass]:
    """Backward passes alone, each group from the last stage to the first."""
    for group in _groups(n_microbatches, interleave):
        for stage in reversed(range(n_stages)):
            for microbatch in group:
                yield False, stage, microbatch


@collector_paused()
def place(name: str, topology: Topology, passes: Iterator[Pass], split_weight_gradient: bool) -> Schedule:
    """Give every pass to the group of its stage.

    With `split_weight_gradient` a backward is I then W, so that lowering can send what I made before W runs. Stage 0 has no input
    gradient to hurry: its backward stays B.
    """
    actions: dict[Group, list[Action]] = {group: [] for group in topology.groups}
    for is_forward, stage, microbatch in passes:
        if is_forward:
            kinds = [ActionKind.FORWARD]
        elif split_weight_gradient and stage > 0:
            kinds = [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
        else:
            kinds = [ActionKind.BACKWARD]
        actions[topology.group_of_stage(stage)] += [Action(kind, stage, microbatch) for kind in kinds]
    return Schedule(name, lowered=False, actions={group: tuple(listed) for group, listed in actions.items()})


def default_interleave(topology: Topology, n_microbatches: int) -> int:
    """4p micro-batches keep p attention and p FFN groups busy both ways; never more than half, so that two groups overlap."""
    return max(1, min(4 * topology.attention_groups, -(-n_microbatches // 2)))


def checked_microbatches(n_microbatches: int, interleave: int | None) -> None:
    """Raise ValueError unless both are positive."""
    if n_microbatches < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, got {n_microbatches}")
    if interleave is not None and interleave < 1:
        raise ValueError(f"interleave must be at least one micro-batch, got {interleave}")


def _groups(n_microbatches: int, interleave: int) -> list[range]:
    return [range(i, min(i + interleave, n_microbatches)) for i in range(0, n_microbatches, interleave)]
