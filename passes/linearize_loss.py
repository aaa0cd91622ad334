"""Takes the loss apart, so that micro-batches can share it out (see `loss_terms.py`).

The head returns numerators in place of the loss; the denominators become a module of the whole batch's
inputs; the top-level graph puts the loss together again, so it still returns what the model returned.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.aliasing import effect_edges, remove_dead, storage_roots
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.extract import Cutter
from disagmoe_compile.passes.loss_terms import LossReader, NotLinear, Term, product_node
from disagmoe_compile.passes.metadata import is_tensor, output_node, placeholders, source_of, value
from disagmoe_compile.passes.partition import STAGE, AttentionStage
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.sizes import NoExpression, SizeBuilder, symbol_sources

LOSS = "disagmoe_loss"  # graph module meta key: LossInfo, or None for a graph without a loss
UNSPLIT_LOSS = "disagmoe_unsplit_loss"  # graph module meta key: the head before this pass, returning the loss
DENOMINATORS = "loss_denominators"
_INPUTS_ALONE = frozenset({InputKind.INPUT, InputKind.BUFFER, InputKind.SYMBOL})


@dataclass(frozen=True, slots=True)
class LossInfo:
    output_index: int
    dtype: torch.dtype
    coefficients: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LinearizeLoss:
    """`reduction`: "auto" reads the graph alone; "mean" or "sum" says how terms that no rule reads add up
    over samples."""

    reduction: str = "auto"
    name: str = "linearize_loss"
    requires: frozenset[Capability] = frozenset({Capability.TRANSFERS})
    provides: frozenset[Capability] = frozenset({Capability.LINEAR_LOSS})

    def __post_init__(self) -> None:
        if self.reduction not in ("auto", "mean", "sum"):
            raise ValueError(f"loss_reduction must be auto, mean or sum, got {self.reduction!r}")

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        index = loss_index(graph_module)
        if index is None:
            graph_module.meta[LOSS] = None
            return PassReport(notes=("no scalar output to differentiate: outputs are gathered",))
        before = len(graph_module.graph.nodes)
        rewriter = _Rewriter(graph_module, index, self.reduction)
        graph_module.meta[UNSPLIT_LOSS] = rewriter.unsplit()
        terms = rewriter.read()
        graph_module.meta[LOSS] = rewriter.rewrite(terms)
        inserted = len(graph_module.graph.nodes) - before
        return PassReport(matched=1, inserted=inserted, notes=(f"{len(terms)} terms",))


def loss_index(graph_module: fx.GraphModule) -> int | None:
    """Flat index of the loss: the 0-d float output of samples that requires grad and that no other such output is made of.

    Without gradients (eval) every computed 0-d float output is a candidate. Raises UnsupportedModelError if
    two remain.
    """
    results = output_node(graph_module.graph).args[0]
    scalars = [
        i
        for i, r in enumerate(results)
        if is_tensor(r) and value(r).dim() == 0 and value(r).is_floating_point()
    ]
    scalars = [
        i
        for i in scalars
        if results[i].op != "placeholder"
        and _head_value(graph_module, results[i]) is not None
        and _is_made_of_samples(graph_module, results[i])
    ]
    with_grad = [i for i in scalars if value(results[i]).requires_grad]
    candidates = with_grad or [i for i in scalars if _is_computed(graph_module, results[i])]
    if len(candidates) > 1:
        made_of = {i: _ancestors(_head_value(graph_module, results[i])) for i in candidates}
        inner = {_head_value(graph_module, results[i]): i for i in candidates}
        candidates = [
            i
            for i in inner.values()
            if not any(_head_value(graph_module, results[i]) in made_of[j] for j in inner.values() if j != i)
        ]
    if len(candidates) > 1:
        raise UnsupportedModelError(
            f"the model returns {len(candidates)} independent scalars (outputs "
            f"{', '.join(map(str, candidates))}) and the pipeline can "
            "share out one loss; add them up inside the model"
        )
    return candidates[0] if candidates else None


def head_call(graph_module: fx.GraphModule) -> fx.Node:
    calls = [node for node in graph_module.graph.nodes if isinstance(node.meta.get(STAGE), AttentionStage)]
    return max(calls, key=lambda node: node.meta[STAGE].boundary)


def _head_value(graph_module: fx.GraphModule, result: fx.Node) -> fx.Node | None:
    """The node inside the head that computes a result, before it was made contiguous; None for other stages'
    results."""
    call = head_call(graph_module)
    if result.target is not operator.getitem or result.args[0] is not call:
        return None
    head = graph_module.get_submodule(str(call.target))
    owned = output_node(head.graph).args[0][result.args[1]]
    return owned.args[0]


def _is_made_of_samples(graph_module: fx.GraphModule, result: fx.Node) -> bool:
    """Whether a result of the head depends on more than parameters and buffers: a norm of weights is no loss of a batch."""
    call = head_call(graph_module)
    head = graph_module.get_submodule(str(call.target))
    made_of = _ancestors(_head_value(graph_module, result))
    state = (InputKind.PARAMETER, InputKind.BUFFER)
    for node, argument in zip(placeholders(head.graph), call.args):
        source = source_of(argument) if isinstance(argument, fx.Node) else None
        if node in made_of and (source is None or source.kind not in state):
            return True
    return False


def _is_computed(graph_module: fx.GraphModule, result: fx.Node) -> bool:
    call = head_call(graph_module)
    head = graph_module.get_submodule(str(call.target))
    return _head_value(graph_module, result) in computed_nodes(head.graph, call)


def computed_nodes(graph: fx.Graph, call: fx.Node) -> set[fx.Node]:
    """Nodes of a stage that depend on more than the model's inputs and buffers."""
    found: set[fx.Node] = set()
    for node, argument in zip(placeholders(graph), call.args):
        source = (
            source_of(argument) if isinstance(argument, fx.Node) and argument.op == "placeholder" else None
        )
        if source is None or source.kind not in _INPUTS_ALONE:
            found.add(node)
    for node in graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


