"""One function a figure: the paper's experiment in our simulator, under the one setting of `setting.py`. Made once a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from disagmoe_compile.planner.size import size
from disagmoe_compile.planner.sizing_problem import SizingOptions, SizingProblem, TrainingWorkload
from disagmoe_compile.planner.step_costs import Dedup
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.reproduce.gains import Gain, gain_over, largest, too_large
from disagmoe_compile.simulator.reproduce.rows import Figure, Row
from disagmoe_compile.simulator.reproduce.setting import LENGTHS, MODELS, setting, simulated
from disagmoe_compile.simulator.results import Result, af_result, rival_result
from disagmoe_compile.simulator.rival_model import RivalChoice, RivalModel
from disagmoe_compile.simulator.stage_times import StageSeconds

RIVALS = ("megatron_1f1b", "tutel", "comet", "dualpipe")
_BATCH = "batch, parallel sizes and kernels of the paper are not known to us"


@cache
def fig3() -> Figure:
    """Share of a step in exposed all-to-all, Megatron with EP over all GPUs, against nodes."""
    paper = {1: 0.22, 8: 0.78}
    rows, fits = [], {}
    for nodes in (1, 2, 4, 8):
        result = _plain("deepseek", 8192, nodes)
        fits[f"{nodes} node(s)"] = result.fits
        share = float(result.critical.exposed) / result.step_s
        rows.append(
            Row(
                f"all-to-all share on {nodes} node(s)",
                "DeepSeek-MoE, 8K",
                nodes,
                share,
                paper.get(nodes),
                None,
                f"one set of efficiencies for matmuls and networks; {_BATCH}",
            )
        )
    growth = rows[-1].ours / rows[0].ours
    rows.append(Row("growth from 1 to 8 nodes", "growth", 0, growth, 0.78 / 0.22, 1.0, _BATCH))
    return Figure("fig3", "Exposed all-to-all, Megatron", "nodes", "share of the step", rows, _unfit(fits))


@cache
def fig6() -> Figure:
    """Shares of a step for Qwen3 on 8 nodes against sequence length. `A / C` is over half of the communication: that is what
    makes the paper's own shares and ratios agree (28.38 / (52.40 / 2) = 1.08)."""
    paper = {
        4096: {"attention": 0.2838, "FFN": 0.1922, "A / C": 1.08},
        32768: {"attention": 0.5026, "FFN": 0.1396, "A / C": 2.78},
    }
    rows, fits = [], {}
    for length in LENGTHS:
        result = _plain("qwen3", length, 8)
        fits[f"{length} tokens"] = result.fits
        model = _plain_model("qwen3", length, 8)
        n = model.choice.n_microbatches
        attention, ffn = _compute(model)
        exposed = float(result.critical.exposed)
        values = {
            "attention": n * attention.forward / result.step_s + n * attention.backward / result.step_s,
            "FFN": n * (ffn.forward + ffn.backward) / result.step_s,
            "A / C": n * (attention.forward + attention.backward) / (exposed / 2),
        }
        for what, value in values.items():
            known = paper.get(length, {}).get(what)
            rows.append(Row(f"{what} at {length}", what, length, value, known, None, _BATCH))
    by_name = {row.what: row.ours for row in rows}
    for what in ("attention", "FFN", "A / C"):
        ours = by_name[f"{what} at 32768"] / by_name[f"{what} at 4096"]
        theirs = paper[32768][what] / paper[4096][what]
        rows.append(Row(f"{what}, 32K over 4K", "growth", 0, ours, theirs, 1.0, _BATCH))
    return Figure(
        "fig6", "Qwen3 on 8 nodes, Megatron", "tokens of a sequence", "share, or ratio", rows, _unfit(fits)
    )


def _unfit(fits: Mapping[str, bool]) -> Sequence[str]:
    """A note on steps of which the shares are shown though they do not fit in memory, as the paper's recompute is not known."""
    unfit = [what for what, it_fits in fits.items() if not it_fits]
    return [f"without recompute, as here, these do not fit in memory: {', '.join(unfit)}"] if unfit else []


@cache
def fig10() -> Figure:
    """Tokens/s a GPU over lengths, models and systems; and the largest gains, which the paper puts at 1.81 and 1.34."""
    rows = []
    gains: dict[str, list[Gain]] = {"Megatron": [], "the best rival": []}
    for name in MODELS:
        for length in LENGTHS:
            found = {s: simulated(s, name, length) for s in ("af_pipe", *RIVALS)}
            rows += [
                Row(
                    f"{s}, {name}, {length}",
                    f"{name} {s}",
                    length,
                    r.tokens_per_s_per_gpu,
                    too_large=too_large({s: r}),
                )
                for s, r in found.items()
            ]
            gains["Megatron"].append(gain_over(found, RIVALS[:1]))
            gains["the best rival"].append(gain_over(found, RIVALS[1:]))
    why = "in steady state each side of AF-Pipe has a part of the NICs and all of the rows, which no schedule makes up for"
    for (whom, found_gains), paper, reason in zip(gains.items(), (1.81, 1.34), (_BATCH, why)):
        best = largest(found_gains)
        rows.append(
            Row(f"largest gain over {whom}", "summary", 0, best.gain, paper, 1.0, reason, best.too_large)
        )
    notes = [
        "gains are among systems that fit in memory; one that does not fit is drawn at the speed it would have"
    ]
    return Figure(
        "fig10", "Throughput, EP 64, no de-duplication", "tokens of a sequence", "tokens/s a GPU", rows, notes
    )


