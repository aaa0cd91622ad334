"""`disagmoe plan`: how many GPUs do attention and how many hold experts, and everything else that a training step needs.

Three uses: a model on a cluster (`--model --cluster --seq-length ...`), the same over values of a parameter (`--sweep`), and the
bare allocation problem of a file (`--problem`). Only `--model hf:FAMILY` and `--refine measured` load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from disagmoe_compile.cli import plan_report
from disagmoe_compile.cli.model_options import (
    AttentionGroupSizeOption,
    CostsOption,
    DedupOption,
    FfnGroupSizeOption,
    MicroBatchSizeOption,
    NodesOption,
    PipelineGroupsOption,
    SeqLengthOption,
    SequencesPerGpuOption,
    SharedExpertsOnOption,
    one_of,
)
from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.cli.plan_refine import MEASURED, SIMULATED, Refining, refined
from disagmoe_compile.errors import InputError
from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.plan.recompute import RECOMPUTE
from disagmoe_compile.plan.sizing import Sizing, dump_sizing
from disagmoe_compile.planner.allocation import solve
from disagmoe_compile.planner.hardware import Cluster, find_cluster, local_cpu
from disagmoe_compile.planner.model_spec import ModelSpec
from disagmoe_compile.planner.problem_file import load_problem
from disagmoe_compile.planner.sensitivity import even_split, explain, roofs
from disagmoe_compile.planner.size import candidate_of, size
from disagmoe_compile.planner.sizing_problem import (
    SizingOptions,
    SizingProblem,
    TrainingState,
    TrainingWorkload,
)
from disagmoe_compile.planner.step_costs import CostSet, Dedup, model_costs
from disagmoe_compile.planner.step_model import StepModel
from disagmoe_compile.planner.sweep import Sweep, parse_sweep

LOCAL = "local-cpu"
_FP32_STATE = TrainingState(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is planned: the parts of a sizing problem before a sweep changes one of them."""

    model: ModelSpec
    cluster: Cluster
    workload: TrainingWorkload
    options: SizingOptions
    costs: CostSet
    element_bytes: int
    time_limit_s: float

    def problem(self) -> SizingProblem:
        costs = model_costs(
            self.model,
            seq_length=self.workload.seq_length,
            cost_set=self.costs,
            element_bytes=self.element_bytes,
        )
        return SizingProblem(costs, self.cluster, self.workload, self.options)

    def sized(self, problem: SizingProblem, alternatives: int) -> Sizing:
        return size(
            problem,
            time_limit_s=self.time_limit_s,
            alternatives=alternatives,
            model_document=self.model.to_dict(),
        )

    def with_value(self, parameter: str, value: int) -> _Request:
        """The request at one value of a sweep."""
        if parameter == "nodes":
            return replace(self, cluster=self.cluster.with_nodes(value))
        if parameter == "pipeline-groups":
            return replace(self, options=replace(self.options, pipeline_groups=value))
        changed: dict[str, Any] = {parameter.replace("-", "_"): value}
        return replace(self, workload=replace(self.workload, **changed))


