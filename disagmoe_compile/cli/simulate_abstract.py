"""`disagmoe simulate --schedule NAME --stage-times JSON`: schedules on stages of given times, for closed forms."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table

from disagmoe_compile.cli.output import Output
from disagmoe_compile.cli.simulate_model import Shown
from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.sharing import Number
from disagmoe_compile.simulator.abstract import (
    SCHEDULES,
    AFShape,
    PipelineShape,
    af_program,
    pipeline_program,
    resident_activations,
)
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.program import Program
from disagmoe_compile.simulator.timeline import Timeline, simulate_program


def simulate_abstract(
    name: str,
    stage_times: str | None,
    ranks: int | None,
    chunks: int,
    n_microbatches: int | None,
    pipeline_groups: int | None,
    layers: int | None,
    forward_only: bool,
    shown: Shown,
) -> Output:
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; one of {', '.join(SCHEDULES)}")
    times = parse_times(stage_times)
    resident: dict[str, int] = {}
    if name == "af_pipe":
        p, n_layers, n = _given(
            name, pipeline_groups=pipeline_groups, layers=layers, n_microbatches=n_microbatches
        )
        _not_given(name, ranks=ranks, chunks=None if chunks == 1 else chunks)
        shape = AFShape(p, n_layers, n, forward_only)
        # rates that are shared again and again make fractions of thousands of digits
        program = af_program({key: float(value) for key, value in times.items()}, shape)
        if not forward_only:
            held = resident_activations(program.schedule, shape.topology)
            resident = {str(group): count for group, count in held.items()}
    else:
        p, n = _given(name, ranks=ranks, n_microbatches=n_microbatches)
        _not_given(
            name, pipeline_groups=pipeline_groups, layers=layers, forward_only=True if forward_only else None
        )
        program = pipeline_program(name, times, PipelineShape(p, n, chunks))
    timeline = simulate_program(program)
    document = abstract_document(name, program, timeline)
    if resident:
        document["resident_activations"] = resident
    shown.write({name: timeline}, f"{n} micro-batches", unit="unit of the stage times")
    return Output(document, lambda console: _render_abstract(console, document, shown))


def parse_times(text: str | None) -> dict[str, Number]:
    """Stage times from JSON, as exact fractions. Raises InputError."""
    if text is None:
        raise InputError('--schedule needs --stage-times, e.g. \'{"F": 1, "B": 2}\'')
    try:
        found = json.loads(text, parse_float=Fraction, parse_int=Fraction, parse_constant=float)
    except ValueError as error:
        raise InputError(f"--stage-times is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"--stage-times must be an object of numbers, got {text}")
    return found


def abstract_document(name: str, program: Program, timeline: Timeline) -> dict[str, Any]:
    """`bubble`: makespan minus the busy time of the busiest compute resource."""
    busy = {str(group): timeline.share(group).busy for group in timeline.groups}
    bound = lower_bound(program)
    makespan = timeline.makespan
    return {
        "schedule": name,
        "makespan": float(makespan),
        "bubble": float(makespan - max(busy.values())),
        "idle": {group: float(makespan - spent) for group, spent in busy.items()},
        "lower_bound": float(bound.seconds),
        "bounded_by": bound.limit,
    }


def _given(name: str, **options: int | None) -> tuple[int, ...]:
    missing = [f"--{key.replace('_', '-')}" for key, value in options.items() if value is None]
    if missing:
        raise InputError(f"--schedule {name} needs {' and '.join(missing)}")
    return tuple(value for value in options.values() if value is not None)


def _not_given(name: str, **options: object) -> None:
    extra = [f"--{key.replace('_', '-')}" for key, value in options.items() if value is not None]
    if extra:
        raise InputError(f"--schedule {name} takes no {' and no '.join(extra)}")


def _render_abstract(console: Console, document: dict[str, Any], shown: Shown) -> None:
    table = Table(title=f"{document['schedule']} (simulated; in the unit of the stage times)")
    table.add_column("resource")
    table.add_column("idle", justify="right")
    for resource, idle in document["idle"].items():
        table.add_row(resource, f"{idle:.6g}")
    console.print(table)
    ratio = document["makespan"] / document["lower_bound"] if document["lower_bound"] else 1.0
    console.print(
        f"makespan {document['makespan']:.6g}, bubble {document['bubble']:.6g}, lower bound {document['lower_bound']:.6g} "
        f"(by {document['bounded_by']}), makespan / bound {ratio:.3f}",
        highlight=False,
    )
    shown.tell(console)