class _Rewriter:
    def __init__(self, graph_module: fx.GraphModule, index: int, reduction: str) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.index = index
        self.reduction = reduction
        self.call = head_call(graph_module)
        self.head: fx.GraphModule = graph_module.get_submodule(str(self.call.target))  # type: ignore[assignment]
        self.result: fx.Node = output_node(self.graph).args[0][index]
        loss = _head_value(graph_module, self.result)
        assert loss is not None, "loss_index returns a result of the head"
        self.loss = loss

    def unsplit(self) -> fx.GraphModule:
        """The head as it is now, with the loss as its only result; same inputs."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.head.graph, copies)
        graph.output(copies[self.loss])
        return fx.GraphModule(self.head, graph, class_name="UnsplitLoss")

    def read(self) -> list[Term]:
        computed = computed_nodes(self.head.graph, self.call)
        opaque = None if self.reduction == "auto" else self.reduction
        batch = self.graph_module.meta.get("disagmoe_batch_symbol")
        try:
            return LossReader(self.head.graph, computed.__contains__, batch, opaque).terms(self.loss)
        except NotLinear as reason:
            raise UnsupportedModelError(
                f"the loss cannot be shared out over micro-batches, because of {reason}. If it is a mean or "
                "a sum over samples, pass "
                'options={"loss_reduction": "mean"} (or "sum")'
            ) from reason

    def rewrite(self, terms: Sequence[Term]) -> LossInfo:
        coefficients, nodes, sizes = [], [], []
        with self.head.graph.inserting_before(output_node(self.head.graph)):
            for term in terms:
                coefficient, factors, size = _sorted_factors(term)
                coefficients.append(coefficient)
                nodes.append(product_node(self.head.graph, factors) if factors else None)
                sizes.append(size)
        denominators, inputs = self._denominators(nodes, sizes)
        numerators = self._rewrite_head([term.numerator for term in terms])
        dtype = value(self.result).dtype
        self._combine(numerators, denominators, inputs, coefficients, dtype)
        return LossInfo(self.index, dtype, tuple(coefficients))

    def _denominators(
        self, nodes: Sequence[fx.Node | None], sizes: Sequence[sympy.Expr]
    ) -> tuple[fx.GraphModule, list[fx.Node]]:
        """(module, its inputs as nodes of the top-level graph); the module returns one value per term."""
        roots = storage_roots(self.head.graph)
        cutter = Cutter(self.head, roots, effect_edges(self.head.graph, roots))
        extracted = cutter.extract(
            [node for node in nodes if node is not None], lambda node: False, "LossDenominators"
        )
        argument_of = dict(zip(placeholders(self.head.graph), self.call.args))
        inputs = [argument_of[node] for node in extracted.inputs]
        graph = extracted.module.graph
        output = output_node(graph)
        counted = iter(output.args[0])
        symbols = _SymbolInputs(graph, self.graph, inputs)
        results = []
        with graph.inserting_before(output):
            for node, size in zip(nodes, sizes):
                factors = [] if node is None else [next(counted)]
                if size != 1:
                    factors.append(symbols.build(size))
                results.append(product_node(graph, factors))
        output.args = (tuple(results),)
        extracted.module.recompile()
        return extracted.module, symbols.inputs

    def _rewrite_head(self, numerators: Sequence[fx.Node]) -> list[fx.Node]:
        """The head returns its other outputs, then the numerators. Returns their nodes in the top-level
        graph."""
        output = output_node(self.head.graph)
        position: int = self.result.args[1]
        kept = [node for p, node in enumerate(output.args[0]) if p != position]
        output.args = ((*kept, *numerators),)
        remove_dead(self.head.graph)
        self.head.graph.lint()
        self.head.recompile()
        stage: AttentionStage = self.call.meta[STAGE]
        others = tuple(index for index in stage.model_outputs if index != self.index)
        self.call.meta[STAGE] = replace(stage, model_outputs=others)
        values = [v for p, v in enumerate(self.call.meta["example_value"]) if p != position]
        self.call.meta["example_value"] = (*values, *(value(node) for node in numerators))
        for user in list(self.call.users):
            if user.args[1] > position:
                user.args = (self.call, user.args[1] - 1)
        items = []
        with self.graph.inserting_before(output_node(self.graph)):
            for offset, node in enumerate(numerators):
                item = self.graph.call_function(operator.getitem, (self.call, len(kept) + offset))
                item.meta = {"example_value": value(node)}
                items.append(item)
        return items

    def _combine(
        self,
        numerators: Sequence[fx.Node],
        denominators: fx.GraphModule,
        inputs: Sequence[fx.Node],
        coefficients: Sequence[float],
        dtype: torch.dtype,
    ) -> None:
        self.graph_module.add_submodule(DENOMINATORS, denominators)
        total: fx.Node | None = None
        with self.graph.inserting_before(output_node(self.graph)):
            call = self.graph.create_node("call_module", DENOMINATORS, tuple(inputs), {}, name=DENOMINATORS)
            for position, (numerator, coefficient) in enumerate(zip(numerators, coefficients)):
                denominator = self.graph.call_function(operator.getitem, (call, position))
                part = self.graph.call_function(operator.truediv, (numerator, denominator))
                if coefficient != 1.0:
                    part = self.graph.call_function(operator.mul, (part, coefficient))
                total = part if total is None else self.graph.call_function(operator.add, (total, part))
            assert total is not None, "a loss has at least one term"
            loss = self.graph.call_method("to", (total, dtype))
        loss.meta = {"example_value": value(self.result)}
        self.result.replace_all_uses_with(loss)
        self.graph.erase_node(self.result)


def _sorted_factors(term: Term) -> tuple[float, list[fx.Node], sympy.Expr]:
    """(coefficient, input-only nodes, size expression) of a term's denominators."""
    coefficient, nodes, size = term.coefficient, [], sympy.Integer(1)
    for factor in term.denominators:
        if isinstance(factor, fx.Node):
            nodes.append(factor)
        elif isinstance(factor, sympy.Expr) and factor.free_symbols:
            size = size * factor
        else:
            coefficient /= float(factor)
    return coefficient, nodes, size


