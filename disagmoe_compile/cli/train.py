"""`disagmoe train SOURCE`: trains a model on local ranks, one process each, and can compare it with plain
eager PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagmoe_compile.cli.output import DebugOption, JsonOption, Output, command


@command
def train(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="hf:FAMILY or path/to/file.py:factory.")],
    attention_group_size: Annotated[
        int | None, typer.Option(help="Ranks of one attention group.", show_default="planner")
    ] = None,
    ffn_group_size: Annotated[
        int | None, typer.Option(help="Ranks of one FFN group.", show_default="planner")
    ] = None,
    pipeline_groups: Annotated[
        int | None, typer.Option(help="Groups of each kind.", show_default="planner")
    ] = None,
    n_microbatches: Annotated[
        int | None, typer.Option(help="Micro-batches a step.", show_default="planner")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks, if sizes are left to the planner.", show_default="4")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples a step, of all ranks.", show_default="8")
    ] = None,
    seq_length: Annotated[int, typer.Option(help="Tokens a sample.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE_OR_DIR", help="Text.", show_default="Python's standard library"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also train in eager, in one process, and compare.")
    ] = False,
    stage_compiler: Annotated[
        str | None, typer.Option(help="inductor, aot_eager or eager.", show_default="inductor")
    ] = None,
    schedule: Annotated[str, typer.Option(help="af_pipe, af_pipe_in_order or gpipe.")] = "af_pipe",
    dedup: Annotated[
        str | None,
        typer.Option(
            help="Copies of a token: one for each FFN rank, or each expert: rank or none.",
            show_default="rank",
        ),
    ] = None,
    payload_dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of rows on the wire: bfloat16, float16 or float32.", show_default="as computed"
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Forwards that backward repeats: none, stage, attention or ffn.", show_default="none"
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this plan instead of planning.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/<time>")] = None,
    log_jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="One JSON line a step.")] = None,
    timeout: Annotated[float, typer.Option(help="Longest wait on a peer, in seconds.")] = 600,
    master_port: Annotated[
        int | None, typer.Option(help="Port of the rendezvous.", show_default="a free one")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Output:
    """Trains a model with attention and experts on disjoint local ranks."""
    from disagmoe_compile.cli.train_run import TrainRequest, run

    request = TrainRequest(
        source=source,
        attention_group_size=attention_group_size,
        ffn_group_size=ffn_group_size,
        pipeline_groups=pipeline_groups,
        n_microbatches=n_microbatches,
        nproc=nproc,
        steps=steps,
        batch_size=batch_size,
        seq_length=seq_length,
        lr=lr,
        seed=seed,
        data=data,
        check=check,
        stage_compiler=stage_compiler,
        schedule=schedule,
        dedup=dedup,
        payload_dtype=payload_dtype,
        recompute=recompute,
        plan=plan,
        output_dir=output_dir,
        log_jsonl=log_jsonl,
        timeout=timeout,
        master_port=master_port,
    )
    return run(request, quiet=as_json)
