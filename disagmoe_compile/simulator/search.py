"""The best choice of each system for a model, a cluster and a batch: estimate many, simulate the most promising.

No comparison is made before each side has its best sizes. The estimate only ranks: it is the load of the busiest resource, times
the pipeline's fill; what is reported is simulated. A choice that does not fit in memory is not taken, unless none fits.

    every system   micro-batch size, recompute, de-duplication as given
    AF-Pipe        groups p, their sizes (M, N), micro-batches in flight, recompute of each side, side of the shared experts
    rivals         pipeline ranks, EP size, chunks, degree (Tutel)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.assumptions import Assumptions
from disagmoe_compile.simulator.results import (
    USABLE_MEMORY,
    Beaten,
    Result,
    af_faster,
    af_state_bytes,
    rival_result,
    rival_state_bytes,
)
from disagmoe_compile.simulator.rival_model import COMET_PARTS, RivalChoice, RivalModel
from disagmoe_compile.simulator.stage_times import Speed, StageSeconds

SIMULATED = 4
"""Choices of a system that are simulated, unless a setting says otherwise."""
MAY_FIT = 1.5
"""Estimated memory, as a share of what may be filled, up to which a choice is simulated to see whether it fits."""
MARGIN = 1.25
"""How much more than its estimate a choice of another kind or depth is thought capable of: on 64 H800, DeepSeek-MoE at 8K, 22
choices reached 0.78 to 1.07 of it at p up to 4, and 1.23 and 1.37 at p = 8 and 16, at half of the best one's speed.
"""
MICRO_BATCHES = (1, 2, 4)
TUTEL_DEGREES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 8)

Model = TypeVar("Model", AFModel, RivalModel)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all systems share. `sequences`: at most so many a step over all GPUs. None leaves a size to the search."""

    model: ModelCosts
    cluster: Cluster
    sequences: int
    dedup: Dedup = Dedup.RANK
    micro_batch_size: int | None = None
    pipeline_groups: int | None = None
    attention_group_size: int | None = None
    ffn_group_size: int | None = None
    in_flight: int | None = None
    ep_size: int | None = None
    recompute: bool | None = None
    shared_on_ffn: bool | None = None
    assumptions: Assumptions = field(default_factory=Assumptions)
    simulated: int = SIMULATED

    @property
    def memory(self) -> float:
        return USABLE_MEMORY * self.cluster.gpu.memory_bytes

    @property
    def sizes(self) -> Sequence[int]:
        return MICRO_BATCHES if self.micro_batch_size is None else (self.micro_batch_size,)

    @property
    def recomputes(self) -> Sequence[bool]:
        return (False, True) if self.recompute is None else (self.recompute,)


def best(setting: Setting, system: str) -> Result:
    """The fastest choice of a system. Raises InputError where no sizes fit together."""
    if system == "af_pipe":
        models, estimate = list(_af_models(setting)), _AFEstimates().of
        found: Result | None = None
        for is_usual in (True, False):
            some = [m for m in models if _is_usual(m) is is_usual]
            if some:
                found = _fastest(some, estimate, af_faster, setting.simulated, found)
        return _if_any(found, system)
    rivals = (
        RivalModel(setting.model, setting.cluster, c, setting.assumptions)
        for c in _rival_choices(setting, system)
    )
    return _if_any(_fastest(rivals, _rival_estimate, _simulated_rival, setting.simulated), system)


def _if_any(found: Result | None, system: str) -> Result:
    if found is None:
        raise InputError(
            f"no sizes of {system} fit these GPUs, this batch and these experts: change --nodes, the batch, or what is pinned"
        )
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """`memory`: of the fullest rank, as a share of what may be filled."""

    tokens_per_s: float
    memory: float


