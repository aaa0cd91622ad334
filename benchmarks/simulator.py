"""How long the simulator takes: 128 GPUs, 94 layers, 64 micro-batches, on one core (bar: 10 s).

    python benchmarks/simulator.py [--pipeline-groups 1 2 4] [--n-microbatches 64]

Prints CPU seconds of each part: order and lowering of the lists, the simulation, the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise

from disagmoe_compile.models.catalogue import find_model
from disagmoe_compile.planner.hardware import find_cluster
from disagmoe_compile.planner.step_costs import Dedup, model_costs
from disagmoe_compile.simulator.af_model import AFChoice, AFModel
from disagmoe_compile.simulator.bound import lower_bound
from disagmoe_compile.simulator.timeline import simulate_program

BAR_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline-groups", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--n-microbatches", type=int, default=64)
    arguments = parser.parse_args()
    cluster = find_cluster("H800-SXM5", 16)
    costs = model_costs(find_model("Qwen3-235B-A22B"), seq_length=8192)
    out = sys.stdout.write
    out(
        f"{costs.n_boundaries} layers, {arguments.n_microbatches} micro-batches, {cluster.gpus} GPUs; CPU seconds\n"
    )
    out(
        f"{'groups':>7}{'order':>9}{'actions':>9}{'lists':>8}{'simulate':>10}{'bound':>7}{'simulated step / bound':>24}\n"
    )
    for p in arguments.pipeline_groups:
        size = cluster.gpus // p // 2
        for order, in_flight in (("rounds", None), ("in_order", None), ("list", 4 * p), ("list", 8 * p)):
            choice = AFChoice(
                p, size, size, 1, arguments.n_microbatches, Dedup.NODE, in_flight=in_flight, order=order
            )
            times = [time.process_time()]
            program = AFModel(costs, cluster, choice).program()
            times.append(time.process_time())
            timeline = simulate_program(program)
            times.append(time.process_time())
            bound = lower_bound(program)
            times.append(time.process_time())
            lists, simulating, bounding = (b - a for a, b in pairwise(times))
            actions = sum(map(len, program.schedule.actions.values()))
            ratio = float(timeline.makespan) / float(bound.seconds)
            verdict = "" if simulating < BAR_S else "  over the bar"
            name = order if in_flight is None else f"{order} {in_flight}"
            out(
                f"{p:>7}{name:>9}{actions:>9}{lists:>8.2f}{simulating:>10.2f}{bounding:>7.2f}{ratio:>24.3f}{verdict}\n"
            )


if __name__ == "__main__":
    main()
