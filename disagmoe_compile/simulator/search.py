"""The best choice of each system for a model, a cluster and a batch: estimate many, simulate the most promising.

No comparison is made before each side has its best sizes. The estimate (`estimates.py`) only ranks; what is reported is
simulated. A choice that does not fit in memory is not taken, unless none fits.

    every system   micro-batch size, recompute, de-duplication as given
    AF-Pipe        groups p, their sizes (M, N), micro-batches in flight, recompute of each side, side of the shared experts
    rivals         pipeline ranks, EP size, chunks, degree (Tutel)

On two kinds of nodes AF-Pipe's sizes are those of each side apart (ranks may be left out), rivals choose where to run as well
(`mixed_rivals.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.topology import Role
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.assumptions import Assumptions
from disagmoe_compile.simulator.estimates import AFEstimates, Estimate, rival_estimate
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster, side
from disagmoe_compile.simulator.mixed_rivals import best_placed
from disagmoe_compile.simulator.results import Beaten, Result, af_faster, rival_result
from disagmoe_compile.simulator.rival_model import COMET_PARTS, RivalChoice, RivalModel

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
    cluster: AnyCluster
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
    def equal_nodes(self) -> Cluster:
        """The cluster, where it has one kind of nodes. Raises InputError where it has two."""
        if isinstance(self.cluster, MixedCluster):
            raise InputError(f"this needs nodes of one kind, not {self.cluster.name}")
        return self.cluster

    @property
    def sizes(self) -> Sequence[int]:
        return MICRO_BATCHES if self.micro_batch_size is None else (self.micro_batch_size,)

    @property
    def recomputes(self) -> Sequence[bool]:
        return (False, True) if self.recompute is None else (self.recompute,)


def best(setting: Setting, system: str, beat: Result | None = None) -> Result:
    """The fastest choice of a system, or `beat` where none is better. Raises InputError where no sizes fit together."""
    if system == "af_pipe":
        models, estimate = list(_af_models(setting)), AFEstimates().of
        found = beat
        for is_usual in (True, False):
            some = [m for m in models if _is_usual(m) is is_usual]
            if some:
                found = _fastest(some, estimate, af_faster, setting.simulated, found)
        return _if_any(found, system)
    cluster = setting.cluster
    if isinstance(cluster, MixedCluster):

        def on_equal_nodes(nodes: Cluster, sequences: int, beat: Result | None) -> Result:
            return best(replace(setting, cluster=nodes, sequences=sequences), system, beat)

        return best_placed(cluster, setting.sequences, on_equal_nodes)
    rivals = (
        RivalModel(setting.model, cluster, choice, setting.assumptions)
        for choice in _rival_choices(setting, cluster, system)
    )
    return _if_any(_fastest(rivals, rival_estimate, _simulated_rival, setting.simulated, beat), system)


def _if_any(found: Result | None, system: str) -> Result:
    if found is None:
        raise InputError(
            f"no sizes of {system} fit these GPUs, this batch and these experts: change --nodes, the batch, or what is pinned"
        )
    return found


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
    """By the speed of all GPUs together: results to beat may be charged for more of them."""
    return result.fits, result.tokens / result.step_s


# AF-Pipe


def _af_models(setting: Setting) -> Iterator[AFModel]:
    model = setting.model
    has_shared = any(s.parameters for s in model.shared)
    sides = (
        (False, True)
        if has_shared and setting.shared_on_ffn is None
        else (bool(setting.shared_on_ffn) and has_shared,)
    )
    cluster = setting.cluster
    sizes = _mixed_sizes(setting, cluster) if isinstance(cluster, MixedCluster) else _sizes(setting, cluster)
    for p, attention, ffn in sizes:
        for size in setting.sizes:
            n = setting.sequences // (attention * size)
            if n < 1:
                continue
            limits = {1, 2, p + 1, 2 * p, 3 * p, 4 * p, 6 * p, 8 * p}
            for q in sorted(limits) if setting.in_flight is None else (setting.in_flight,):
                if q > n and setting.in_flight is None:
                    continue
                for shared in sides:
                    for a, f in product((False, True), repeat=2):
                        if setting.recompute in (None, a or f):
                            choice = AFChoice(
                                p, attention, ffn, size, n, setting.dedup, shared, a, f, q, order="list"
                            )
                            yield AFModel(model, cluster, choice, setting.assumptions)


def _sizes(setting: Setting, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(p, M, N): every GPU has a rank."""
    gpus, model = cluster.gpus, setting.model
    depths = [p for p in range(1, min(16, model.n_boundaries) + 1) if gpus % p == 0 and gpus // p >= 2]
    for p in _pinned(depths, setting.pipeline_groups):
        pair = gpus // p
        sizes: Iterable[int] = range(1, min(pair, model.num_experts + 1))
        if setting.ffn_group_size is None and setting.attention_group_size is None:
            sizes = _ffn_sizes(pair, model.num_experts, cluster.gpus_per_node)
        for ffn in _pinned(sizes, setting.ffn_group_size):
            if setting.attention_group_size in (None, pair - ffn):
                yield p, pair - ffn, ffn


def _mixed_sizes(setting: Setting, cluster: MixedCluster) -> Iterator[tuple[int, int, int]]:
    """(p, M, N), each side on its kind of nodes. GPUs may be left out: with fewer attention ranks micro-batches are smaller, or
    leave no sequence over; with fewer FFN ranks a token has fewer copies.
    """
    on_a, on_f, experts = cluster.attention, cluster.ffn, setting.model.num_experts
    for p in range(1, min(16, setting.model.n_boundaries, on_a.gpus, on_f.gpus) + 1):
        most, wanted = on_a.gpus // p, setting.pipeline_groups
        if wanted != p and (wanted is not None or (on_a.gpus % p and on_f.gpus % p)):
            continue
        even = max(m for m in range(1, most + 1) if setting.sequences % m == 0)
        attention = {most, -(-most // 2), -(-most // 4), even}
        ffn = _ffn_sizes(on_f.gpus // p + 1, experts, on_f.gpus_per_node)
        if setting.attention_group_size is not None:
            attention = {setting.attention_group_size} & set(range(1, most + 1))
        if setting.ffn_group_size is not None:
            ffn = _pinned(range(1, min(on_f.gpus // p, experts) + 1), setting.ffn_group_size)
        yield from ((p, m, n) for m, n in product(sorted(attention), ffn))


def _is_usual(af: AFModel) -> bool:
    """Searched apart from the rest, which is wanted where memory is short: the estimate is too rough to rank so many at once."""
    choice, per_node = af.choice, side(af.cluster, Role.FFN).gpus_per_node
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


# Rivals


def _rival_choices(setting: Setting, cluster: Cluster, system: str) -> Iterator[RivalChoice]:
    gpus, model = cluster.gpus, setting.model
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


def _pinned(sizes: Iterable[int], wanted: int | None) -> list[int]:
    return list(sizes) if wanted is None else [size for size in sizes if size == wanted]
