"""Should this model be disaggregated on this cluster? AF-Pipe against the best rival, and what would have to change.

Both sides are searched again under each change, by the estimates and simulations of `search.py`. All of it is simulated.

Where a change makes two kinds of nodes of one, AF-Pipe may put either side on either kind, or run on all alike at the pace of the
slower, and a rival has the choices of `mixed_rivals.py`. Where there are two kinds already, sides stay where they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.step_costs import CostSet, model_costs
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster, each
from disagmoe_compile.simulator.mixed_rivals import EQUAL_SHARES, fastest_place
from disagmoe_compile.simulator.results import Result
from disagmoe_compile.simulator.search import Setting, best

COMPARED = ("megatron_1f1b", "tutel", "dualpipe")
"""Real systems that a change is judged against; Comet is close to Tutel and takes longest to simulate, ideal DualPipe is no
system.
"""

SIMULATED = 1
"""Choices of a system under a change: a flip is a large change, the best by estimate is enough."""
MIXED_SIMULATED = 2
"""On two kinds of nodes, where a share of the work is worth as much as the faster kind can hold of it, and the estimate of memory
is rough: of Qwen3-30B-A3B on 16 H800, half at half speed, one found a DualPipe of 7,826 tokens/s a GPU, two one of 10,211.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`gain`: tokens/s of AF-Pipe over the best rival's, less 1. `fits`, `rival_fits`: some choice of it does in memory; a system
    of which none does loses to one that fits. `placement`, `rival_placement`: where each runs, on two kinds of nodes.
    """

    change: str
    gain: float
    af_pipe: float
    rival: str
    rival_tokens: float
    fits: bool = True
    rival_fits: bool = True
    placement: str | None = None
    rival_placement: str | None = None

    @property
    def af_pipe_wins(self) -> bool:
        return self.gain > 0 if self.fits == self.rival_fits else self.fits

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "gain": self.gain,
            "af_pipe_tokens_per_s_per_gpu": self.af_pipe,
            "best_rival": self.rival,
            "rival_tokens_per_s_per_gpu": self.rival_tokens,
            "af_pipe_fits_memory": self.fits,
            "rival_fits_memory": self.rival_fits,
            "af_pipe_placement": self.placement,
            "rival_placement": self.rival_placement,
        }


def verdict(change: str, results: Sequence[Result]) -> Verdict:
    """Of a set of results that holds AF-Pipe and at least one rival."""
    ours = next(r for r in results if r.schedule == "af_pipe")
    rivals = [r for r in results if r.schedule not in ("af_pipe", "dualpipe_ideal")]
    other = max(rivals, key=lambda r: (r.fits, r.tokens_per_s_per_gpu))
    gain = ours.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1
    return Verdict(
        change,
        gain,
        ours.tokens_per_s_per_gpu,
        other.schedule,
        other.tokens_per_s_per_gpu,
        ours.fits,
        other.fits,
        ours.options.get("placement"),
        other.options.get("placement"),
    )


def changes(spec: ModelSpec, setting: Setting) -> Iterator[tuple[str, Callable[[], Setting]]]:
    """Each change with the setting that has it; the batch keeps its tokens."""
    length, cluster = setting.model.seq_length, setting.cluster
    cost_set = setting.model.cost_set

    def longer() -> Setting:
        return replace(
            setting,
            model=_costs(spec, 4 * length, cost_set),
            sequences=max(setting.sequences // 4, setting.cluster.gpus),
        )

    def finer() -> Setting:
        experts = replace(
            spec,
            num_experts=4 * spec.num_experts,
            top_k=4 * spec.top_k,
            expert_hidden=max(spec.expert_hidden // 4, 1),
        )
        return replace(setting, model=_costs(experts, length, cost_set))

    def network(factor: float) -> Callable[[], Setting]:
        changed = each(cluster, lambda nodes: replace(nodes, nic_bytes_per_s=nodes.nic_bytes_per_s * factor))
        return lambda: replace(setting, cluster=changed)

    yield f"sequences four times as long ({4 * length} tokens)", longer
    yield "experts four times as many, a quarter as wide", finer
    yield "network half as fast", network(0.5)
    yield "network four times as fast", network(4.0)
    yield (
        "experts spread over a node or more (EP of at least a node)",
        lambda: replace(setting, ep_size=min(max(cluster.gpus_per_node, 16), spec.num_experts)),
    )
    if isinstance(cluster, MixedCluster):
        swapped = cluster.swapped()
        yield f"sides swapped ({swapped.placement})", lambda: replace(setting, cluster=swapped)
    elif cluster.nodes > 1:
        mixed = half_slower(cluster)
        yield (
            f"half of the nodes ({mixed.ffn.nodes} of {cluster.nodes}) with GPUs half as fast",
            lambda: replace(setting, cluster=mixed),
        )


def half_slower(cluster: Cluster) -> MixedCluster:
    """Half of the nodes, rounded down, with GPUs of half the FLOP/s and half the memory's bytes/s: here those of FFN ranks."""
    gpu, slow = cluster.gpu, cluster.nodes // 2
    name = f"{cluster.name} at half speed"
    slower = replace(gpu, name=name, flops=gpu.flops / 2, memory_bytes_per_s=gpu.memory_bytes_per_s / 2)
    return MixedCluster(
        cluster.with_nodes(cluster.nodes - slow), replace(cluster, name=name, gpu=slower, nodes=slow)
    )


