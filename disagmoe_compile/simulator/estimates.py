"""What a choice of sizes should reach, without simulating it: good enough to rank many, never reported.

speed     the load of a step's busiest resource, times the pipeline's fill; AF-Pipe also stalls where few are in flight
memory    weights, optimizer and what is kept of the micro-batches in flight, of the fullest rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.step_costs import ModelCosts
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.mixed_cluster import side
from disagmoe_compile.simulator.results import USABLE_MEMORY, af_state_bytes, rival_state_bytes
from disagmoe_compile.simulator.rival_model import RivalModel
from disagmoe_compile.simulator.stage_times import Speed, StageSeconds


@dataclass(frozen=True, slots=True)
class Estimate:
    """`memory`: of the fullest rank, as a share of what may be filled."""

    tokens_per_s: float
    memory: float


# AF-Pipe


@dataclass(frozen=True, slots=True)
class _AFLoad:
    """What choices with other numbers in flight share: seconds a step of the busiest resource, of a micro-batch's way; bytes."""

    busiest_s: float
    trip_s: float
    state: Mapping[str, float]
    kept: tuple[float, float]
    worked_on: tuple[float, float]


class AFEstimates:
    """Load of the busiest resource of a step, the fill, and stalls where few micro-batches are in flight."""

    def __init__(self) -> None:
        self._loads: dict[AFChoice, _AFLoad] = {}

    def of(self, af: AFModel) -> Estimate:
        choice, model = af.choice, af.model
        shared = replace(choice, in_flight=None)
        if shared not in self._loads:
            self._loads[shared] = _af_load(af)
        load, p, n = self._loads[shared], choice.pipeline_groups, choice.n_microbatches
        layers = model.n_boundaries / p
        q = min(choice.in_flight or 4 * p, n)
        stall = max(1.0, p * load.trip_s / (q * load.busiest_s / (n * layers))) * (1 + 0.1 * 2 * p / q)
        step = load.busiest_s * (1 + 2 * (2 * p - 1) / (n * layers)) * stall
        held = [
            (
                load.state[role]
                + q * -(-model.n_boundaries // p) * load.kept[odd]
                + again * load.worked_on[odd]
            )
            / (side(af.cluster, role).gpu.memory_bytes * USABLE_MEMORY)
            for odd, (role, again) in enumerate(
                ((Role.ATTENTION, choice.recompute_attention), (Role.FFN, choice.recompute_ffn))
            )
        ]
        return Estimate(choice.sequences * model.seq_length / step, max(held))


def _af_load(af: AFModel) -> _AFLoad:
    choice, model = af.choice, af.model
    senders, experts_on = (Speed(side(af.cluster, role)) for role in (Role.ATTENTION, Role.FFN))
    p, n = choice.pipeline_groups, choice.n_microbatches
    layers = model.n_boundaries / p
    attention, experts = _typical(model, lambda b: af.stage_seconds(2 * b)), af.stage_seconds(1)
    nic, link = af.exchange()
    residual = (p > 1) * choice.group_sequences * model.seq_length * model.residual_bytes_per_token
    out = 2 * (nic + residual) / (choice.attention_group_size * senders.nic)
    back = 2 * max(
        nic / (choice.ffn_group_size * experts_on.nic), link / (choice.ffn_group_size * experts_on.link)
    )
    head = af.stage_seconds(2 * model.n_boundaries)
    loads = (
        n * (layers * (attention.forward + attention.backward) + head.forward + head.backward),
        n * layers * (experts.forward + experts.backward),
        n * layers * out,
        n * layers * back,
    )
    full = replace(choice, recompute_attention=False, recompute_ffn=False)
    return _AFLoad(
        busiest_s=max(loads),
        trip_s=attention.forward + attention.backward + experts.forward + experts.backward + 2 * out,
        state=af_state_bytes(af, True),
        kept=_kept(af),
        worked_on=_kept(AFModel(model, af.cluster, full)),
    )


def _kept(af: AFModel) -> tuple[float, float]:
    """Bytes that a mean attention stage and a mean expert stage keep of a micro-batch."""
    kept, n = af.activation_bytes(), af.model.n_boundaries
    sides = (sum(held for stage, held in kept.items() if stage % 2 == side) / n for side in (0, 1))
    return next(sides), next(sides)


def _typical(model: ModelCosts, seconds: Callable[[int], StageSeconds]) -> StageSeconds:
    """The mean of a model's attention stages: the first has the embedding, and often layers without experts."""
    times = [seconds(b) for b in range(model.n_boundaries)]
    n = len(times)
    return StageSeconds(
        sum(t.forward for t in times) / n,
        sum(t.backward for t in times) / n,
        sum(t.weight for t in times) / n,
    )


# Rivals


def rival_estimate(rival: RivalModel) -> Estimate:
    choice, model, speed = rival.choice, rival.model, Speed(rival.cluster)
    p, n, v = choice.pipeline_ranks, choice.n_microbatches, choice.chunks
    nic, link = rival.exchange()
    moved = 4 * max(nic / speed.nic, link / speed.link)
    attention = _typical(model, lambda b: rival.stage_seconds(b * rival.width))
    experts = rival.stage_seconds(1)
    a = attention.forward + attention.backward
    f = (experts.forward + experts.backward) * choice.parts
    if rival.is_dual:
        layer = max(a + f, moved)
    elif choice.parts > 1:
        layer = a + max(f, moved) + min(f, moved) / choice.parts
    else:
        layer = a + f + moved
    head = rival.stage_seconds(model.n_boundaries * rival.width)
    last = head.forward + head.backward
    fill = (p - 1) / v
    if rival.is_dual:  # the first forwards and the last backwards have nothing to hide behind
        fill = (p / 2 - 1) * 0.6 + p / 2 * moved / layer if p > 1 else moved / layer
    per_rank = max(layer * -(-model.n_boundaries // (p * v)) * v, layer * model.n_boundaries / p + last)
    step = per_rank * (n + max(fill, 0))
    kept = rival.activation_bytes()
    in_flight = min(n, p * (1 + (p - 1) / (p * v)) if v > 1 else p + rival.is_dual)
    held = in_flight / p * sum(kept.values()) / rival.directions
    used = held + rival_state_bytes(rival, True)
    return Estimate(
        rival.sequences * model.seq_length / step, used / (rival.cluster.gpu.memory_bytes * USABLE_MEMORY)
    )
