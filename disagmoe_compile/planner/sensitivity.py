"""What a plan is limited by, and what one device more on either side would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from disagmoe_compile.planner.sizing_problem import Candidate, SizingProblem
from disagmoe_compile.planner.step_model import Prediction, StepModel

ROLES = ("attention", "ffn")


@dataclass(frozen=True, slots=True)
class Roof:
    """A role on the roofline: all its GPUs. Intensity and ridge in FLOPs a byte that its NICs send, `peak_flops` in FLOP/s."""

    role: str
    intensity: float
    ridge: float
    peak_flops: float


@dataclass(frozen=True, slots=True)
class Change:
    """One device more in a group of a role, everything else as it is: `faster` is the relative gain in tokens a second."""

    what: str
    faster: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one micro-batch on the group that runs the stage, forward and backward."""

    name: str
    compute_s: float
    exchange_s: float


def roofs(model: StepModel, candidate: Candidate, prediction: Prediction) -> tuple[Roof, Roof]:
    """Of both roles, from the predicted seconds: intensity over ridge is compute time over exchange time."""
    found = []
    for role, load, nics in (
        ("attention", prediction.attention, candidate.attention_nics),
        ("ffn", prediction.ffn, candidate.ffn_nics),
    ):
        gpus = getattr(candidate.layout, f"{role}_group_size")
        peak = gpus * model.cluster.gpu.flops * model.cluster.efficiencies.gemm.value
        ridge = peak / (nics * model.nic_bytes_per_s)
        ratio = load.compute_s / load.exchange_s if load.exchange_s else float("inf")
        found.append(Roof(role, ridge * ratio, ridge, peak * candidate.layout.pipeline_groups))
    return found[0], found[1]


def even_split(problem: SizingProblem, candidate: Candidate) -> Candidate:
    """The plan before allocation: as many GPUs and NICs on either side as on the other, all else equal."""
    layout = candidate.layout
    pair = layout.attention_group_size + layout.ffn_group_size
    attention = pair - min(pair // 2, problem.costs.num_experts)
    even = replace(layout, attention_group_size=attention, ffn_group_size=pair - attention)
    sequences = layout.attention_group_size * layout.n_microbatches
    even = replace(even, n_microbatches=max(1, round(sequences / attention)))
    nics = candidate.attention_nics + candidate.ffn_nics
    share = 0.5 if problem.options.free_nics else attention / pair
    return Candidate(even, candidate.policy, nics * share, nics * (1 - share))


def one_more(problem: SizingProblem, model: StepModel, candidate: Candidate) -> Iterator[Change]:
    """A GPU or a NIC more in every group of a role, at the same batch."""
    before = model.predict(candidate)
    for role in ROLES:
        size = getattr(candidate.layout, f"{role}_group_size")
        nics = getattr(candidate, f"{role}_nics")
        if role == "attention" or size < problem.costs.num_experts:
            larger = replace(candidate.layout, **{f"{role}_group_size": size + 1})
            # The batch stays: more attention ranks run fewer micro-batches each, not more sequences.
            load = model.predict(replace(candidate, layout=larger))
            scale = candidate.layout.global_batch_size / larger.global_batch_size
            yield Change(f"1 GPU in each {role} group", _gain(before, load, scale))
        wider = model.predict(replace(candidate, **{f"{role}_nics": nics + 1}))
        yield Change(f"1 NIC in each {role} group", _gain(before, wider, 1.0))


def _gain(before: Prediction, after: Prediction, scale: float) -> float:
    """Of the pace for the same number of sequences; filling and stalls as before."""
    return before.pace_s / (after.pace_s * scale) - 1


def stage_times(model: StepModel, candidate: Candidate) -> list[Stage]:
    """Of each attention and expert stage and the head, in order, for one micro-batch of the whole group."""
    layout, policy = candidate.layout, candidate.policy
    sequences = layout.attention_group_size * layout.micro_batch_size
    attention = model.seconds_of_attention_stages(layout.shared_on_ffn, policy.recompute_attention)
    ffn = model.ffn_s(layout, policy.recompute_ffn) / model.boundaries_of_group(layout.pipeline_groups)
    exchange = 2 * model.exchanged_bytes(layout) / model.nic_bytes_per_s * sequences
    residual = 0.0
    if layout.pipeline_groups > 1:
        row = model.costs.residual_bytes_per_token * model.costs.seq_length
        residual = 2 * row / model.nic_bytes_per_s * sequences
    stages = []
    for b in range(model.costs.n_boundaries):
        sent = (exchange + residual) / candidate.attention_nics
        stages.append(Stage(f"A{b}", attention[b] * layout.micro_batch_size, sent))
        stages.append(Stage(f"F{b}", ffn * sequences, exchange / candidate.ffn_nics))
    stages.append(Stage(f"A{model.costs.n_boundaries}", attention[-1] * layout.micro_batch_size, 0.0))
    return stages


def explain(problem: SizingProblem, model: StepModel, candidate: Candidate) -> dict[str, object]:
    """The document of `disagmoe plan --explain`."""
    prediction = model.predict(candidate)
    return {
        "roofs": [_roof_document(r) for r in roofs(model, candidate, prediction)],
        "one_more": [{"what": c.what, "faster": c.faster} for c in one_more(problem, model, candidate)],
        "stages": [
            {"name": s.name, "compute_s": s.compute_s, "exchange_s": s.exchange_s}
            for s in stage_times(model, candidate)
        ],
        "resources_s": prediction.resources(),
        "fill": prediction.fill,
        "stall": prediction.stall,
    }


def _roof_document(roof: Roof) -> dict[str, object]:
    return {
        "role": roof.role,
        "intensity_flops_per_byte": roof.intensity if roof.intensity != float("inf") else None,
        "ridge_flops_per_byte": roof.ridge,
    }
