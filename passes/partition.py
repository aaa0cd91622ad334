"""Splits the graph at its `experts` calls into one module per stage; the top-level graph only calls them.

    attention_0(inputs, parameters)            -> (tokens, token_P, expert_P, weight_P, carried..., model
    outputs...) experts_0(tokens, token_P, expert_P, weight_P, *params) -> y attention_1(inputs, parameters,
    y, carried...) -> ...          the last attention is the head

Demand-driven, last stage first: what a stage reads from before its own boundary, the stage before must put
out. So a value that skips a stage is handed on by it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aliasing import effect_edges, storage_roots
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.buffer_op import add_to_buffer
from disagmoe_compile.passes.canonicalize_experts import ExpertsInfo
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.extract import Cutter, Extracted
from disagmoe_compile.passes.label_roles import is_random
from disagmoe_compile.passes.metadata import (
    EXPERTS,
    PLACEMENT,
    describe,
    is_tensor,
    layer_of,
    output_node,
    placeholders,
    source_of,
    value,
)
from disagmoe_compile.passes.program import BufferDelta, InputKind

STAGE = "disagmoe_stage"  # node.meta key of a call of a stage's module
SHARED_PARAMETERS = (
    "disagmoe_shared_parameters"  # graph meta key: names of parameters that several attention stages read
)


@dataclass(frozen=True, slots=True)
class AttentionStage:
    """Layout of an attention module's outputs: dispatch four (none in the head), `n_carried`, then model
    outputs by flat index, then one output for each of `buffer_deltas`."""

    boundary: int
    n_dispatch: int
    n_carried: int
    model_outputs: tuple[int, ...]
    buffer_deltas: tuple[BufferDelta, ...]
    layers: tuple[int, ...]
    uses_rng: bool


@dataclass(frozen=True, slots=True)
class ExpertsStage:
    info: ExpertsInfo
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    name: str = "partition"
    requires: frozenset[Capability] = frozenset({Capability.PLACED})
    provides: frozenset[Capability] = frozenset({Capability.PARTITIONED})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        splitter = _Splitter(graph_module)
        splitter.reject_shared_parameters()
        parts = splitter.attention_parts()
        graph = splitter.top_level(parts)
        before = len(graph_module.graph.nodes)
        graph_module.graph = graph
        graph_module.delete_all_unused_submodules()
        graph_module.meta[SHARED_PARAMETERS] = _shared_parameters(graph)
        codes = {part.extracted.module.code for part in parts}
        notes = (f"{len(codes)} distinct attention codes", f"{before} nodes became {len(graph.nodes)}")
        return PassReport(
            matched=len(splitter.experts), inserted=len(parts) + len(splitter.experts), notes=notes
        )


_DeltaKey: TypeAlias = tuple[fx.Node, int]  # an `add_to_buffer` and which of its deltas


@dataclass(frozen=True, slots=True)
class _Part:
    stage: AttentionStage
    extracted: Extracted
    carried: tuple[fx.Node, ...]  # nodes of the source graph that the next part reads
    deltas: tuple[_DeltaKey, ...]
    outputs: tuple[fx.Node, ...]


class _Splitter:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.roots = storage_roots(self.graph)
        self.cutter = Cutter(graph_module, self.roots, effect_edges(self.graph, self.roots))
        self.experts = sorted(
            (node for node in self.graph.nodes if EXPERTS in node.meta),
            key=lambda node: node.meta[EXPERTS].boundary,
        )
        self.results = output_node(self.graph).args[0]
        self.layers = sorted({layer for node in self.graph.nodes if (layer := layer_of(node)) is not None})
        self.updates = [node for node in self.graph.nodes if node.target is add_to_buffer]

    def reject_shared_parameters(self) -> None:
        inside = {*self.experts, *(param for node in self.experts for param in node.args[4:])}
        held = dict.fromkeys(param for node in self.experts for param in _parameters(node))
        for node in held:
            outside = [
                user
                for user in node.users
                if user not in inside or (user in self.experts and node in user.args[:4])
            ]
            source = source_of(node)
            if outside and source is not None:
                raise UnsupportedModelError(
                    f"{source.kind} `{source.name}` is used by experts and, at {describe(outside[0])}, by "
                    "attention; it can live on one side only. Give each side a parameter of its own"
                )

    # -- parts, last first

    def attention_parts(self) -> list[_Part]:
        head = len(self.experts)
        by_level = self._model_outputs()
        deltas = self._buffer_deltas()
        parts: list[_Part] = []
        wanted: tuple[fx.Node, ...] = ()
        for boundary in range(head, -1, -1):
            part = self._part(boundary, wanted, by_level[boundary], deltas[boundary])
            wanted = tuple(node for node in part.extracted.inputs if self._input_class(boundary)(node) == 2)
            _reject_non_tensors(wanted, boundary)
            parts.insert(0, part)
        assert not wanted, "the first attention part reads only inputs and parameters"
        return parts

    def _model_outputs(self) -> dict[int, list[int]]:
        """attention boundary -> flat output indices that it computes."""
        by_level: dict[int, list[int]] = defaultdict(list)
        for index, result in enumerate(self.results):
            if not isinstance(result, fx.Node) or result in self.updates:
                continue
            if not is_tensor(result):
                raise UnsupportedModelError(
                    f"output {index} of the model is a {type(value(result)).__name__} that depends on its "
                    f"inputs ({describe(result)}); "
                    "only tensors, numbers and None can be returned from a split model"
                )
            by_level[self._level(result)].append(index)
        return by_level

    def _level(self, node: fx.Node) -> int:
        """The attention part that puts out `node`."""
        placement = node.meta[PLACEMENT]
        return len(self.experts) if placement.recomputed else placement.boundary + (EXPERTS in node.meta)

    def _buffer_deltas(self) -> dict[int, list[_DeltaKey]]:
        """attention boundary -> what it computes of the updates of buffers."""
        by_level: dict[int, list[_DeltaKey]] = defaultdict(list)
        for update in self.updates:
            for index, delta in enumerate(update.args[1:]):
                by_level[self._level(delta)].append((update, index))
        return by_level

    def _part(
        self,
        boundary: int,
        carried: tuple[fx.Node, ...],
        model_outputs: list[int],
        deltas: list[_DeltaKey],
    ) -> _Part:
        head = len(self.experts)
        dispatch = tuple(self.experts[boundary].args[:4]) if boundary < head else ()
        inputs = placeholders(self.graph)
        added = tuple(update.args[1 + index] for update, index in deltas)
        outputs = (*dispatch, *carried, *(self.results[index] for index in model_outputs), *added)
        extracted = self.cutter.extract(
            outputs, lambda node: self._stops(node, boundary), "AttentionStage", self._input_class(boundary)
        )
        stage = AttentionStage(
            boundary=boundary,
            n_dispatch=len(dispatch),
            n_carried=len(carried),
            model_outputs=tuple(model_outputs),
            buffer_deltas=tuple(
                BufferDelta(inputs.index(update.args[0]), update.kwargs["once"][index])
                for update, index in deltas
            ),
            layers=self._layers(boundary),
            uses_rng=any(is_random(node) for node in extracted.module.graph.nodes),
        )
        return _Part(stage, extracted, carried, tuple(deltas), outputs)

    def _stops(self, node: fx.Node, boundary: int) -> bool:
        if EXPERTS in node.meta:
            return True
        placement = node.meta[PLACEMENT]
        return placement.boundary < boundary and not placement.recomputed

    def _input_class(self, boundary: int) -> Callable[[fx.Node], int]:
        """0: of the model; 1: the experts' output of the boundary before; 2: carried."""

        def classify(node: fx.Node) -> int:
            if node.op == "placeholder":
                return 0
            return 1 if boundary > 0 and node is self.experts[boundary - 1] else 2

        return classify

    def _layers(self, boundary: int) -> tuple[int, ...]:
        """Decoder layers up to this part's experts that no earlier part has (dense layers go with the
        experts they precede)."""
        seen = self.layers
        ends = [node.meta[EXPERTS].layer for node in self.experts]
        low = ends[boundary - 1] if boundary > 0 else -1
        high = ends[boundary] if boundary < len(ends) else max(seen, default=-1)
        if low is None or high is None:
            return ()
        return tuple(layer for layer in seen if low < layer <= high)

    # -- the graph of calls

    def top_level(self, parts: list[_Part]) -> fx.Graph:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in placeholders(self.graph):
            env[node] = graph.node_copy(node, env.__getitem__)
        inputs = dict(env)
        results: dict[int, fx.Node] = {}
        deltas: dict[_DeltaKey, fx.Node] = {}
        for part in parts:
            self._call_attention(graph, env, part, results, deltas)
        for update in self.updates:
            args = (inputs[update.args[0]], *(deltas[update, i] for i in range(len(update.args) - 1)))
            final = graph.call_function(add_to_buffer, args, dict(update.kwargs))
            final.meta = {"example_value": value(update)}
            results.update((index, final) for index, result in enumerate(self.results) if result is update)
        graph.output(tuple(results.get(index, result) for index, result in enumerate(self.results)))
        return graph

    def _call_attention(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, fx.Node],
        part: _Part,
        results: dict[int, fx.Node],
        deltas: dict[_DeltaKey, fx.Node],
    ) -> None:
        stage, boundary = part.stage, part.stage.boundary
        name = f"attention_{boundary}"
        self.graph_module.add_submodule(name, part.extracted.module)
        call = graph.create_node(
            "call_module", name, tuple(env[node] for node in part.extracted.inputs), {}, name=name
        )
        call.meta = {STAGE: stage, "example_value": tuple(value(node) for node in part.outputs)}
        values = []
        for position, node in enumerate(part.outputs):
            item = graph.create_node("call_function", operator.getitem, (call, position), {})
            item.meta = {"example_value": value(node)}
            values.append(item)
        n_kept = stage.n_dispatch + stage.n_carried
        results.update(zip(stage.model_outputs, values[n_kept:]))
        deltas.update(zip(part.deltas, values[n_kept + len(stage.model_outputs) :], strict=True))
        # Only the next part reads the carried values; it hands on what later ones need.
        for node in [node for node in env if node.op != "placeholder"]:
            del env[node]
        env.update(zip(part.carried, values[stage.n_dispatch : n_kept]))
        if stage.n_dispatch:
            env[self.experts[boundary]] = self._call_experts(graph, env, boundary, values[: stage.n_dispatch])

    def _call_experts(
        self, graph: fx.Graph, env: dict[fx.Node, fx.Node], boundary: int, dispatched: list[fx.Node]
    ) -> fx.Node:
        node, name = self.experts[boundary], f"experts_{boundary}"
        self.graph_module.add_submodule(name, _experts_module(self.graph_module, node))
        params = [env[param] for param in _parameters(node)]
        call = graph.create_node("call_module", name, (*dispatched, *params), {}, name=name)
        info: ExpertsInfo = node.meta[EXPERTS]
        layers = () if info.layer is None else (info.layer,)
        call.meta = {STAGE: ExpertsStage(info, layers), "example_value": value(node)}
        return call


