"""Regions in which every expert has a buffer of slots that somebody filled: GShard's one-hot dispatch, padded scatter,
expert choice.

    slots = einsum("tec,td->ecd", dispatch, tokens)   or   zeros(E, C, D)[ids, position] = rows   or   tokens[top_C(scores.T)]
    out   = bmm(act(bmm(slots, w1) + b1), w2) + b2                                          (or einsum, or matmul)

How slots were filled and what becomes of their rows afterwards is not looked at: both stay in the attention stage. A
slot is a pair with a token of its own, so the region is exact whatever the masks are: slots that hold several tokens,
or none, or are dropped by the combine.

Not every batched product with a stacked parameter is a mixture of experts (attention has projections a head): the
slots must be filled by a discrete choice (top-k, argmax, sort) among as many as there are experts.

Legend: T tokens, E experts, C slots an expert, D hidden size, H expert hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import storage_roots, written
from disagmoe_compile.passes.metadata import (
    argument,
    emit_for,
    is_call,
    is_tensor,
    rank_of,
    shape,
    target_name,
    value,
)
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch, Region, only_one
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes, Axis
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.parameters import is_parameter, is_stacked
from disagmoe_compile.passes.styles.products import Product, Term, read_product
from disagmoe_compile.passes.styles.rowwise import POINTWISE
from disagmoe_compile.passes.styles.slot_pieces import ExpertsLeaf, read_slot_pieces

_EXPERT = "expert"
_CHOOSES = ("topk", "argmax", "argsort", "sort", "one_hot", "multinomial")
_FILLS = (
    "index_put", "scatter", "scatter_add", "index_add", "index_copy", "masked_scatter", "gather", "index_select",
)  # fmt: skip
_KEEPS_ROWS = (
    "view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "getitem", "type_as", "pad",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """`rows` [*lead, D] are multiplied with one matrix an expert; `axes` names the leading dimensions."""

    rows: fx.Node
    axes: Axes
    sizes: dict[str, Dim]

    @property
    def num_experts(self) -> int:
        return int(self.sizes[_EXPERT])  # type: ignore[arg-type]


def read_layout(node: fx.Node) -> Layout | None:
    """The layout of slots where `node` multiplies each expert's slots with its own matrix, or joins what each expert made of its
    own slots. Else None."""
    pieces = read_slot_pieces(node)
    if pieces is not None:
        return _named(pieces.rows, len(shape(node)) - 1, pieces.dim)
    product = _first_product(node)
    if product is None or len(product.terms) != 2:
        return None
    weights = [term for term in product.terms if is_stacked(term.node)]
    if len(weights) != 1 or len(weights[0].letters) != 3 or not isinstance(shape(weights[0].node)[0], int):
        return None
    (rows,) = [term for term in product.terms if term is not weights[0]]
    expert, *matrix = weights[0].letters
    if expert not in rows.letters or expert not in product.letters or len(rows.letters) < 3:
        return None
    lead = [letter for letter in rows.letters if letter not in matrix]
    if rows.letters[: len(lead)] != tuple(lead) or product.letters[: len(lead)] != tuple(lead):
        return None
    return _named(rows.node, len(lead), lead.index(expert))


def _named(rows: fx.Node, n_lead: int, expert_at: int) -> Layout:
    """The layout of `rows` with the experts at `expert_at`; a dimension of size one before them (of groups) is no slot."""
    slot_names = iter(["slot", *(f"slot{i}" for i in range(1, n_lead))])
    axes: list[Axis] = []
    for dim, size in enumerate(shape(rows)[:n_lead]):
        is_one = dim < expert_at and size == 1
        axes.append(ONE if is_one else (_EXPERT,) if dim == expert_at else (next(slot_names),))
    sizes = {axis[0]: size for axis, size in zip(axes, shape(rows)) if axis != ONE}
    return Layout(rows, tuple(axes), sizes)


def _first_product(node: fx.Node) -> Product | None:
    if is_call(node, "baddbmm"):
        _, left, right = node.args[:3]
        letters = (0, "row", "in"), (0, "in", "column")
        return Product((Term(left, letters[0]), Term(right, letters[1])), (0, "row", "column"))  # type: ignore[arg-type]
    return read_product(node)


class SlotMatch:
    """The region that begins at `first`: no region of its own unless a choice, `chosen_by`, fills the slots."""

    def __init__(
        self, graph: fx.Graph, first: fx.Node, layout: Layout, depths: Mapping[fx.Node, Depth]
    ) -> None:
        self.graph, self.first, self.layout = graph, first, layout
        self.inside = self._inside()
        self.exit = next(
            node
            for node in reversed(graph.nodes)
            if node in self.inside
            and (any(map(is_stacked, node.all_input_nodes)) or read_slot_pieces(node) is not None)
        )
        self.function = PairFunction(graph, self._leaf, layout.sizes)
        self.of_experts = ExpertsLeaf(self.function)
        self.slots: fx.Node | None = None
        self.weights: fx.Node | None = None
        self.baked_size: fx.Node | None = (
            None  # a `one_hot` of a symbolic size: tracing gives its result a number
        )
        self.chosen_by = self._chosen_by(depths) or self._chosen_by({})

    def region(self) -> Region:
        if self.baked_size is not None:
            raise NoMatch(
                self.baked_size,
                "its size is recorded as the first batch's: how many slots there are is not known",
            )
        result = self.function.convert(self.exit, (*self.layout.axes, ROW))
        if self.slots is None or not result.per_pair:
            raise NoMatch(self.exit, "no slots enter the experts")
        return Region(
            style="slots",
            tokens=self.slots,
            token_ids=None,
            expert_ids=expert_of_slots(self.graph, self.exit, self.slots, self.layout),
            weights=self.weights,
            params=tuple(self.function.params),
            function=self.function.finish(result),
            exit=self.exit,
            num_experts=self.layout.num_experts,
            top_k=1,
            chosen_by=self.chosen_by,
        )

    def _inside(self) -> set[fx.Node]:
        """Everything over slots that is computed from the first product."""
        n_lead = len(self.layout.axes)
        lead = shape(self.layout.rows)[:n_lead]
        # A second projection of the same rows (gate and up) begins the region too.
        siblings = [
            user
            for user in self.layout.rows.users
            if (read_layout(user) or self.layout).rows is self.layout.rows
        ]
        pending = [self.first, *(user for user in siblings if read_layout(user) is not None)]
        inside = set(pending)
        while pending:
            for user in pending.pop().users:
                is_over_slots = (
                    is_tensor(user) and (rank_of(user) or 0) >= n_lead and shape(user)[:n_lead] == lead
                )
                is_parts = is_call(user, "chunk", "split")
                if (is_over_slots or is_parts) and user not in inside:
                    inside.add(user)
                    pending.append(user)
        return inside

    def _leaf(self, node: fx.Node, axes: Axes) -> Converted | None:
        entered = self.of_experts(node, axes)
        if entered is not None:
            return entered
        lead = self.layout.axes
        if node in self.inside or axes[: len(lead)] != lead:
            return None
        if axes[len(lead) :] == (ROW,):
            self.slots = only_one("slots", self.slots, node)
            return self.function.rows
        if axes[len(lead) :] in ((), (ONE,)):
            self.weights = only_one("weights", self.weights, node)
            return self.function.weight(axes)
        return None

    # -- who fills the slots

    def _chosen_by(self, depths: Mapping[fx.Node, Depth]) -> tuple[fx.Node, ...]:
        """The discrete choices among as many as there are experts that fill the slots, not those of experts before."""
        if origin(self.graph, self.layout.rows) is not Origin.FILLED:
            return ()
        storage_of = {node: storage for storage in _writes(self.graph).values() for node in storage}
        pending, seen = [self.layout.rows], set()
        found: dict[fx.Node, None] = {}
        while pending:
            node = pending.pop()
            if node in seen or _is_learned(node) or _combines(node, depths):
                continue
            seen.add(node)
            if is_call(node, "one_hot") and isinstance(argument(node, 1, "num_classes"), fx.Node):
                self.baked_size = node
            if is_call(node, *_CHOOSES) or is_maximum_with_position(node):
                chosen_from = node.args[0]
                sizes = (*shape(chosen_from), *shape(node)) if is_tensor(node) else shape(chosen_from)  # type: ignore[arg-type]
                if self.layout.num_experts in sizes:
                    found[node] = None
                if not is_call(node, "one_hot"):
                    continue
            pending += node.all_input_nodes
            pending += storage_of.get(node, [])
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Depth:
    """`products`: how many products with experts' matrices a value comes after; `is_chosen`: it depends on a discrete choice."""

    products: int
    is_chosen: bool


