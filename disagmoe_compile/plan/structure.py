"""Rules on what a plan is made of, before any order: its stages, its transfers, its sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from disagmoe_compile.plan.ir import Direction, Plan, Transfer, TransferKind
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.plan.violation import Violation


def check_stages(plan: Plan) -> Iterator[Violation]:
    """Stages are numbered 0..2B; every FFN rank has an expert; a parameter has one owner, on the group of its users."""
    topology = plan.topology
    indices = [stage.index for stage in plan.stages]
    if indices != list(range(topology.n_stages)):
        yield Violation("stages", f"stages are {indices}, the topology needs 0 to {topology.n_stages - 1}")
    for stage in plan.stages:
        if stage.num_experts is not None and stage.num_experts < topology.ffn_group_size:
            yield Violation(
                "experts",
                f"stage {stage.index} has {stage.num_experts} experts for {topology.ffn_group_size} FFN ranks: "
                f"ffn_group_size must be at most {stage.num_experts}",
            )
    owners = Counter(fqn for stage in plan.stages for fqn in stage.owned_fqns)
    for fqn in sorted(fqn for fqn, count in owners.items() if count > 1):
        stages = [stage.index for stage in plan.stages if fqn in stage.owned_fqns]
        yield Violation("stages", f"parameter {fqn} is owned by stages {stages}: it must have one owner")
    yield from _check_sharing(plan)


def _check_sharing(plan: Plan) -> Iterator[Violation]:
    """All users of an owned parameter are on the group of its owner: no gradient crosses groups."""
    group_of, known = plan.topology.group_of_stage, range(plan.topology.n_stages)
    stages = [stage for stage in plan.stages if stage.index in known]
    owner = {fqn: stage.index for stage in stages for fqn in stage.owned_fqns}
    for stage in stages:
        for fqn in stage.param_fqns:
            if fqn in owner and group_of(owner[fqn]) != group_of(stage.index):
                yield Violation(
                    "stages",
                    f"parameter {fqn} is used by stage {stage.index} on {group_of(stage.index)} but owned by stage "
                    f"{owner[fqn]} on {group_of(owner[fqn])}: its gradient cannot cross groups",
                )


def check_workload(plan: Plan) -> Iterator[Violation]:
    """A micro-batch is as large as it must be for attention ranks x micro-batches of them to hold the global batch."""
    workload, members = plan.workload, plan.topology.attention_group_size
    largest = -(-workload.global_batch_size // (members * workload.n_microbatches))
    if workload.microbatch_size != largest:
        yield Violation(
            "workload",
            f"global batch {workload.global_batch_size} over attention_group_size {members} x n_microbatches "
            f"{workload.n_microbatches} makes micro-batches of {largest} samples, not of microbatch_size "
            f"{workload.microbatch_size}",
        )


def check_transfers(plan: Plan) -> Iterator[Violation]:
    """Every boundary has exactly the transfers that it needs, between the right stages, mirrored where there is a backward."""
    for name, count in Counter(transfer.name for transfer in plan.transfers).items():
        if count > 1:
            yield Violation("transfers", f"{count} transfers are called {name}: names must be unique")
    for transfer in plan.transfers:
        yield from _check_ends(plan, transfer)
        if transfer.backward_of is not None:
            yield from _check_mirror(plan, transfer)
    counts = Counter((t.kind, t.direction, t.src, t.dst) for t in plan.transfers)
    for boundary in range(plan.topology.n_boundaries):
        yield from _check_boundary(plan, boundary, counts)
    if plan.training is not None:
        yield from _check_reductions(plan)


def _check_ends(plan: Plan, transfer: Transfer) -> Iterator[Violation]:
    """Forward, dispatch goes 2b -> 2b+1, combine 2b+1 -> 2b+2, residual 2b -> 2b+2."""
    first, last = transfer.src, transfer.dst
    if not (0 <= first < plan.topology.n_stages and 0 <= last < plan.topology.n_stages):
        yield Violation(
            "transfers",
            f"{transfer.name} goes from stage {first} to {last}, there are {plan.topology.n_stages}",
        )
        return
    if transfer.direction is Direction.BACKWARD:
        first, last = last, first
    distance, parity = {
        TransferKind.DISPATCH: (1, 0),
        TransferKind.COMBINE: (1, 1),
        TransferKind.P2P: (2, 0),
        TransferKind.COLLECTIVE: (0, 0),
    }[transfer.kind]
    if last - first != distance or first % 2 != parity:
        yield Violation(
            "transfers",
            f"{transfer.name} is a {transfer.direction} {transfer.kind} from stage {transfer.src} to {transfer.dst}, "
            "which are not the stages such a transfer joins",
        )


def _check_mirror(plan: Plan, transfer: Transfer) -> Iterator[Violation]:
    forward = next((t for t in plan.transfers if t.name == transfer.backward_of), None)
    if forward is None or (forward.kind, forward.src, forward.dst) != (
        transfer.kind,
        transfer.dst,
        transfer.src,
    ):
        yield Violation(
            "transfers",
            f"{transfer.name} (stage {transfer.src} to {transfer.dst}) does not mirror a forward {transfer.backward_of}",
        )


def _check_boundary(
    plan: Plan, boundary: int, counts: Counter[tuple[TransferKind, Direction, int, int]]
) -> Iterator[Violation]:
    a, f, following = 2 * boundary, 2 * boundary + 1, 2 * boundary + 2
    crosses = plan.topology.group_of_stage(a) != plan.topology.group_of_stage(following)
    backwards = (0, 0) if plan.training is None else (1, 1)
    expected = [
        (TransferKind.DISPATCH, Direction.FORWARD, a, f, (1, 1)),
        (TransferKind.COMBINE, Direction.FORWARD, f, following, (1, 1)),
        (TransferKind.P2P, Direction.FORWARD, a, following, (1, 1) if crosses else (0, 0)),
        (TransferKind.COMBINE, Direction.BACKWARD, following, f, backwards),
        (TransferKind.DISPATCH, Direction.BACKWARD, f, a, backwards),
        # what attention hands on need not require gradients
        (
            TransferKind.P2P,
            Direction.BACKWARD,
            following,
            a,
            (0, 1) if crosses and plan.training is not None else (0, 0),
        ),
    ]
    for kind, direction, src, dst, (least, most) in expected:
        count = counts[kind, direction, src, dst]
        if not least <= count <= most:
            wanted = str(least) if least == most else f"{least} or {most}"
            yield Violation(
                "transfers",
                f"{count} {direction} {kind} transfers from stage {src} to stage {dst}, expected {wanted}",
            )


def _check_reductions(plan: Plan) -> Iterator[Violation]:
    """One collective per attention stage that owns parameters, if there are replicas to sum over."""
    reduced = [t.src for t in plan.transfers if t.kind is TransferKind.COLLECTIVE]
    expected = reduced_stages(plan)
    if sorted(reduced) != expected:
        yield Violation(
            "transfers",
            f"gradient reductions for stages {sorted(reduced)}, but stages {expected} own parameters with replicas",
        )


def reduced_stages(plan: Plan) -> Sequence[int]:
    """Attention stages whose gradients are summed over the replicas of their group."""
    if plan.topology.attention_group_size == 1 or plan.training is None:
        return []
    return sorted(stage.index for stage in plan.stages if stage.role is Role.ATTENTION and stage.owned_fqns)