@command
def plan(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="See `disagmoe models`; a config.json; or hf:FAMILY."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help=f"See `disagmoe clusters`; a cluster file; or {LOCAL}:RANKS."),
    ] = None,
    nodes: NodesOption = None,
    seq_length: SeqLengthOption = None,
    sequences_per_gpu: SequencesPerGpuOption = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a step, exactly; instead of --sequences-per-gpu.")
    ] = None,
    micro_batch_size: MicroBatchSizeOption = None,
    pipeline_groups: PipelineGroupsOption = None,
    attention_group_size: AttentionGroupSizeOption = None,
    ffn_group_size: FfnGroupSizeOption = None,
    costs: CostsOption = "corrected",
    dedup: DedupOption = "rank",
    recompute: Annotated[
        str | None,
        typer.Option(help="none, stage (both sides), attention or ffn.", show_default="chosen, a side"),
    ] = None,
    shared_experts_on: SharedExpertsOnOption = None,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="May shard optimizer state over attention replicas.")
    ] = False,
    nics: Annotated[
        str, typer.Option(help="tied: a group has those of its GPUs; free: shared out like GPUs.")
    ] = "tied",
    whole_nodes: Annotated[bool, typer.Option("--whole-nodes", help="Groups do not share nodes.")] = False,
    nic_share: Annotated[float, typer.Option(help="Share of the NICs in use; the paper uses 0.5.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan file.")] = None,
    explain_it: Annotated[
        bool, typer.Option("--explain", help="Stage times, ridge points, what one device more changes.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --explain a roofline, with --sweep its curve: PNG or SVG."),
    ] = None,
    refine: Annotated[
        str | None,
        typer.Option(
            metavar="measured|simulated",
            help="Local search on steps of the real runtime (needs --model hf:FAMILY), or on simulated steps.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Plans that --refine tries.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the trials of --refine.")] = 0,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="PARAMETER=V1,V2,...", help="Plan for each value of seq-length, nodes, ..."),
    ] = None,
    alternatives: Annotated[int, typer.Option(help="Next-best plans to report.")] = 3,
    time_limit: Annotated[float, typer.Option(help="Seconds that the solver may take.")] = 60,
    problem: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The bare problem instead: attention_flops, ffn_flops, exchange_bytes (of a stage), gpus, nics, gpu_flops, "
            "nic_bytes_per_s.",
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Sizes a cluster for a model: the plan with most tokens a second that fits its memory."""
    if problem is not None:
        if model is not None or cluster is not None:
            raise InputError("--problem states the whole problem; leave --model and --cluster out")
        loaded = load_problem(problem)
        allocation = solve(loaded, time_limit_s=time_limit)
        return Output(
            allocation.to_dict(), lambda console: plan_report.render_allocation(console, loaded, allocation)
        )
    swept = None if sweep is None else parse_sweep(sweep)
    if swept is not None and swept.parameter == "seq-length" and seq_length is None:
        seq_length = swept.values[0]
    if model is None or cluster is None or seq_length is None:
        needed = {"--model": model, "--cluster": cluster, "--seq-length": seq_length}
        missing = [name for name, value in needed.items() if value is None]
        raise InputError(f"give {' and '.join(missing)} (or --problem FILE)")
    is_local = cluster.split(":")[0] == LOCAL
    one_of("refine", refine, dict.fromkeys((MEASURED, SIMULATED), True))
    measured = refine == MEASURED
    request = _Request(
        model=_model(model),
        cluster=_local(cluster) if is_local else find_cluster(cluster, nodes),
        workload=TrainingWorkload(seq_length, global_batch_size, sequences_per_gpu, micro_batch_size),
        options=SizingOptions(
            dedup=one_of("dedup", dedup, {d.value: d for d in Dedup}),
            pipeline_groups=pipeline_groups,
            attention_group_size=attention_group_size,
            ffn_group_size=ffn_group_size,
            whole_nodes=whole_nodes,
            free_nics=one_of("nics", nics, {"tied": False, "free": True}),
            nic_share=nic_share,
            recompute="none" if measured else one_of("recompute", recompute, {c: c for c in RECOMPUTE}),
            shared_experts_on="attention" if measured else shared_experts_on,
            shard_optimizer=None if shard_optimizer else False,
            state=_FP32_STATE if is_local else TrainingState(),
        ),
        costs=one_of("costs", costs, {c.value: c for c in CostSet}),
        element_bytes=4 if is_local else 2,
        time_limit_s=time_limit,
    )
    if plot is not None:
        from disagmoe_compile.planner.plots import check_drawable

        check_drawable(plot)
    if swept is not None:
        return _sweep(request, swept, plot)
    refining = None if refine is None else Refining(refine, model, trials, seed)
    return _plan(request, out, explain_it, plot, alternatives, refining)


def _plan(
    request: _Request,
    out: Path | None,
    explain_it: bool,
    plot: Path | None,
    alternatives: int,
    refining: Refining | None,
) -> Output:
    problem = request.problem()
    found = request.sized(problem, alternatives)
    extra: dict[str, Any] = {}
    if refining is not None:
        found, extra["refinement"] = refined(problem, found, refining)
    failure = None if out is None else _write(found, out)
    if explain_it or plot is not None:
        model, chosen = StepModel(problem), candidate_of(found)
        extra["explanation"] = explain(problem, model, chosen)
        if plot is not None:
            from disagmoe_compile.planner.plots import draw_rooflines

            before = even_split(problem, chosen)
            draw_rooflines(
                plot,
                title=f"{problem.costs.name}, {problem.costs.seq_length} tokens, {found.world_size} GPUs",
                before=roofs(model, before, model.predict(before)),
                after=roofs(model, chosen, model.predict(chosen)),
            )

    def render(console: Console) -> None:
        plan_report.render_sizing(console, found, problem)
        if "refinement" in extra:
            plan_report.render_refinement(console, extra["refinement"])
        if explain_it:
            plan_report.render_explanation(console, extra["explanation"])
        for path in (None if failure else out, plot):
            if path is not None:
                console.print(f"wrote {path}", highlight=False)

    return Output({**found.to_dict(), **extra}, render, failure)


def _sweep(request: _Request, swept: Sweep, plot: Path | None) -> Output:
    rows: list[dict[str, Any]] = []
    for value in swept.values:
        try:
            one = request.with_value(swept.parameter, value)
            document = one.sized(one.problem(), 0).to_dict()
            rows.append(
                {k: v for k, v in document.items() if k not in ("inputs", "alternatives", "versions")}
            )
        except InputError as error:
            raise InputError(f"{swept.parameter} {value}: {error}") from error
    if plot is not None:
        from disagmoe_compile.planner.plots import draw_sweep

        draw_sweep(plot, parameter=swept.parameter, values=swept.values, rows=rows)
    document = {"parameter": swept.parameter, "values": list(swept.values), "results": rows}
    return Output(document, lambda console: plan_report.render_sweep(console, swept, rows, plot))


def _write(found: Sizing, path: Path) -> InputError | None:
    """The error is returned: what was found is shown first, or the search would have been for nothing."""
    try:
        dump_sizing(found, path)
    except OSError as error:
        return InputError(f"cannot write the plan file {str(path)!r}: {error.strerror}")
    return None


def _model(name: str) -> ModelSpec:
    if name.startswith("hf:"):
        from disagmoe_compile.cli.plan_measure import spec_of_source

        return spec_of_source(name)
    return find_model(name)


def _local(name: str) -> Cluster:
    """`local-cpu:4`: four ranks of this machine."""
    _, _, count = name.partition(":")
    if not (count or "4").isdigit() or int(count or 4) < 2:
        raise InputError(f"--cluster {name}: expected {LOCAL}:RANKS with at least 2 ranks")
    return local_cpu(int(count or 4))