def depths_of(graph: fx.Graph) -> dict[fx.Node, Depth]:
    found: dict[fx.Node, Depth] = {}
    for node in graph.nodes:
        inputs = [found[source] for source in node.all_input_nodes]
        products = max((one.products for one in inputs), default=0) + (read_layout(node) is not None)
        chooses = is_call(node, *_CHOOSES) or is_maximum_with_position(node)
        found[node] = Depth(products, chooses or any(one.is_chosen for one in inputs))
        target = written(node)
        if target is not None:
            found[target] = found[node]
    return found


def _combines(node: fx.Node, depths: Mapping[fx.Node, Depth]) -> bool:
    """Whether rows that experts returned meet the choice that filled the experts: what is before belongs to them."""
    inputs = [depths[source] for source in node.all_input_nodes if source in depths]
    deepest = max((one.products for one in inputs), default=0)
    return any(one.is_chosen and one.products < deepest for one in inputs)


def is_maximum_with_position(node: fx.Node) -> bool:
    """`max(dim)`, which returns where the largest value is beside it."""
    return is_call(node, "max") and not is_tensor(node)


def _is_learned(node: fx.Node) -> bool:
    """Whether `node` computes with parameters: what is before it is another matter."""
    return any(is_parameter(source) for source in node.all_input_nodes)


