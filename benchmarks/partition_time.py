"""Is partitioning linear in the depth, and what do the plan's schedules and its validation cost beside it?

    python benchmarks/partition_time.py                          12, 24, 48 and 94 layers of a tiny Qwen3-MoE
    python benchmarks/partition_time.py --layers 12 24 --source style:sorted_grouped_mm
    python benchmarks/partition_time.py --plan-only              94 layers, 64 micro-batches, 8 + 8 groups: no model at all

"ms a node" should stay the same from row to row.
"""

from __future__ import annotations

import argparse
import sys

import torch
from measuring import Clock, build, machine, table, traced

from disagmoe_compile.backend.planning import make_plan
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.config import Options
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.plan.serialize import to_dict
from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.plan.validate import validate
from disagmoe_compile.testing.plans import example_plan

OPTIONS = Options.from_mapping({"attention_group_size": 2, "ffn_group_size": 2, "n_microbatches": 4})


def measure_model(source: str, n_layers: int) -> dict[str, object]:
    clock = Clock()
    graph, arguments = traced(build(source, n_layers), clock)
    n_nodes = len(graph.graph_module.graph.nodes)
    with clock("partition"):
        partition = partition_model(graph)
    sizes = graph.sizes(arguments)
    with clock("plan"):
        topology, _ = choose_sizes(partition.programs, sizes, OPTIONS, world_size=4)
        make_plan(
            partition.programs, graph.parameter_names(), sizes, topology, OPTIONS, partition.fingerprint
        )
    seconds = clock.seconds
    return {
        "layers": n_layers,
        "nodes": n_nodes,
        "stages": len(partition.programs.attention) + len(partition.programs.experts),
        "capture": seconds["capture"],
        "partition": seconds["partition"],
        "ms a node": 1000 * seconds["partition"] / n_nodes,
        "plan, validated": seconds["plan"],
    }


def measure_plan(n_layers: int, n_microbatches: int, groups: int) -> dict[str, object]:
    clock = Clock()
    with clock("make"):
        plan = example_plan(Topology(2, 2, groups, groups, n_layers), n_microbatches)
    with clock("validate"):
        assert not validate(plan)
    with clock("to_dict"):
        to_dict(plan)
    schedules = (plan.training, plan.forward_only)
    n_actions = sum(len(a) for s in schedules if s is not None for a in s.actions.values())
    return {
        "layers": n_layers,
        "micro-batches": n_microbatches,
        "groups": 2 * groups,
        "actions": n_actions,
        **clock.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="hf:qwen3_moe", help="hf:FAMILY or style:NAME (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 94])
    parser.add_argument("--plan-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.plan_only:
        measure_model(arguments.source, 2)  # imports, once
        rows = []
        for n_layers in arguments.layers:
            rows.append(measure_model(arguments.source, n_layers))
        sys.stdout.write(f"{table(rows)}\n\n")
    sys.stdout.write(f"{table([measure_plan(94, n, 8) for n in (16, 32, 64)])}\n\n")
    sys.stdout.write(f"CPU seconds; {arguments.source}; {machine()}\n")


if __name__ == "__main__":
    main()
