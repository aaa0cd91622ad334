"""`disagmoe simulate --plan FILE`: a plan of `disagmoe plan` (sizes) or of `disagmoe train` (every action), alone or beside
its run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import Output
from disagmoe_compile.cli.simulate_model import ModelRequest, Shown, render_results
from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.completeness import peak_activation_bytes
from disagmoe_compile.plan.serialize import from_dict
from disagmoe_compile.plan.sizing import KIND, Sizing, parse_sizing
from disagmoe_compile.plan.validate import check
from disagmoe_compile.planner.hardware import find_cluster, local_cpu
from disagmoe_compile.planner.size import candidate_of
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.plan_program import Durations, plan_program, read_timeline
from disagmoe_compile.simulator.planned import planned_model
from disagmoe_compile.simulator.program import Queueing
from disagmoe_compile.simulator.reality import Row, compare
from disagmoe_compile.simulator.results import af_result
from disagmoe_compile.simulator.search import best
from disagmoe_compile.simulator.simulate import recorded_cluster, recorded_model
from disagmoe_compile.simulator.timeline import simulate_program


def simulate_plan(path: Path, timeline: Path | None, request: ModelRequest, shown: Shown) -> Output:
    document = read_json(path, "plan file")
    if isinstance(document, dict) and document.get("kind") == KIND:
        if timeline is not None:
            raise InputError(
                f"{path} holds sizes alone; --timeline needs the plan.json of the run it was recorded in"
            )
        return _sizes(parse_sizing(document), request, shown)
    return _actions(document, path, timeline, request, shown)


def read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{what} {path} is not JSON: {error}") from None


def _sizes(sizing: Sizing, request: ModelRequest, shown: Shown) -> Output:
    """Model and cluster are those that the plan was made for, unless options name others."""
    filled = replace(
        request,
        seq_length=sizing.seq_length,
        sequences_per_gpu=None,
        global_batch_size=sizing.global_batch_size,
        micro_batch_size=sizing.micro_batch_size,
        costs=sizing.inputs["cost_set"],
        dedup=sizing.dedup,
    )
    spec, setting = filled.setting(
        None if request.model else recorded_model(sizing),
        None if request.cluster else recorded_cluster(sizing),
        sizing.inputs["element_bytes"],
    )
    model = planned_model(setting.model, setting.equal_nodes, candidate_of(sizing), setting.dedup)
    planned = af_result(model, shard_optimizer=sizing.shard_optimizer)
    rivals = replace(setting, micro_batch_size=request.micro_batch_size)
    results = [planned, *(best(rivals, s) for s in dict.fromkeys(request.schedules) if s != "af_pipe")]
    document = {
        "simulated": True,
        "model": spec.name,
        "planned_step_s": sizing.step_s,
        "results": [result.to_dict() for result in results],
    }
    title = f"{spec.name}, {sizing.seq_length} tokens, {sizing.world_size} GPUs"
    shown.write({result.schedule: result.timeline for result in results}, title)

    def render(console: Console) -> None:
        render_results(console, title, results)
        console.print(
            f"the planner's closed form says {sizing.step_s:.4g} s, the simulation of its plan {planned.step_s:.4g} s",
            highlight=False,
        )
        shown.tell(console)

    return Output(document, render)


def _actions(document: Any, path: Path, timeline: Path | None, request: ModelRequest, shown: Shown) -> Output:
    plan = from_dict(document)
    check(plan)
    if timeline is not None:
        simulated, rows = compare(plan, read_timeline(read_json(timeline, "timeline")))
        shown.write({simulated.program.schedule.name: simulated}, str(path))
        compared = {"simulated": True, "comparison": [row.to_dict() for row in rows]}
        return Output(compared, lambda console: _render_rows(console, rows, shown))
    world = plan.topology.world_size
    cluster = find_cluster(request.cluster, request.nodes) if request.cluster else local_cpu(world)
    training = plan.training is not None
    durations = Durations.of_cluster(plan, cluster)
    queueing = Queueing.LIST if request.cluster else Queueing.HOST
    program = plan_program(plan, durations, training=training, queueing=queueing)
    simulated = simulate_program(program)
    bound, critical = lower_bound(program), simulated.share(simulated.busiest())
    tokens = plan.workload.global_batch_size * plan.workload.tokens_per_sample
    step = float(simulated.makespan)
    peaks = {str(group): nbytes for group, nbytes in peak_activation_bytes(plan).items()}
    result = {
        "schedule": program.schedule.name,
        "step_s": step,
        "tokens_per_s_per_gpu": tokens / step / world if step else 0.0,
        "exposed_comm_s": float(critical.exposed),
        "bubble_s": float(critical.bubble),
        "lower_bound_s": float(bound.seconds),
        "bounded_by": bound.limit,
        "peak_activation_bytes": peaks,
        "options": {"cluster": cluster.name, "queueing": str(queueing)},
    }
    shown.write({program.schedule.name: simulated}, str(path))

    def render(console: Console) -> None:
        console.print(
            f"{program.schedule.name} on {cluster.name}, simulated: step {step:.4g} s, exposed {result['exposed_comm_s']:.3g} s, "
            f"bubble {result['bubble_s']:.3g} s, lower bound {result['lower_bound_s']:.4g} s by {bound.limit}",
            highlight=False,
        )
        shown.tell(console)

    return Output({"simulated": True, "results": [result]}, render)


def _render_rows(console: Console, rows: list[Row], shown: Shown) -> None:
    table = Table(title="Prediction against the recorded run (seconds a step; kinds: mean of ranks)")
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(row.what, f"{row.predicted_s:.4f}", f"{row.measured_s:.4f}", error)
    console.print(table)
    shown.tell(console)