class Origin(StrEnum):
    """Where rows [..., D] that experts multiply come from."""

    FILLED = "filled"  # put in their places by number: by a mask product, by indices, by writing to a buffer
    EXPERTS = "experts"  # another product with the experts' matrices
    TOKENS = "tokens"  # tokens as they stand, maybe repeated and scaled


def origin(graph: fx.Graph, rows: fx.Node) -> Origin:
    return _origin(rows, {node for storage in _writes(graph).values() for node in storage})


def _origin(rows: fx.Node, written_to: Collection[fx.Node]) -> Origin:
    pending, seen = [rows], set()
    while pending:
        node = pending.pop()
        if node in seen or not is_tensor(node):
            continue
        seen.add(node)
        product = read_product(node)
        if any((rank_of(source) or 0) >= 3 and is_stacked(source) for source in node.all_input_nodes):
            if product is not None and _sums_experts(product):
                continue
            return Origin.EXPERTS
        if _is_learned(node):
            continue
        if node in written_to or is_call(node, *_FILLS) or _picks_by_number(node):
            return Origin.FILLED
        if product is not None and product.summed:
            if any(_origin(term.node, written_to) is Origin.EXPERTS for term in product.terms):
                continue  # what the experts of an earlier region return for each token
            return Origin.FILLED
        if is_call(node, *_KEEPS_ROWS) or target_name(node) in POINTWISE:
            width = shape(rows)[-1]
            pending += [n for n in node.all_input_nodes if rank_of(n) and shape(n)[-1] == width]
    return Origin.TOKENS


def _sums_experts(product: Product) -> bool:
    """Whether it multiplies with the experts' matrices and sums over them: what an earlier region returns for each token."""
    return any(
        is_stacked(term.node) and len(term.letters) >= 3 and term.letters[0] not in product.letters
        for term in product.terms
    )


def _picks_by_number(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return any(is_tensor(part) for part in parts)


def _writes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """root of each storage that is written in place -> its nodes, writers included."""
    roots = storage_roots(graph)
    targets = {roots[target] for node in graph.nodes if (target := written(node)) is not None}
    storages: dict[fx.Node, list[fx.Node]] = {root: [] for root in targets}
    for node, root in roots.items():
        if root in storages:
            storages[root].append(node)
    return storages


def expert_of_slots(graph: fx.Graph, before: fx.Node, slots: fx.Node, layout: Layout) -> fx.Node:
    """[*lead] the expert of every slot, added to the graph."""
    rank = len(layout.axes)
    position = layout.axes.index((_EXPERT,))
    with graph.inserting_before(before):
        sizes = [
            size if isinstance(size, int) else emit_for(graph, slots, "size", (slots, dim))
            for dim, size in enumerate(shape(slots)[:rank])
        ]
        device = {"device": value(slots).device}
        experts = emit_for(graph, slots, torch.arange, (layout.num_experts,), device)
        shaped = [layout.num_experts if dim == position else 1 for dim in range(rank)]
        column = emit_for(graph, slots, "reshape", (experts, *shaped))
        return emit_for(graph, slots, "expand", (column, *sizes))
