"""`disagmoe simulate --model NAME --cluster NAME ...`: AF-Pipe and its rivals on a real model, each with its best sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.model_options import one_of
from disagmoe_compile.cli.output import Output
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import Cluster, find_cluster
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.step_costs import CostSet, Dedup, model_costs
from disagmoe_compile.simulator import advise as advising
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster
from disagmoe_compile.simulator.pictures import draw, write_trace
from disagmoe_compile.simulator.results import Result
from disagmoe_compile.simulator.rival_model import RIVALS
from disagmoe_compile.simulator.search import Setting, best
from disagmoe_compile.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Shown:
    """Files to write beside the table."""

    trace: Path | None = None
    picture: Path | None = None

    def write(self, timelines: Mapping[str, Timeline], title: str, unit: str = "s") -> None:
        if self.trace is not None:
            write_trace(timelines, self.trace)
        if self.picture is not None:
            name, first = next(iter(timelines.items()))
            draw(first, self.picture, f"{name}: {title}", unit=unit)

    def tell(self, console: Console) -> None:
        for path in (self.trace, self.picture):
            if path is not None:
                console.print(f"wrote {path}", highlight=False)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The options as given; `setting` checks them."""

    model: str | None
    cluster: str | None
    nodes: int | None
    ffn_cluster: str | None
    ffn_nodes: int | None
    seq_length: int | None
    sequences_per_gpu: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    pipeline_groups: int | None
    attention_group_size: int | None
    ffn_group_size: int | None
    ep_size: int | None
    costs: str
    dedup: str
    recompute: str | None
    shared_experts_on: str | None
    schedules: tuple[str, ...]

    def setting(
        self, spec: ModelSpec | None = None, cluster: Cluster | None = None, element_bytes: int = 2
    ) -> tuple[ModelSpec, Setting]:
        """Raises InputError naming the option that is missing or wrong. `spec`, `cluster`: where no option names another."""
        if self.model is not None:
            spec = find_model(self.model)
        if self.cluster is not None:
            cluster = find_cluster(self.cluster, self.nodes)
        elif cluster is not None and self.nodes is not None:
            cluster = cluster.with_nodes(self.nodes)
        if spec is None or cluster is None or self.seq_length is None:
            raise InputError(
                "give --model, --cluster and --seq-length, or --plan FILE, or --schedule with --stage-times"
            )
        on = self._with_ffn_nodes(cluster)
        for name in (
            "seq_length",
            "sequences_per_gpu",
            "global_batch_size",
            "micro_batch_size",
            "pipeline_groups",
            "attention_group_size",
            "ffn_group_size",
            "ep_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if (self.sequences_per_gpu is None) == (self.global_batch_size is None):
            raise InputError("give either --sequences-per-gpu or --global-batch-size")
        cost_set = one_of("costs", self.costs, {c.value: c for c in CostSet})
        recompute = one_of("recompute", self.recompute, {"none": False, "stage": True})
        side = one_of("shared-experts-on", self.shared_experts_on, {"attention": False, "ffn": True})
        for name in self.schedules:
            if name not in ("af_pipe", *RIVALS):
                raise InputError(f"unknown schedule {name!r}; one of af_pipe, {', '.join(RIVALS)}")
        return spec, Setting(
            model=model_costs(
                spec, seq_length=self.seq_length, cost_set=cost_set, element_bytes=element_bytes
            ),
            cluster=on,
            sequences=self.global_batch_size or (self.sequences_per_gpu or 1) * on.gpus,
            dedup=one_of("dedup", self.dedup, {d.value: d for d in Dedup}),
            micro_batch_size=self.micro_batch_size,
            pipeline_groups=self.pipeline_groups,
            attention_group_size=self.attention_group_size,
            ffn_group_size=self.ffn_group_size,
            ep_size=self.ep_size,
            recompute=recompute,
            shared_on_ffn=side,
        )

    def _with_ffn_nodes(self, cluster: Cluster) -> AnyCluster:
        if self.ffn_cluster is None:
            return cluster
        if self.nodes is not None and self.ffn_nodes is None:
            raise InputError(
                "--nodes counts those of --cluster; say with --ffn-nodes how many --ffn-cluster has"
            )
        return MixedCluster(cluster, find_cluster(self.ffn_cluster, self.ffn_nodes))


def simulate_model(request: ModelRequest, shown: Shown, *, with_advice: bool) -> Output:
    spec, setting = request.setting()
    systems = list(dict.fromkeys(request.schedules))
    if with_advice:
        systems = list(dict.fromkeys(("af_pipe", *systems, *advising.COMPARED)))
    results = [best(setting, system) for system in systems]
    document: dict[str, Any] = {
        "simulated": True,
        "model": spec.name,
        "cluster": setting.cluster.name,
        "gpus": setting.cluster.gpus,
        "seq_length": setting.model.seq_length,
        "results": [result.to_dict() for result in results],
    }
    if with_advice:
        verdicts = advising.advise(spec, setting, results)
        document["advice"] = {
            "summary": advising.summary(verdicts, setting.cluster),
            "verdicts": [v.to_dict() for v in verdicts],
        }
    title = f"{spec.name}, {setting.model.seq_length} tokens, {setting.cluster.gpus} GPUs"
    if isinstance(setting.cluster, MixedCluster):
        title = f"{title} ({setting.cluster.name})"
    shown.write({result.schedule: result.timeline for result in results}, title)

    def render(console: Console) -> None:
        render_results(console, title, results)
        if with_advice:
            _render_advice(console, document["advice"])
        shown.tell(console)

    return Output(document, render)


def render_results(console: Console, title: str, results: Sequence[Result]) -> None:
    table = Table(title=f"{title} (simulated)", box=None, padding=(0, 1))
    table.add_column("schedule", no_wrap=True)
    for column in ("step\ns", "tokens/s\n/ GPU", "MFU\n%", "exposed\ns", "bubble\ns", "/bound", "GB", "GPUs"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        sizes = " | ".join(map(_sizes, result.options.get("copies", [result.options])))
        memory = max(result.peak_bytes.values()) / 1e9
        table.add_row(
            result.schedule,
            f"{result.step_s:.3f}",
            f"{result.tokens_per_s_per_gpu:,.0f}",
            f"{100 * result.mfu:.1f}",
            f"{result.exposed_s:.3f}",
            f"{float(result.critical.bubble):.3f}",
            f"{result.step_s / float(result.bound.seconds):.2f}",
            f"{memory:.0f}" + ("" if result.fits else "!"),
            sizes,
        )
    console.print(table)
    if not all(result.fits for result in results):
        console.print("! does not fit in memory: nothing that was tried does", highlight=False)
    placed = {r.schedule: r.options["placement"] for r in results if "placement" in r.options}
    if placed:
        where = "; ".join(f"{schedule}: {placement}" for schedule, placement in placed.items())
        console.print(where, highlight=False)


def _sizes(options: Mapping[str, Any]) -> str:
    if "ep_size" in options:
        return f"{options['pipeline_ranks']}x EP{options['ep_size']}"
    return f"{options['pipeline_groups']}x{options['attention_group_size']}+{options['ffn_group_size']}"


def _render_advice(console: Console, advice: Mapping[str, Any]) -> None:
    table = Table(title="AF-Pipe against the best tuned rival (simulated)")
    table.add_column("change")
    table.add_column("gain", justify="right")
    table.add_column("best rival")
    as_asked = advice["verdicts"][0]["af_pipe_placement"]
    for row in advice["verdicts"]:
        marks = ["" if row[f"{who}_fits_memory"] else "!" for who in ("af_pipe", "rival")]
        change, rival, placed = row["change"], row["best_rival"] + marks[1], row["af_pipe_placement"]
        if row["rival_placement"]:
            rival = f"{rival}: {row['rival_placement']}"
        if placed not in (None, as_asked) and placed not in change:
            change = f"{change}; AF-Pipe: {placed}"
        table.add_row(change, f"{row['gain']:+.1%}{marks[0]}", rival)
    console.print(table)
    if not all(row["af_pipe_fits_memory"] and row["rival_fits_memory"] for row in advice["verdicts"]):
        console.print("! does not fit in memory: at a gain AF-Pipe, at its name the rival", highlight=False)
    console.print(advice["summary"], highlight=False)