def _fastest(
    models: Iterable[Model],
    estimate: Callable[[Model], Estimate],
    simulate: Callable[[Model, Result | None], Result | Beaten],
    simulated: int,
    found: Result | None = None,
) -> Result | None:
    """Estimates of different depths err differently: first the best of each depth, if it can be faster than what was found, the
    shallowest first, which takes least. Then the best by estimate until `simulated` of them fit, or twice as many were tried;
    those that should fit first. The estimate of memory is rough: last as many of those that may fit after all, if they should
    be faster.

    `simulate` is told what to beat. `found`: a choice to beat. None where there is none and no model.
    """
    ranked = sorted(
        ((estimate(m), k, m) for k, m in enumerate(models)),
        key=lambda e: (e[0].memory > 1, -e[0].tokens_per_s, e[1]),
    )
    tried: dict[int, Result | Beaten] = {}

    def fastest() -> Result | None:
        results = (r for r in (found, *tried.values()) if isinstance(r, Result))
        return max(results, key=_preference, default=None)

    def can_be_faster(tokens_per_s: float) -> bool:
        best_yet = fastest()
        if best_yet is None or not best_yet.fits:
            return True
        return tokens_per_s > best_yet.tokens_per_s_per_gpu * best_yet.gpus

    def attempt(k: int) -> Result | Beaten:
        if k not in tried:
            tried[k] = simulate(ranked[k][-1], fastest())
        return tried[k]

    depths: dict[int, int] = {}
    for k, (estimated, _, model) in enumerate(ranked):
        if estimated.memory <= 1:
            depths.setdefault(model.depth, k)
    for _, k in sorted(depths.items()):
        if can_be_faster(ranked[k][0].tokens_per_s * MARGIN):
            attempt(k)
    counted: list[Result | Beaten] = []
    close: list[int] = []
    for k, (estimated, _, _) in enumerate(ranked):
        is_enough = len(counted) >= 2 * simulated or sum(r.fits for r in counted) >= simulated
        if not is_enough and (found is None or can_be_faster(estimated.tokens_per_s * MARGIN)):
            counted.append(attempt(k))
        elif 1 < estimated.memory <= MAY_FIT:
            close.append(k)
    for k in close[:simulated]:
        if can_be_faster(ranked[k][0].tokens_per_s):
            attempt(k)
    return fastest()


def _preference(result: Result) -> tuple[bool, float]:
    return result.fits, result.tokens_per_s_per_gpu


# AF-Pipe