@cache
def fig11() -> Figure:
    """Exposed communication a token, less than each rival's by the paper's -88, -75, -45%."""
    paper = {"tutel": -0.88, "comet": -0.75, "dualpipe": -0.45}
    found = {s: simulated(s, "deepseek", 8192) for s in ("af_pipe", *RIVALS)}
    rows = [
        Row(f"exposed us a token and GPU, {s}", "exposed", k, 1e6 * r.exposed_s, too_large=too_large({s: r}))
        for k, (s, r) in enumerate(found.items())
    ]
    for k, (system, change) in enumerate(paper.items()):
        ours, theirs = found["af_pipe"], found[system]
        unfit = too_large({"af_pipe": ours, system: theirs})
        moved = math.nan if unfit else ours.exposed_s / theirs.exposed_s - 1 if theirs.exposed_s else 0.0
        rows.append(Row(f"AF-Pipe against {system}", "change", k, moved, change, 0.0, _NICS, unfit))
    notes = ["exposed: compute idles while the message it waits for is on its way; mean over GPUs"]
    return Figure("fig11", "Exposed communication, DeepSeek-MoE 8K", "system", "us, or change", rows, notes)


_NICS = "without de-duplication AF-Pipe is bound by its NICs, so its compute waits for them"


@cache
def fig12() -> Figure:
    """The best share of GPUs for attention against sequence length; the paper says that it grows.

    Twice: with the NICs that a group's GPUs have, as everywhere else here, by simulation; and with NICs shared out apart, as
    in the paper's program, by the planner. The claim has a direction and no number: a sign against a sign.
    """
    rows: list[Row] = []
    for what, share_of, why in (
        ("", _simulated_share, _TIED),
        (
            ", NICs free",
            _planned_share,
            "experts and sequences come in whole numbers, which hold the best split",
        ),
    ):
        for name in MODELS:
            splits = [share_of(name, length) for length in LENGTHS]
            rows += [
                Row(
                    f"attention share{what}, {name}, {length}",
                    f"{name}{what}",
                    length,
                    share,
                    too_large=unfit,
                )
                for length, (share, unfit) in zip(LENGTHS, splits)
            ]
            (first, unfit), (last, also_unfit) = splits[0], splits[-1]
            sign = float((last > first) - (last < first))
            row = Row(f"share grows with length{what}, {name}", "direction", 0, sign, 1.0, 0.0, why)
            rows.append(replace(row, too_large=unfit or also_unfit))
    return Figure("fig12", "Best split", "tokens of a sequence", "share of GPUs on attention", rows)


_TIED = (
    "GPUs bring their NICs along, and both sides send the same bytes: where NICs bind, half of the GPUs on either side is best, "
    "whatever the FLOPs"
)


def _simulated_share(name: str, seq_length: int) -> tuple[float, Sequence[str]]:
    """Of the fastest choice, and what does not fit in memory."""
    found = simulated("af_pipe", name, seq_length)
    attention, ffn = found.options["attention_group_size"], found.options["ffn_group_size"]
    return float(attention / (attention + ffn)), too_large({"af_pipe": found})


