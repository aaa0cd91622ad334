"""`disagmoe simulate`: what a step takes, predicted from the schedule itself. Every number is simulated, none is measured.

--model --cluster --seq-length ...     AF-Pipe and its rivals side by side, each with its best sizes (`simulate_model.py`)
--plan FILE                            what `disagmoe plan` or `disagmoe train` wrote (`simulate_plan.py`)
--plan FILE --timeline FILE            the same beside a recorded run of that plan
--schedule NAME --stage-times JSON     abstract stages, for closed forms (`simulate_abstract.py`)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
)
from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command
from disagmoe_compile.cli.simulate_abstract import simulate_abstract
from disagmoe_compile.cli.simulate_model import ModelRequest, Shown, simulate_model
from disagmoe_compile.cli.simulate_plan import simulate_plan
from disagmoe_compile.errors import InputError
from disagmoe_compile.simulator.abstract import SCHEDULES


@command
def simulate(
    model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="See `disagmoe models`; or a config.json.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="See `disagmoe clusters`; or a cluster file.")
    ] = None,
    nodes: NodesOption = None,
    ffn_cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A second kind of nodes: FFN ranks run on these, attention ranks on those of --cluster.",
            show_default="all on --cluster",
        ),
    ] = None,
    ffn_nodes: Annotated[int | None, typer.Option(help="Nodes of --ffn-cluster, beside --nodes.")] = None,
    seq_length: SeqLengthOption = None,
    sequences_per_gpu: SequencesPerGpuOption = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a step, at most; instead of --sequences-per-gpu.")
    ] = None,
    micro_batch_size: MicroBatchSizeOption = None,
    pipeline_groups: PipelineGroupsOption = None,
    attention_group_size: AttentionGroupSizeOption = None,
    ffn_group_size: FfnGroupSizeOption = None,
    ep_size: Annotated[
        int | None, typer.Option(help="Rivals: GPUs that share the experts.", show_default="searched")
    ] = None,
    costs: CostsOption = "corrected",
    dedup: DedupOption = "rank",
    recompute: Annotated[
        str | None, typer.Option(help="none or stage, on both sides.", show_default="chosen, a side")
    ] = None,
    shared_experts_on: SharedExpertsOnOption = None,
    schedules: Annotated[
        str,
        typer.Option(
            metavar="A,B,...", help="af_pipe, megatron_1f1b, tutel, comet, dualpipe, dualpipe_ideal."
        ),
    ] = "af_pipe,megatron_1f1b,tutel,comet,dualpipe",
    advise: Annotated[
        bool,
        typer.Option("--advise", help="Should this model be disaggregated, and what would flip the answer?"),
    ] = False,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="A plan file.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --plan: timeline.json of a run of it, to compare with."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the first schedule: PNG or SVG.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Abstract stages: {', '.join(SCHEDULES)}.")
    ] = None,
    stage_times: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="F, B, W, FB of a rank and micro-batch over all its chunks; af_pipe: A, F of a stage, C of an exchange.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Abstract: pipeline ranks.")] = None,
    chunks: Annotated[int, typer.Option(help="Abstract: chunks of layers a rank.")] = 1,
    n_microbatches: Annotated[int | None, typer.Option(help="Abstract: micro-batches.")] = None,
    layers: Annotated[int | None, typer.Option(help="Abstract af_pipe: layers.")] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Abstract af_pipe: the forward alone.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Predicts step time of schedules side by side. Simulated, not measured."""
    shown = Shown(trace, picture)
    if ffn_cluster is None and ffn_nodes is not None:
        raise InputError("--ffn-nodes needs --ffn-cluster, the kind of those nodes")
    if ffn_cluster is not None and (model is None or plan is not None or schedule is not None):
        raise InputError(
            "--ffn-cluster is for --model NAME without --plan or --schedule: a plan has one kind of nodes"
        )
    if schedule is not None:
        return simulate_abstract(
            schedule, stage_times, ranks, chunks, n_microbatches, pipeline_groups, layers, forward_only, shown
        )
    if stage_times is not None:
        raise InputError("--stage-times needs --schedule NAME")
    request = ModelRequest(
        model=model,
        cluster=cluster,
        nodes=nodes,
        ffn_cluster=ffn_cluster,
        ffn_nodes=ffn_nodes,
        seq_length=seq_length,
        sequences_per_gpu=sequences_per_gpu,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        pipeline_groups=pipeline_groups,
        attention_group_size=attention_group_size,
        ffn_group_size=ffn_group_size,
        ep_size=ep_size,
        costs=costs,
        dedup=dedup,
        recompute=recompute,
        shared_experts_on=shared_experts_on,
        schedules=tuple(schedules.split(",")),
    )
    if plan is not None:
        return simulate_plan(plan, timeline, request, shown)
    if timeline is not None:
        raise InputError("--timeline needs --plan FILE, the plan of that run")
    return simulate_model(request, shown, with_advice=advise)