def _af_models(setting: Setting) -> Iterator[AFModel]:
    gpus, model = setting.cluster.gpus, setting.model
    depths = [p for p in range(1, min(16, model.n_boundaries) + 1) if gpus % p == 0 and gpus // p >= 2]
    has_shared = any(s.parameters for s in model.shared)
    sides = (
        (False, True)
        if has_shared and setting.shared_on_ffn is None
        else (bool(setting.shared_on_ffn) and has_shared,)
    )
    for p in _pinned(depths, setting.pipeline_groups):
        pair = gpus // p
        sizes: Iterable[int] = range(1, min(pair, model.num_experts + 1))
        if setting.ffn_group_size is None and setting.attention_group_size is None:
            sizes = _ffn_sizes(pair, model.num_experts, setting.cluster.gpus_per_node)
        for ffn in _pinned(sizes, setting.ffn_group_size):
            if setting.attention_group_size not in (None, pair - ffn):
                continue
            for size in setting.sizes:
                n = setting.sequences // ((pair - ffn) * size)
                if n < 1:
                    continue
                limits = {1, 2, p + 1, 2 * p, 3 * p, 4 * p, 6 * p, 8 * p}
                for q in sorted(limits) if setting.in_flight is None else (setting.in_flight,):
                    if q > n and setting.in_flight is None:
                        continue
                    for side in sides:
                        for a, f in product((False, True), repeat=2):
                            if setting.recompute in (None, a or f):
                                choice = AFChoice(
                                    p, pair - ffn, ffn, size, n, setting.dedup, side, a, f, q, order="list"
                                )
                                yield AFModel(model, setting.cluster, choice, setting.assumptions)


def _is_usual(af: AFModel) -> bool:
    """Searched apart from the rest, which is wanted where memory is short: the estimate is too rough to rank so many at once."""
    choice, per_node = af.choice, af.cluster.gpus_per_node
    pair = choice.attention_group_size + choice.ffn_group_size
    sizes = pair <= 2 * per_node or choice.ffn_group_size % per_node == 0
    return sizes and choice.in_flight != 1 and (choice.recompute_ffn or not choice.recompute_attention)


def _ffn_sizes(pair: int, experts: int, per_node: int) -> list[int]:
    """Of an FFN group: every size where a pair is up to two nodes; else whole nodes, and the fewest ranks that hold k experts
    each: another rank that takes none off the fullest one adds nothing but its NIC.
    """
    most = min(pair - 1, experts)
    if pair <= 2 * per_node:
        return list(range(1, most + 1))
    fewest = {-(-experts // k) for k in range(1, experts + 1)}
    return sorted(n for n in fewest | set(range(per_node, most + 1, per_node)) if n <= most)


@dataclass(frozen=True, slots=True)
class _AFLoad:
    """What choices with other numbers in flight share: seconds a step of the busiest resource, of a micro-batch's way; bytes."""

    busiest_s: float
    trip_s: float
    state: Mapping[str, float]
    kept: tuple[float, float]
    worked_on: tuple[float, float]


class _AFEstimates:
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
            load.state[role]
            + q * -(-model.n_boundaries // p) * load.kept[side]
            + again * load.worked_on[side]
            for side, (role, again) in enumerate(
                (("attention", choice.recompute_attention), ("ffn", choice.recompute_ffn))
            )
        ]
        memory = max(held) / (af.cluster.gpu.memory_bytes * USABLE_MEMORY)
        return Estimate(choice.sequences * model.seq_length / step, memory)


def _af_load(af: AFModel) -> _AFLoad:
    choice, model, speed = af.choice, af.model, Speed(af.cluster)
    p, n = choice.pipeline_groups, choice.n_microbatches
    layers = model.n_boundaries / p
    attention, experts = _typical(model, lambda b: af.stage_seconds(2 * b)), af.stage_seconds(1)
    nic, link = af.exchange()
    residual = (p > 1) * choice.group_sequences * model.seq_length * model.residual_bytes_per_token
    out = 2 * (nic + residual) / (choice.attention_group_size * speed.nic)
    back = 2 * max(nic / (choice.ffn_group_size * speed.nic), link / (choice.ffn_group_size * speed.link))
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


def _rival_choices(setting: Setting, system: str) -> Iterator[RivalChoice]:
    gpus, model = setting.cluster.gpus, setting.model
    for p in [p for p in (1, 2, 4, 8, 16) if gpus % p == 0 and p <= model.n_boundaries]:
        replicas = gpus // p
        powers = [2**k for k in range(12) if replicas % 2**k == 0 and 2**k <= model.num_experts]
        for ep in [
            e for e in _pinned(powers, setting.ep_size) if replicas % e == 0 and e <= model.num_experts
        ]:
            for size in setting.sizes:
                n = setting.sequences // (replicas * size)
                if system.startswith("dualpipe") and p > 1:
                    n -= n % 2
                    if n < 2 * p:
                        continue
                if n < 1:
                    continue
                chunks = CHUNKS if p > 1 and not system.startswith("dualpipe") else (1,)
                for v in [v for v in chunks if p * v <= model.n_boundaries]:
                    for parts in {"tutel": TUTEL_DEGREES, "comet": (COMET_PARTS,)}.get(system, (1,)):
                        for recompute in setting.recomputes:
                            yield RivalChoice(system, p, ep, v, size, n, parts, setting.dedup, recompute)


def _simulated_rival(rival: RivalModel, _: Result | None) -> Result:
    return rival_result(rival)


def _rival_estimate(rival: RivalModel) -> Estimate:
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


def _pinned(sizes: Iterable[int], wanted: int | None) -> list[int]:
    return list(sizes) if wanted is None else [size for size in sizes if size == wanted]
