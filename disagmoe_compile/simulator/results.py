"""One row of `disagmoe simulate`: a system with its choice, run through the engine. Simulated, never measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagmoe_compile.passes.schedule.list_schedule import Rehearsed
from disagmoe_compile.plan.collector import collector_paused
from disagmoe_compile.plan.sharing import Number
from disagmoe_compile.plan.topology import Group, Role
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.sizing_problem import TrainingState
from disagmoe_compile.planner.step_costs import ModelCosts
from disagmoe_compile.simulator.af_model import AFModel
from disagmoe_compile.simulator.bound import Bound, lower_bound
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster, mean_flops
from disagmoe_compile.simulator.program import Program
from disagmoe_compile.simulator.rival_model import RivalModel
from disagmoe_compile.simulator.timeline import Share, Timeline, least_bytes, simulate_program

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that weights and activations may fill; as the planner's."""


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds and bytes of one step. `exposed_s`: GPU mean; `critical`: the shares of the group that computes longest. `gpus`:
    those that the step is charged for, of two kinds of nodes all of them, with a rank or without.

    `peak_bytes`: of a rank, weights and optimizer included, per role (`worker` for a rival); `activation_bytes` without those.
    """

    schedule: str
    step_s: float
    tokens: int
    gpus: int
    exposed_s: float
    critical: Share
    bound: Bound
    mfu: float
    activation_bytes: Mapping[str, float]
    peak_bytes: Mapping[str, float]
    fits: bool
    options: Mapping[str, Any]
    timeline: Timeline

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s / self.gpus

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "exposed_comm_s": self.exposed_s,
            "exposed_comm_critical_s": float(self.critical.exposed),
            "bubble_s": float(self.critical.bubble),
            "busy_s": float(self.critical.busy),
            "lower_bound_s": float(self.bound.seconds),
            "bounded_by": self.bound.limit,
            "makespan_over_bound": self.step_s / float(self.bound.seconds),
            "peak_activation_bytes": dict(self.activation_bytes),
            "peak_memory_bytes": dict(self.peak_bytes),
            "fits_memory": self.fits,
            "options": dict(self.options),
        }


@dataclass(frozen=True, slots=True)
class Beaten:
    """Not simulated, as no order of it is both shorter than what was found and known to fit. `fits`: some order may."""

    fits: bool


def af_result(af: AFModel, *, shard_optimizer: bool = True, program: Program | None = None) -> Result:
    """AF-Pipe with a choice: of the orders of a list the shortest that fits in memory, or the first of all."""
    if program is not None or af.choice.order != "list":
        return _af_result(af, program or af.program(), shard_optimizer)
    orders = af.orders()
    return _shortest_that_fits(af, orders, shard_optimizer) or _ordered(af, orders[0], shard_optimizer)


def af_faster(af: AFModel, than: Result | None, *, shard_optimizer: bool = True) -> Result | Beaten:
    """A choice of list scheduling, or the same in order if that is faster; only if it can be better than another result: faster,
    or the first that fits in memory.

    A simulated step is taken to be no shorter than its rehearsal, in which groups also wait for the caps on what is in flight.
    """
    limit = math.inf
    if than is not None and than.fits:
        limit = af.choice.sequences * af.model.seq_length / (than.tokens_per_s_per_gpu * than.gpus)
    orders = af.orders(limit)
    if not orders:
        return Beaten(fits=True)
    listed = _shortest_that_fits(af, orders, shard_optimizer)
    ordered = _faster_in_order(af, limit if listed is None else listed.step_s, shard_optimizer)
    if listed is None and ordered is None and (than is None or not than.fits):
        return _ordered(af, orders[0], shard_optimizer)
    return ordered or listed or Beaten(fits=False)


def _faster_in_order(af: AFModel, limit: float, shard_optimizer: bool) -> Result | None:
    """With as many micro-batches in flight, and those of one layer more; None unless it fits and its step is shorter."""
    ordered = replace(af, choice=replace(af.choice, order="in_order"))
    program = ordered.program()
    held = least_bytes(program.schedule, af.activation_bytes(), af.message_bytes())
    if not _can_fit(af, held, shard_optimizer):
        return None
    result = _af_result(ordered, program, shard_optimizer)
    return result if result.fits and result.step_s < limit else None


def _can_fit(af: AFModel, held: Mapping[Group, Number], shard_optimizer: bool) -> bool:
    """Most of what is held follows from lists, before any time is known."""
    activation, state = _activation_by_role(af, held), af_state_bytes(af, shard_optimizer)
    return _fits(af.cluster, {role: activation[role] + state[role] for role in activation})


def _shortest_that_fits(af: AFModel, orders: Sequence[Rehearsed], shard_optimizer: bool) -> Result | None:
    """Of orders by rehearsed time. Not simulated are those that cannot fit, and those that take longer in rehearsal than another
    does in the end.
    """
    kept, received = af.activation_bytes(), af.message_bytes()
    best: Result | None = None
    for order in orders:
        if best is not None and best.step_s <= order.makespan:
            break
        if _can_fit(af, order.held(kept), shard_optimizer):
            program = af.program(order.schedule())
            if _can_fit(af, least_bytes(program.schedule, kept, received), shard_optimizer):
                result = _af_result(af, program, shard_optimizer)
                if result.fits and (best is None or result.step_s < best.step_s):
                    best = result
    return best


def _ordered(af: AFModel, order: Rehearsed, shard_optimizer: bool) -> Result:
    return _af_result(af, af.program(order.schedule()), shard_optimizer)


@collector_paused()
def _af_result(af: AFModel, program: Program, shard_optimizer: bool) -> Result:
    timeline = simulate_program(program)
    topology, choice = af.topology, af.choice
    sizes = {group: len(topology.ranks_of_group(group)) for group in topology.groups}
    peaks = timeline.peak_bytes(af.activation_bytes(), af.message_bytes())
    placed = {"placement": af.cluster.placement} if isinstance(af.cluster, MixedCluster) else {}
    return _result(
        "af_pipe",
        timeline,
        lower_bound(timeline.program),
        af.model,
        af.cluster,
        choice.sequences,
        {str(group): size for group, size in sizes.items()},
        _activation_by_role(af, peaks),
        af_state_bytes(af, shard_optimizer),
        placed | choice.to_dict(),
        float(timeline.makespan),
    )


def _activation_by_role(af: AFModel, held: Mapping[Group, Number]) -> dict[str, float]:
    """Of the fullest group of each role, from what each holds of finished stages."""
    choice = af.choice
    activation: dict[str, float] = {}
    for group, peak in held.items():
        role = str(group.role)
        activation[role] = max(activation.get(role, 0.0), float(peak))
    if choice.recompute_attention or choice.recompute_ffn:
        full = AFModel(af.model, af.cluster, replace(choice, recompute_attention=False, recompute_ffn=False))
        kept = full.activation_bytes()  # the stage that is being recomputed is there in full
        for role, is_odd, on in (
            ("attention", 0, choice.recompute_attention),
            ("ffn", 1, choice.recompute_ffn),
        ):
            if on:
                activation[role] += max(v for s, v in kept.items() if s % 2 == is_odd)
    return activation


@collector_paused()
def rival_result(rival: RivalModel, *, shard_optimizer: bool = True) -> Result:
    """A rival with a choice. Gradient all-reduces come after the pipeline, less what hides behind half of its backward."""
    program = rival.program()
    bound = lower_bound(program)
    if rival.choice.system == "dualpipe_ideal":
        program = replace(program, messages={}, latency=0)
    timeline = simulate_program(program)
    peaks = timeline.peak_bytes(rival.activation_bytes())
    activation = float(max(peaks.values()))
    if rival.choice.recompute:
        plain = RivalModel(rival.model, rival.cluster, replace(rival.choice, recompute=False))
        activation += max(plain.activation_bytes().values())
    step = float(timeline.makespan)
    if rival.choice.system == "dualpipe_ideal":
        step = max(step, float(bound.seconds))
    step += max(0.0, rival.gradient_seconds() - step / 3)
    sizes = {str(group): rival.replicas for group in timeline.groups}
    return _result(
        rival.choice.system,
        timeline,
        bound,
        rival.model,
        rival.cluster,
        rival.sequences,
        sizes,
        {"worker": activation},
        {"worker": rival_state_bytes(rival, shard_optimizer)},
        rival.choice.to_dict(),
        step,
    )


def af_state_bytes(af: AFModel, shard_optimizer: bool) -> dict[str, float]:
    """Weights, gradients and optimizer state of the rank of each role that has most."""
    topology, model, choice, state = af.topology, af.model, af.choice, TrainingState()
    attention: dict[int, float] = {}
    ffn: dict[int, float] = {}
    for b in range(model.n_boundaries + 1):
        group = topology.group_of_stage(2 * b).index
        is_head = b == model.n_boundaries
        attention.setdefault(group, 0.0)
        attention[group] += (model.head if is_head else model.attention[b]).parameters
        if is_head:
            continue
        experts = topology.group_of_stage(2 * b + 1).index
        held = (
            model.experts[b].parameters * -(-model.num_experts // choice.ffn_group_size) / model.num_experts
        )
        ffn[experts] = ffn.get(experts, 0.0) + held
        if choice.shared_on_ffn:
            ffn[experts] += model.shared[b].parameters
        else:
            attention[group] += model.shared[b].parameters
    plain = state.weight_bytes + state.gradient_bytes
    replicas = choice.attention_group_size if shard_optimizer else 1
    return {
        "attention": max(attention.values()) * (plain + state.optimizer_bytes / replicas),
        "ffn": max(ffn.values()) * (plain + state.optimizer_bytes),
    }


def rival_state_bytes(rival: RivalModel, shard_optimizer: bool) -> float:
    dense, expert = rival.parameters()
    state = TrainingState()
    plain = state.weight_bytes + state.gradient_bytes
    replicas = rival.replicas if shard_optimizer else 1
    copies = rival.replicas // rival.choice.ep_size if shard_optimizer else 1
    return dense * (plain + state.optimizer_bytes / replicas) + expert * (
        plain + state.optimizer_bytes / copies
    )


def model_flops(model: ModelCosts) -> float:
    """Forward and backward of one sequence, without recompute."""
    parts = (*model.attention, *model.experts, *model.shared, model.head)
    return sum(part.forward_flops + part.backward_flops for part in parts)


def _result(
    name: str,
    timeline: Timeline,
    bound: Bound,
    model: ModelCosts,
    cluster: AnyCluster,
    sequences: int,
    ranks: Mapping[str, int],
    activation: Mapping[str, float],
    state: Mapping[str, float],
    options: Mapping[str, Any],
    step: float,
) -> Result:
    workers = sum(ranks.values())
    gpus = cluster.gpus if isinstance(cluster, MixedCluster) else workers
    shares = {group: timeline.share(group) for group in timeline.groups}
    exposed = sum(float(share.exposed) * ranks[str(group)] for group, share in shares.items()) / workers
    peak = {role: activation[role] + state[role] for role in activation}
    return Result(
        schedule=name,
        step_s=step,
        tokens=sequences * model.seq_length,
        gpus=gpus,
        exposed_s=exposed,
        critical=max(shares.values(), key=lambda share: share.busy),
        bound=bound,
        mfu=sequences * model_flops(model) / (step * gpus * mean_flops(cluster)),
        activation_bytes=activation,
        peak_bytes=peak,
        fits=_fits(cluster, peak),
        options=options,
        timeline=timeline,
    )


def _fits(cluster: AnyCluster, peak: Mapping[str, float]) -> bool:
    """Each role in the memory of its nodes."""
    return all(
        used <= USABLE_MEMORY * _nodes_of(cluster, role).gpu.memory_bytes for role, used in peak.items()
    )


def _nodes_of(cluster: AnyCluster, role: str) -> Cluster:
    return cluster.of(Role(role)) if isinstance(cluster, MixedCluster) else cluster
