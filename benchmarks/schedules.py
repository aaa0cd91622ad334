"""How near AF-Pipe's orders come to what no schedule can beat, over ratios of attention, FFN and exchange (bar: 1.05).

    python benchmarks/schedules.py [--layers 8]

Per order the makespan over the bound: median and worst of the ratios, and the most activations that a group holds. Simulated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.in_order import in_order
from disagmoe_compile.passes.schedule.list_schedule import list_schedule
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.passes.schedule.rehearsal import Rehearsal
from disagmoe_compile.plan.ir import Schedule, TransferKind
from disagmoe_compile.plan.sharing import Leg
from disagmoe_compile.simulator.abstract import AFShape, af_program, resident_activations
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.program import Program
from disagmoe_compile.simulator.timeline import simulate_program

RATIOS = ((1, 1, 0.3), (2, 1, 0.5), (1, 2, 0.5), (3, 2, 1), (2, 2, 2))
"""Forward of an attention and an FFN stage, and an exchange; a backward takes twice its forward, half of it for the weights."""
SIZES = ((1, 8), (2, 32), (4, 64))
"""Pipeline groups and micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    for p, n in SIZES:
        shape = AFShape(p, layers, n)
        for order in ("rounds", "in order", "list, 4p", "list, 8p"):
            ratios, held = [], 0
            for a, f, c in RATIOS:
                times = {"A": a, "F": f, "C": c, "BA": 2 * a, "WA": a, "BF": 2 * f, "WF": f}
                base = _with_last_exchange(af_program(times, shape), c)
                seconds = {key: float(value) for key, value in base.seconds.items()}
                schedule = _schedule(order, shape, Rehearsal.of_exchanges(shape.topology, seconds, c))
                program = replace(base, schedule=lower_lists(schedule, base.transfers, release_sends=False))
                bound = lower_bound(program).seconds
                ratios.append(float(simulate_program(program).makespan) / float(bound))
                held = max(held, *resident_activations(schedule, shape.topology).values())
            each = " ".join(f"{ratio:.3f}" for ratio in ratios)
            median = statistics.median(ratios)
            sys.stdout.write(
                f"p={p} n={n} {order}: median {median:.3f} worst {max(ratios):.3f} held {held}  ({each})\n"
            )
            sys.stdout.flush()


def _with_last_exchange(program: Program, amount: float) -> Program:
    """Closed forms leave the last combine out; a model has it."""
    groups = {
        action.stage: str(group) for group, actions in program.schedule.actions.items() for action in actions
    }
    moved = {
        transfer.name: (Leg(amount, ((groups[transfer.src], "send"), (groups[transfer.dst], "recv"))),)
        for transfer in program.transfers
        if transfer.kind in (TransferKind.DISPATCH, TransferKind.COMBINE)
    }
    return replace(program, messages=moved)


def _schedule(order: str, shape: AFShape, rehearsal: Rehearsal) -> Schedule:
    p, n = shape.pipeline_groups, shape.n_microbatches
    if order in ("rounds", "in order"):
        return (af_pipe if order == "rounds" else in_order)(shape.topology, n)
    in_flight = (4 if order == "list, 4p" else 8) * p
    return list_schedule(shape.topology, n, in_flight=in_flight, rehearsal=rehearsal)


if __name__ == "__main__":
    main()
