"""Why no plan exists: which named constraints conflict, and which changes would make a plan possible.

A change is only suggested after it was tried: the problem with it is searched for any plan that fits, with the choices that need
least memory (one micro-batch in flight, recompute, sharding where they are allowed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.sizing_problem import Candidate, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_model import StepModel

_MOST_NODES = 4096


class InfeasiblePlan(InputError):
    """No plan satisfies all constraints. `conflicts`: their names; `changes`: what would help, each tried."""

    def __init__(self, message: str, conflicts: tuple[str, ...], changes: tuple[str, ...]) -> None:
        super().__init__(message)
        self.conflicts, self.changes = conflicts, changes


def explain_infeasible(problem: SizingProblem) -> InfeasiblePlan:
    """For a problem that has no plan."""
    conflicts, what = _conflict(problem)
    changes = tuple(_changes(problem))
    advice = ", or ".join(changes) if changes else "use another cluster or model"
    return InfeasiblePlan(
        f"no plan fits: {what} (conflict: {', '.join(conflicts)}); {advice}", conflicts, changes
    )


def is_possible(problem: SizingProblem) -> bool:
    """Whether any plan exists."""
    model = StepModel(problem)
    return any(model.fits(model.predict(c)) for c in _leanest(problem))


def _leanest(problem: SizingProblem) -> Iterator[Candidate]:
    """Of each layout the policies that need least memory."""
    for layout in problem.layouts():
        nics = next(problem.nics_of_groups(layout), None)
        if nics is None:
            continue
        policies = [k for k in problem.policies(layout.pipeline_groups) if k.in_flight == 1]
        most = max((k.recompute_attention, k.recompute_ffn, k.shard_optimizer) for k in policies)
        yield Candidate(layout, Policy(*most, in_flight=1), *nics)


def _conflict(problem: SizingProblem) -> tuple[tuple[str, ...], str]:
    """Names of the constraints, and the sentence that says what they ask for."""
    cluster, options, costs = problem.cluster, problem.options, problem.costs
    if not problem.depths():
        return (
            ("gpus", "pipeline_groups"),
            f"{options.pipeline_groups} pipeline groups of each kind do not share {cluster.gpus} GPUs evenly, two or more a "
            f"pair, with at most one group a MoE boundary ({costs.n_boundaries})",
        )
    sizes = [(p, m, n) for p in problem.depths() for m, n in problem.group_sizes(p)]
    if not sizes:
        fixed = [
            f"{name}={getattr(options, name)}"
            for name in ("pipeline_groups", "attention_group_size", "ffn_group_size", "whole_nodes")
            if getattr(options, name)
        ]
        return (
            ("gpus", "group_sizes", "experts"),
            f"no group sizes with pipeline_groups * (attention_group_size + ffn_group_size) = {cluster.gpus} GPUs and at most "
            f"{costs.num_experts} FFN ranks a group, one an expert ({', '.join(fixed) or 'none fixed'})",
        )
    if not problem.layouts():
        wanted = problem.workload.sequences(cluster.gpus)
        return (
            ("batch", "micro_batch_size", "group_sizes"),
            f"a global batch of {wanted} is not attention_group_size * micro_batch_size * n_microbatches for any of the "
            f"attention_group_size {_range([m for _, m, _ in sizes])} (micro_batch_size "
            f"{problem.workload.micro_batch_size or 'free'})",
        )
    if not any(True for _ in _leanest(problem)):
        return ("nics",), f"{cluster.nics} NICs are too few for an attention and an FFN group each"
    return _memory_conflict(problem)


def _memory_conflict(problem: SizingProblem) -> tuple[tuple[str, ...], str]:
    model = StepModel(problem)
    least: dict[str, tuple[float, Layout]] = {}
    for candidate in _leanest(problem):
        prediction = model.predict(candidate)
        for role, load in (("attention", prediction.attention), ("ffn", prediction.ffn)):
            if role not in least or load.memory_bytes < least[role][0]:
                least[role] = load.memory_bytes, candidate.layout
    has = problem.memory_bytes
    short = {role: bytes_ for role, (bytes_, _) in least.items() if bytes_ > has}
    what = "; ".join(
        f"needs {_gigabytes(bytes_)} on {_RANKS[role]} even at best (attention_group_size "
        f"{least[role][1].attention_group_size}, ffn_group_size {least[role][1].ffn_group_size}), "
        f"has {_gigabytes(has)}"
        for role, bytes_ in short.items()
    )
    if short:
        return tuple(f"memory[{role}]" for role in short), what
    return (
        ("memory[attention]", "memory[ffn]", "gpus"),
        "attention and FFN ranks fit the memory each for some group sizes, but not both for the same ones "
        f"({_gigabytes(least['attention'][0])} and {_gigabytes(least['ffn'][0])} at best, has {_gigabytes(has)})",
    )


_RANKS = {"attention": "attention ranks", "ffn": "FFN ranks"}


def _changes(problem: SizingProblem) -> Iterator[str]:
    options, workload = problem.options, problem.workload
    if options.ffn_group_size is not None:
        size = _least_ffn_size(problem)
        if size is not None:
            relation = ">=" if size > options.ffn_group_size else "<="
            yield f"{'raise' if relation == '>=' else 'lower'} ffn_group_size to {relation} {size}"
    for name in ("attention_group_size", "ffn_group_size", "pipeline_groups"):
        if getattr(options, name) is not None and is_possible(_with(problem, **{name: None})):
            yield f"leave out {name}"
    if options.recompute not in (None, "stage") and is_possible(_with(problem, recompute=None)):
        yield "recompute" if options.recompute == "none" else "recompute both sides"
    if options.shard_optimizer is False and is_possible(_with(problem, shard_optimizer=None)):
        yield "shard the optimizer state over the attention replicas"
    if options.whole_nodes and is_possible(_with(problem, whole_nodes=False)):
        yield "let groups share nodes"
    smallest = replace(problem, workload=replace(workload, micro_batch_size=1))
    if workload.micro_batch_size not in (None, 1) and is_possible(smallest):
        yield "lower micro_batch_size to 1"
    if workload.global_batch_size is not None:
        at_most = replace(
            workload,
            global_batch_size=None,
            sequences_per_gpu=max(1, workload.global_batch_size // problem.cluster.gpus),
        )
        if is_possible(replace(problem, workload=at_most)):
            yield f"give sequences_per_gpu={at_most.sequences_per_gpu}, which does not fix the batch"
    nodes = _least_nodes(problem)
    if nodes is not None:
        yield f"use {nodes} nodes"


def _with(problem: SizingProblem, **options: object) -> SizingProblem:
    return replace(problem, options=replace(problem.options, **options))  # type: ignore[arg-type]


def _least_ffn_size(problem: SizingProblem) -> int | None:
    """The size nearest to the wanted one that has a plan; with `attention_group_size` left to follow."""
    free = _with(problem, ffn_group_size=None, attention_group_size=None)
    model = StepModel(free)
    wanted = problem.options.ffn_group_size or 1
    fitting = {c.layout.ffn_group_size for c in _leanest(free) if model.fits(model.predict(c))}
    return min(fitting, key=lambda n: abs(n - wanted), default=None)


def _least_nodes(problem: SizingProblem) -> int | None:
    """Fewest nodes with a plan, by doubling and then halving the interval; None if even many do not help."""
    low = high = problem.cluster.nodes
    while True:
        high *= 2
        if high > _MOST_NODES or high > 64 * problem.cluster.nodes:
            return None
        if is_possible(_on(problem, high)):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_possible(_on(problem, middle)) else (middle, high)
    return high


def _on(problem: SizingProblem, nodes: int) -> SizingProblem:
    return replace(problem, cluster=problem.cluster.with_nodes(nodes))


def _range(sizes: list[int]) -> str:
    return f"{min(sizes)} to {max(sizes)}"


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB" if math.isfinite(amount) else "infinite memory"
