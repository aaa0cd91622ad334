"""Names operations that mix tokens of different samples, so that a micro-batch computes something else than
the whole batch.

Router auxiliary losses (means over all tokens), capacity counts, expert-choice routing and batch
normalisation do; a language model's own layers do not. The sums of the loss, and those that are added to
buffers, are not meant: they are shared out exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import sympy
from torch import fx

from disagmoe_compile.errors import UnsupportedModelError
from disagmoe_compile.passes.metadata import (
    argument,
    describe,
    free_symbols,
    is_call,
    is_tensor,
    shape,
    value,
)
from disagmoe_compile.passes.program import AttentionProgram, Dim, InputKind, ModelPrograms

_REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "max", "min", "amax", "amin", "argmax", "argmin", "prod", "logsumexp",
    "norm", "softmax", "log_softmax", "cumsum", "cumprod", "topk", "sort", "argsort", "any", "all",
    "median", "histc", "bincount",
})  # fmt: skip
_ATTENTION = frozenset({"scaled_dot_product_attention", "softmax"})
_DEFAULT_LAST = frozenset({"topk", "sort", "argsort"})


def batch_coupled(programs: ModelPrograms) -> tuple[str, ...]:
    """One line per operation, without repeats from equal layers.

    Raises UnsupportedModelError where an input that micro-batches share says which tokens belong together (`cu_seqlens` of a
    packed batch): it counts the tokens of the whole batch, so no part of the batch goes with it.
    """
    batch = programs.batch_symbol
    if batch is None:
        return ()
    found: dict[str, None] = {}
    for program in programs.attention:
        for node in _coupling(program, batch):
            shared = _shared_input_of(node, program, batch)
            if shared is not None:
                raise UnsupportedModelError(
                    f"{describe(node)} mixes the tokens of samples as the input `{shared}` says, which describes the whole "
                    "batch and cannot be cut into micro-batches: give each sample its own (a mask of shape [batch, 1, length, "
                    "length]), or put the packed documents into a batch of one sample"
                )
            found.setdefault(describe(node))
    return tuple(found)


def _shared_input_of(node: fx.Node, program: AttentionProgram, batch: sympy.Symbol) -> str | None:
    """The input without samples that decides what attention mixes: behind a mask, not behind the values of tokens."""
    if not is_call(node, *_ATTENTION):
        return None
    placeholders = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    kinds = dict(zip(placeholders, program.inputs, strict=True))
    seen: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        one = pending.pop()
        if one in seen or not is_tensor(one) or _has_a_row_a_token(one, batch):
            continue
        seen.add(one)
        given = kinds.get(one)
        if given is not None and given.kind is InputKind.INPUT and not given.per_sample:
            return given.name
        pending += one.all_input_nodes
    return None


def _has_a_row_a_token(node: fx.Node, batch: sympy.Symbol) -> bool:
    return value(node).is_floating_point() and sum(batch in free_symbols((dim,)) for dim in shape(node)) == 1


def _coupling(program: AttentionProgram, batch: sympy.Symbol) -> list[fx.Node]:
    graph = program.module.graph
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    numerators = {results[position] for position in program.loss_numerators}  # type: ignore[index]
    deltas = [results[position] for position in program.buffer_deltas]  # type: ignore[index]
    others = [result for result in results if result not in deltas]  # type: ignore[union-attr]
    summed = {node for node in _behind(deltas) - _behind(others) if _is_sum(node, batch)}
    computed = _computed_by_model(program)
    return [n for n in graph.nodes if n not in numerators | summed and _mixes(n, batch, computed)]


def _behind(results: Iterable[fx.Node]) -> set[fx.Node]:
    """What the results are made of, and they themselves."""
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _is_sum(node: fx.Node, batch: sympy.Symbol) -> bool:
    """Of what only a buffer's update reads: a sum over samples, which the update of the whole batch adds up."""
    return is_tensor(node) and batch not in free_symbols(shape(node))


def _computed_by_model(program: AttentionProgram) -> set[fx.Node]:
    """What depends on more than the model's inputs: sums of labels and masks are input arithmetic, counts of routed
    tokens are not."""
    nodes = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    of_inputs = (InputKind.INPUT, InputKind.SYMBOL, InputKind.BUFFER)
    found = {node for node, one in zip(nodes, program.inputs, strict=True) if one.kind not in of_inputs}
    for node in program.module.graph.nodes:
        if found & set(node.all_input_nodes):
            found.add(node)
    return found


def _mixes(node: fx.Node, batch: sympy.Symbol, computed: Set[fx.Node]) -> bool:
    if is_call(node, "batch_norm"):
        return bool(argument(node, 5, "training", False))
    if is_call(node, "scaled_dot_product_attention"):
        key = argument(node, 1, "key", None)
        return is_tensor(key) and batch in free_symbols((shape(key)[-2],))
    if is_call(node, *_REDUCTIONS) and node.args and is_tensor(node.args[0]):
        dims = _reduced_dims(node)
        source = shape(node.args[0])  # type: ignore[arg-type]
        return any(batch in free_symbols((source[dim],)) for dim in dims) and (
            node.args[0] in computed or value(node.args[0]).is_floating_point()  # type: ignore[arg-type]
        )
    if is_call(node, "matmul", "mm", "bmm") and all(is_tensor(arg) for arg in node.args[:2]):
        contracted: Dim = shape(node.args[0])[-1]  # type: ignore[arg-type]
        return batch in free_symbols((contracted,))
    return False


def _reduced_dims(node: fx.Node) -> list[int]:
    rank = len(shape(node.args[0]))  # type: ignore[arg-type]
    default = -1 if any(is_call(node, name) for name in _DEFAULT_LAST) else None
    position = 2 if is_call(node, "topk", "norm") else 1
    dims = argument(node, position, "dim", default)
    if not isinstance(dims, int | tuple | list):
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, tuple | list) else (dims,)) if rank]
