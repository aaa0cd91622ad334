"""Does compile time grow with depth? Stage compilation of a deep model against that of a shallow one.

    python benchmarks/compile_time.py                                  4 and 48 layers, aot_eager and inductor
    python benchmarks/compile_time.py --layers 4 12 --compilers aot_eager --source style:sorted_grouped_mm

Equal stages are recognised by a structural hash and compiled once (passes/aot/cache.py), so "compile" should cost the same at any
depth; "look up" is the hashing. The last column of a deep row is (compile + look up) over that of the first row. Every stage of
the model is compiled in one process, with an empty disk cache for each row.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace

import torch
from measuring import Clock, build, cpu_seconds, machine, table, traced

from disagmoe_compile.backend.planning import make_plan, microbatch_sizes
from disagmoe_compile.backend.sizing import choose_sizes
from disagmoe_compile.backend.stage_binding import bind_boundaries
from disagmoe_compile.config import Options
from disagmoe_compile.passes.aot import StageCache, compile_attention, compile_experts
from disagmoe_compile.passes.pipeline import partition_model
from disagmoe_compile.passes.program import AttentionProgram, ExpertsProgram, ModelPrograms
from disagmoe_compile.passes.programs import without_outputs
from disagmoe_compile.runtime.stages import CompiledStage

OPTIONS = Options.from_mapping({"attention_group_size": 2, "ffn_group_size": 2, "n_microbatches": 2})


def measure(source: str, n_layers: int, compiler: str) -> dict[str, object]:
    clock = Clock()
    graph, arguments = traced(build(source, n_layers), clock)
    with clock("partition"):
        partition = partition_model(graph)
        programs = partition.programs
        programs = replace(programs, attention=tuple(without_outputs(p) for p in programs.attention))
    sizes = graph.sizes(arguments)
    with clock("plan"):
        topology, _ = choose_sizes(programs, sizes, OPTIONS, world_size=4)
        plan = make_plan(programs, graph.parameter_names(), sizes, topology, OPTIONS, partition.fingerprint)
    micro = microbatch_sizes(programs, sizes, plan.workload.microbatch_size)
    cache = StageCache()
    for program in (*programs.attention, *programs.experts):
        compiled, start = cache.stats.compiled, cpu_seconds()
        _compile(program, micro, compiler, cache)
        name = "compile" if cache.stats.compiled > compiled else "look up"
        clock.seconds[name] = clock.seconds.get(name, 0.0) + cpu_seconds() - start
    with clock("bind"):
        bind_boundaries(programs, plan, micro)
    return {
        "compiler": compiler,
        "layers": n_layers,
        "stages": _n_stages(programs),
        "classes": cache.stats.compiled,
        **{
            name: clock.seconds[name]
            for name in ("capture", "partition", "plan", "compile", "look up", "bind")
        },
    }


def _compile(
    program: AttentionProgram | ExpertsProgram, micro: object, compiler: str, cache: StageCache
) -> CompiledStage:
    if isinstance(program, AttentionProgram):
        return compile_attention(program, micro, compiler=compiler, training=True, cache=cache)  # type: ignore[arg-type]
    n_local = program.num_experts // 2
    return compile_experts(program, n_local, compiler=compiler, training=True, cache=cache)


def _n_stages(programs: ModelPrograms) -> int:
    return len(programs.attention) + len(programs.experts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="hf:qwen3_moe", help="hf:FAMILY or style:NAME (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--compilers", nargs="+", default=["aot_eager", "inductor"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, where its time is counted
        measure(arguments.source, arguments.layers[0], arguments.compilers[0])  # imports, once
        for compiler in arguments.compilers:
            rows = []
            for n_layers in arguments.layers:
                torch.compiler.reset()
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
                row = measure(arguments.source, n_layers, compiler)
                stages = row["compile"] + row["look up"]  # type: ignore[operator]
                rows.append(
                    {
                        **row,
                        "stages' time": stages,
                        "ratio": stages / rows[0]["stages' time"] if rows else 1.0,
                    }
                )
            sys.stdout.write(f"{table(rows)}\n\n")
            sys.stdout.flush()
    sys.stdout.write(f"CPU seconds; {arguments.source}; {machine()}\n")


if __name__ == "__main__":
    main()
