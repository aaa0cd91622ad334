"""How a graph of a stage becomes a callable: "inductor", or "aot_eager" (the traced graph as it is).

"eager" has no graph compiler: `compiled.EagerStage` runs the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch.partitioners import default_partition
from torch.fx.experimental import _config as shapes_config

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.aot.joint import graph_outputs

COMPILERS = ("inductor", "aot_eager", "eager")

BoxedGraph = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs as a list, which it may clear to free them early; returns the graph's outputs."""

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class GraphCompiler(Protocol):
    """`decompositions` and `partition` apply while the stage is exported, `compile` to each of its graphs."""

    @property
    def partition(self) -> Partition: ...

    def decompositions(self) -> Mapping[Any, Callable[..., Any]] | None: ...

    def compile(self, graph: fx.GraphModule, *, backward: bool, inference: bool) -> BoxedGraph: ...


class AotEager:
    """Runs the traced operators one by one."""

    partition = staticmethod(default_partition)

    def decompositions(self) -> None:
        return None

    def compile(self, graph: fx.GraphModule, *, backward: bool, inference: bool) -> BoxedGraph:
        run = graph.forward

        def boxed(inputs: list[Any]) -> Sequence[Any]:
            arguments = tuple(inputs)
            inputs.clear()
            return run(*arguments)  # type: ignore[no-any-return]

        return boxed


class Inductor:
    """Inductor's inner compiler on graphs that are already functional, decomposed and partitioned."""

    partition = staticmethod(default_partition)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()

    def compile(self, graph: fx.GraphModule, *, backward: bool, inference: bool) -> BoxedGraph:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        _pin_output_strides(graph)
        sizes = _sizes_as_inputs(graph)
        examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        with config.patch(INDUCTOR_SETTINGS), shapes_config.patch(SHAPE_SETTINGS):
            compiled = compile_fx_inner(graph, examples, is_backward=backward, is_inference=inference)
        if not sizes:
            return compiled  # type: ignore[return-value]

        def boxed(inputs: list[Any]) -> Sequence[Any]:
            arguments = [inputs[position].shape[dim] for position, dim in sizes] + inputs
            inputs.clear()
            return compiled(arguments)  # type: ignore[operator, no-any-return]

        return boxed


# The disk cache is what lets one rank compile for all, so a user's switch must not turn it off. Measured on two cores, nothing
# else pays: C++ time is parsing headers (-O1 saves under 10%), min-cut partitioning makes more kernels to compile, and
# Inductor's own two compile threads need no pool of processes as long as triton is absent.
INDUCTOR_SETTINGS: dict[str, Any] = {"fx_graph_cache": True}

# The number of rows while tracing is an example, not to choose code by: sums over rows that are right for more than 4096 of them
# alone (Inductor's cascades) would be no use to any other call.
SHAPE_SETTINGS: dict[str, Any] = {"backed_size_oblivious": True}


def _sizes_as_inputs(graph: fx.GraphModule) -> list[tuple[int, int]]:
    """Every symbolic size becomes an input, before the others; returns the (position, dim) it is read from.

    Inductor keeps what its code assumes of sizes beside the code in its disk cache, but of sizes that are inputs alone. Of the
    others a process that finds the code there would never hear.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    known = {value.node.expr for value in values if isinstance(value, torch.SymInt)}
    found: list[tuple[int, int]] = []
    for position, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in known:
                known.add(size.node.expr)
                found.append((position, dim))
                with graph.graph.inserting_before(placeholders[0]):
                    graph.graph.placeholder(f"size_{size.node.expr}").meta["val"] = size
    graph.recompile()
    return found


def _pin_output_strides(graph: fx.GraphModule) -> None:
    """Every output keeps its traced stride, saved values too: the backward graph was traced with those."""
    output = graph.graph.output_node()
    values = [node.meta["val"] if isinstance(node, fx.Node) else None for node in graph_outputs(graph.graph)]
    output.meta["user_visible_output_idxs"] = list(range(len(values)))
    output.meta["original_output_strides"] = [
        value.stride() if isinstance(value, torch.Tensor) else None for value in values
    ]


def graph_compiler(name: str) -> GraphCompiler:
    """`InputError` for an unknown name."""
    if name == "inductor":
        return Inductor()
    if name == "aot_eager":
        return AotEager()
    raise InputError(f"stage_compiler={name!r} is unknown; valid are {', '.join(COMPILERS)}")


def fx_graph_cache_hits() -> int:
    """How often Inductor has found a graph in its disk cache, in this process, so far."""
    return int(counters["inductor"]["fxgraph_cache_hit"])