def af_pipe_anywhere(setting: Setting, cluster: MixedCluster) -> Result:
    """AF-Pipe with each side on either kind of nodes, or on all at the slower's pace, whichever is fastest.

    Raises InputError where no sizes fit anywhere.
    """
    swapped = cluster.swapped()
    places: list[tuple[AnyCluster, str]] = [
        (cluster, cluster.placement),
        (swapped, swapped.placement),
        (cluster.in_step(), EQUAL_SHARES),
    ]
    return fastest_place(
        cluster, places, lambda on, beat: best(replace(setting, cluster=on), "af_pipe", beat)
    )


def advise(spec: ModelSpec, setting: Setting, now: Sequence[Result]) -> list[Verdict]:
    """What holds now, and under each change; a change under which nothing fits is left out."""
    found = [verdict("as asked", now)]
    for change, make in changes(spec, setting):
        try:
            changed = make()
            on = changed.cluster
            tried = MIXED_SIMULATED if isinstance(on, MixedCluster) else SIMULATED
            changed = replace(changed, simulated=tried)
            if isinstance(on, MixedCluster) and not isinstance(setting.cluster, MixedCluster):
                ours = af_pipe_anywhere(changed, on)
            else:
                ours = best(changed, "af_pipe")
            results = [ours, *(best(changed, system) for system in COMPARED)]
        except InputError:
            continue
        found.append(verdict(change, results))
    return found


def summary(verdicts: Sequence[Verdict], cluster: AnyCluster) -> str:
    """The answer in a sentence or two."""
    now = verdicts[0]
    flips = [v.change for v in verdicts[1:] if v.af_pipe_wins != now.af_pipe_wins]
    flip = (
        f"The answer flips with: {'; '.join(flips)}."
        if flips
        else "None of the changes that were tried flips the answer."
    )
    if now.fits != now.rival_fits:
        answer, who = (
            ("Disaggregate", "no rival")
            if now.fits
            else ("Do not disaggregate", "AF-Pipe, unlike a rival, never")
        )
        return f"{answer}: {who} fits in memory on {cluster.gpus} GPUs with the sizes that were tried (simulated). {flip}"
    gain = f"{abs(now.gain):.0%}"
    answer = (
        "Disaggregate" if now.gain > 0.02 else "Do not disaggregate" if now.gain < -0.02 else "Either will do"
    )
    how = "faster" if now.gain > 0 else "slower"
    text = f"{answer}: AF-Pipe is {gain} {how} than the best tuned rival ({now.rival}) on {cluster.gpus} GPUs (simulated)."
    return f"{text} {flip}"


def _costs(spec: ModelSpec, seq_length: int, cost_set: CostSet) -> Any:
    return model_costs(spec, seq_length=seq_length, cost_set=cost_set)