class _SymbolInputs:
    """Sizes inside a module, from the model's inputs; adds inputs to the module as they are needed."""

    def __init__(self, graph: fx.Graph, top_level: fx.Graph, inputs: list[fx.Node]) -> None:
        self.graph = graph
        self.inputs = list(inputs)
        self.sources = symbol_sources(top_level)
        self.builder = SizeBuilder(graph, self._symbol)

    def build(self, expr: sympy.Expr) -> fx.Node | int:
        """Raises UnsupportedModelError for a size that is not an expression of the inputs' sizes."""
        try:
            return self.builder.build(expr)
        except NoExpression:
            raise UnsupportedModelError(
                f"the loss is a mean over {expr} values, which is no expression of the inputs' sizes; "
                'divide by a number that the inputs give, or pass options={"loss_reduction": "mean"}'
            ) from None

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        source, dim = self.sources[symbol]
        existing = placeholders(self.graph)
        if source in self.inputs:
            node = existing[self.inputs.index(source)]
        else:
            before = existing[-1].next if existing else next(iter(self.graph.nodes))
            with self.graph.inserting_before(before):
                node = self.graph.placeholder(f"a{len(self.inputs)}")
            self.inputs.append(source)
        return node if dim is None else self.graph.call_method("size", (node, dim))
