"""De-inplace: `x.add_(y)` and `x += y` become values where nobody can tell the difference.

An in-place accumulator leaves no data edge from its writer to its readers, so a split along data edges drops
gradients without a word. Rewriting is legal where no other name of the storage is read afterwards; the rest
(slices written into a fresh buffer, for one) stays and is followed by effect edges (`aliasing.py`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import AUGMENTED, root_of, written
from disagmoe_compile.passes.base import PassReport
from disagmoe_compile.passes.contract import Capability
from disagmoe_compile.passes.metadata import describe, is_call, is_tensor, target_name, value

_RANDOM = frozenset({
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_",
    "cauchy_",
})  # fmt: skip
_FILLS = (
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deinplace:
    name: str = "deinplace"
    requires: frozenset[Capability] = frozenset({Capability.SOURCES, Capability.NO_CHECKPOINTS})
    provides: frozenset[Capability] = frozenset({Capability.DEINPLACED})

    def run(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        order = {node: index for index, node in enumerate(graph.nodes)}
        roots: dict[fx.Node, fx.Node] = {}
        aliases: dict[fx.Node, list[fx.Node]] = {}
        matched, inserted, skipped = 0, 0, []
        for node in list(graph.nodes):
            target = written(node)
            roots[node] = root_of(node, roots)
            if target is not None:
                matched += 1
                reason = _obstacle(node, target, aliases[roots[target]], order)
                if reason is None:
                    inserted += _replace(graph, node, target, order)
                    roots[node] = node
                else:
                    skipped.append(f"{describe(node)}: {reason}")
            aliases.setdefault(roots[node], []).append(node)
        graph_module.meta["disagmoe_deinplaced"] = True
        return PassReport(matched, inserted, tuple(skipped))


def _functional(node: fx.Node) -> tuple[str, object] | None:
    """(op, target) of the call that returns what `node` writes, or None where torch has none."""
    if node.target in AUGMENTED:
        return "call_function", AUGMENTED[node.target]
    if node.target is operator.setitem:
        return ("call_function", torch.index_put) if _sets_rows(node) else None
    name = target_name(node)
    if name in _RANDOM or not name.endswith("_") or "out" in node.kwargs:
        return None
    if node.op == "call_method" and hasattr(torch.Tensor, name[:-1]):
        return "call_method", name[:-1]
    return None


def _sets_rows(node: fx.Node) -> bool:
    """`x[index] = rows`, or `x[index] += rows`, with an index tensor and rows that gradients flow through."""
    target, index, rows = node.args
    if not is_tensor(index) or not is_tensor(rows) or value(rows).dtype != value(target).dtype:  # type: ignore[arg-type]
        return False
    return bool(value(rows).is_floating_point())  # type: ignore[arg-type]


def _obstacle(node: fx.Node, target: fx.Node, names: list[fx.Node], order: dict[fx.Node, int]) -> str | None:
    """Why `node` cannot become a value, or None if it can."""
    if any(name.op == "placeholder" for name in names):
        return "it writes to an input of the model"
    if _functional(node) is None:
        return "there is no call that returns its result"
    position = order[node]
    for name in names:
        if name is not target and any(order[user] > position for user in name.users):
            return f"`{name.name}` is another name of the storage and is read later"
    return None


def _replace(graph: fx.Graph, node: fx.Node, target: fx.Node, order: dict[fx.Node, int]) -> int:
    found = _functional(node)
    assert found is not None, "checked by _obstacle"
    written_value = value(target)
    if is_call(target, *_FILLS) and not target.kwargs.get("requires_grad"):
        # Its fake tensor is the one that was written to, and says that it needs a gradient; before the write it does not.
        target.meta["example_value"] = written_value.detach()
    node.op, node.target = found
    if node.target is torch.index_put:
        node.args = (target, (node.args[1],), node.args[2])
        node.meta["example_value"] = written_value
    later = [user for user in target.users if order.get(user, -1) > order[node]]
    result, inserted = node, 0
    if _promotes(node, target):
        with graph.inserting_after(node):
            result = graph.call_method("to", (node, value(target).dtype))
        result.meta = dict(node.meta)
        order[result] = order[node]
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
        inserted = 1
    for user in later:
        user.replace_input_with(target, result)
    return inserted


def _promotes(node: fx.Node, target: fx.Node) -> bool:
    """Whether the out-of-place result would have another dtype: in place, the result keeps the target's."""
    operands = [value(a) if isinstance(a, fx.Node) else a for a in node.args[:2]]
    numbers = [a for a in operands if isinstance(a, torch.Tensor | int | float)]
    if len(numbers) < 2:
        return False
    is_integer_division = target_name(node) in ("truediv", "div") and not value(target).is_floating_point()
    return is_integer_division or torch.result_type(*numbers) != value(target).dtype