def _shared_parameters(graph: fx.Graph) -> frozenset[str]:
    """Names of the parameters that several stages read: a head tied to the embedding, layers with one set of weights."""
    sources = ((source_of(node), node) for node in placeholders(graph))
    return frozenset(
        source.name
        for source, node in sources
        if source is not None and source.kind is InputKind.PARAMETER and len(node.users) > 1
    )


def _reject_non_tensors(nodes: tuple[fx.Node, ...], boundary: int) -> None:
    for node in nodes:
        if not is_tensor(node):
            raise UnsupportedModelError(
                f"attention part {boundary} needs a {type(value(node)).__name__} that an earlier part computes "
                f"({describe(node)}); only tensors can be sent. Take sizes from the model's inputs"
            )


def _parameters(experts: fx.Node) -> list[fx.Node]:
    """Placeholders of the parameters, in the order of the `experts` call."""
    params = experts.args[4:]
    read = (n for param in params for n in ([param] if param.op == "placeholder" else param.all_input_nodes))
    return list(dict.fromkeys(read))


def _experts_module(graph_module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """`experts` alone, with the calls that put separate parameters together, as a module of what is dispatched and parameters."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index, arg in enumerate((*node.args[:4], *_parameters(node))):
        env[arg] = graph.placeholder(f"a{index}")
        env[arg].meta = {"example_value": value(arg)}
    for param in node.args[4:]:
        if param.op != "placeholder":
            env[param] = graph.node_copy(param, env.__getitem__)
    function = graph.get_attr(node.kwargs["function"].target)
    args = tuple(env[arg] for arg in node.args)
    result = graph.call_function(node.target, args, {**node.kwargs, "function": function})
    result.meta = {"example_value": value(node)}
    graph.output(result)
    return fx.GraphModule(graph_module, graph, class_name="ExpertsStage")