def _planned_share(name: str, seq_length: int) -> tuple[float, Sequence[str]]:
    """The planner takes only what fits."""
    base = setting(name, seq_length)
    workload = TrainingWorkload(seq_length, sequences_per_gpu=base.sequences // base.cluster.gpus)
    options = SizingOptions(dedup=base.dedup, shard_optimizer=None, free_nics=True)
    found = size(SizingProblem(base.model, base.equal_nodes, workload, options), alternatives=0)
    return found.attention_gpus / found.world_size, ()


@cache
def fig13() -> Figure:
    """Gain over the best rival against top-k, and against the rivals' EP size (DeepSeek-MoE, 8K)."""
    gains = [(f"gain at top-{k}", "top-k", k, _gain("deepseek", 8192, top_k=k)) for k in (2, 4, 6, 8)] + [
        (f"gain against EP {ep}", "EP size", ep, _gain("deepseek", 8192, ep_size=ep))
        for ep in (8, 16, 32, 64)
    ]
    rows = [Row(what, series, x, found.gain, too_large=found.too_large) for what, series, x, found in gains]
    notes = ["gain: tokens/s of AF-Pipe over the best of the four rivals, of those that fit in memory"]
    return Figure("fig13", "Top-k and EP size", "top-k or EP size", "gain", rows, notes)


@cache
def fig14() -> Figure:
    """Stages a group (boundaries / p), in rounds of 4p micro-batches, no recompute: speed and memory."""
    base = setting("deepseek", 8192)
    rows = []
    memory: dict[int, bool] = {}
    for p in (16, 8, 4, 2, 1):
        stages = -(-base.model.n_boundaries // p)
        pair = base.cluster.gpus // p
        n = base.sequences // (pair // 2)
        choice = AFChoice(p, pair // 2, pair // 2, 1, n, Dedup.NONE, False, False, False, None)
        result = af_result(AFModel(base.model, base.cluster, choice))
        memory[stages] = result.fits
        unfit = () if result.fits else ("af_pipe",)
        for what, value in (
            ("tokens/s a GPU", result.tokens_per_s_per_gpu),
            ("GB", max(result.peak_bytes.values()) / 1e9),
        ):
            rows.append(Row(f"{what}, {stages} stages", what, stages, value, too_large=unfit))
    largest = max((s for s, fits in memory.items() if fits), default=0)
    why = "what the paper calls a virtual stage, and its recompute, are not known to us; ours changes with p"
    rows.append(Row("most stages that fit", "largest", 0, largest, 16.0, 0.0, why))
    return Figure("fig14", "Stages a group, DeepSeek-MoE 8K", "stages a group", "tokens/s, GB", rows)


@cache
def dedup() -> Figure:
    """Not in the paper: every system with the same de-duplication and pre-reduce, EP pinned to 64 and free."""
    rows = []
    pinned: dict[tuple[str, Dedup], Gain] = {}
    for ep in (64, None):
        for kind in Dedup:
            found = {s: simulated(s, "deepseek", 8192, 8, kind, ep) for s in ("af_pipe", *RIVALS)}
            for k, system in enumerate(RIVALS):
                label, over = f"{kind}, EP {ep or 'free'}", gain_over(found, (system,))
                rows.append(
                    Row(f"gain over {system}, {label}", label, k, over.gain, too_large=over.too_large)
                )
                if ep == 64:
                    pinned[system, kind] = over
    best_kind = largest([pinned["megatron_1f1b", kind] for kind in Dedup])
    rows.append(_expected("over Megatron, best kind", best_kind, 2.3))
    rows.append(_expected("over DualPipe, node", pinned["dualpipe", Dedup.NODE], 1.3))
    notes = [
        "the numbers under `paper` of this figure are an independent model's expectation, not the paper's",
        "EP free: a rival whose experts fit in one NVLink domain sends nothing over NICs, and wins on a model this small",
    ]
    return Figure("dedup", "The same de-duplication for everyone", "rival", "gain of AF-Pipe", rows, notes)


def _expected(what: str, ours: Gain, expectation: float) -> Row:
    why = "our costs of F-group NICs, residual and recompute differ"
    return Row(what, "expected", 0, ours.gain, expectation, 1.0, why, ours.too_large)


def claims() -> Figure:
    """The paper's headline numbers in one table; each comes from its figure."""
    wanted = {
        "fig3": fig3(),
        "fig6": fig6(),
        "fig10": fig10(),
        "fig11": fig11(),
        "fig12": fig12(),
        "fig14": fig14(),
    }
    rows = [
        replace(row, what=f"{name}: {row.what}", series="claims", x=float(k))
        for name, figure in wanted.items()
        for k, row in enumerate(figure.rows)
        if row.paper is not None
    ]
    return Figure("claims", "Claims", "claim", "value", rows)


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "fig3": fig3,
    "fig6": fig6,
    "fig10": fig10,
    "fig11": fig11,
    "fig12": fig12,
    "fig13": fig13,
    "fig14": fig14,
    "dedup": dedup,
    "claims": claims,
}


def _plain_model(name: str, seq_length: int, nodes: int) -> RivalModel:
    """Megatron without a pipeline: EP over all GPUs, micro-batches of one sequence, no recompute."""
    base = setting(name, seq_length, nodes=nodes)
    assert base.ep_size is not None
    n = base.sequences // base.cluster.gpus
    choice = RivalChoice("megatron_1f1b", 1, base.ep_size, 1, 1, n, 1, base.dedup)
    return RivalModel(base.model, base.equal_nodes, choice)


def _plain(name: str, seq_length: int, nodes: int) -> Result:
    return rival_result(_plain_model(name, seq_length, nodes))


def _compute(rival: RivalModel) -> tuple[StageSeconds, StageSeconds]:
    """Of one micro-batch: all attention stages with the head, all expert stages."""
    attention, ffn = StageSeconds(), StageSeconds()
    for b in range(rival.model.n_boundaries):
        attention += rival.stage_seconds(b * rival.width)
        ffn += rival.stage_seconds(b * rival.width + 1)
    return attention + rival.stage_seconds(rival.model.n_boundaries * rival.width), ffn


def _gain(name: str, seq_length: int, *, ep_size: int | None = 64, top_k: int | None = None) -> Gain:
    found = {s: simulated(s, name, seq_length, 8, Dedup.NONE, ep_size, top_k) for s in RIVALS}
    found["af_pipe"] = simulated("af_pipe", name, seq_length, 8, Dedup.NONE, 64, top_k)
    return gain_over(found, RIVALS)
