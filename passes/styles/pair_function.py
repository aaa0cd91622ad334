"""Turns a stretch of graph over pairs, in whatever dimensions its authors laid them out, into a function of one
expert's rows.

    einsum("tkd,tkdh->tkh", rows, w[ids])   or   bmm(rows [E, C, D], w)   ->   matmul(rows [P, D], w [D, H])

A value that differs between pairs has one leading dimension in the function, whatever pair axes it had; a value
that follows from the expert alone (parameters) has none. Legal only if rows do not interact: each rule below says how
an operation treats the axes of its operands (see `axes.py`); what has no rule stops the match and is named.

Legend: P pairs, T tokens, k experts a token, E experts, C slots an expert, D hidden size, H expert hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape, target_name, value
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch, ParamNodes
from disagmoe_compile.passes.styles.axes import ONE, ROW, Axes, broadcast, row_rank
from disagmoe_compile.passes.styles.moves import moved, permutation
from disagmoe_compile.passes.styles.products import Letter, Product, Term, read_product
from disagmoe_compile.passes.styles.rowwise import POINTWISE

# Along dimensions of rows only: name -> (position of the argument `dim`, its default).
_ALONG_ROWS = {
    "softmax": (1, None), "log_softmax": (1, None), "glu": (1, -1), "chunk": (2, 0), "split": (2, 0), "cat": (1, 0),
    "concat": (1, 0), "flip": (1, None), "cumsum": (1, None),
}  # fmt: skip
_REDUCES_ROWS = frozenset({"sum", "mean", "var", "std", "amax", "amin", "prod", "logsumexp"})


@dataclass(frozen=True, slots=True)
class Converted:
    """A value of the function: `node` has a leading dimension of rows if `per_pair`, then the ROW dimensions."""

    node: fx.Node
    per_pair: bool


Leaf = Callable[[fx.Node, Axes], Converted | None]


class PairFunction:
    """Builds `function(rows_PD, weight_P, *params)`.

    `leaf(node, axes)` returns the function's value for what enters the region (rows, weights, parameters), or None
    to go on; it raises NoMatch where the axes are not those of the value. `sizes`: of every pair axis, by name.
    """

    def __init__(self, graph: fx.Graph, leaf: Leaf, sizes: Mapping[str, Dim]) -> None:
        self.graph = fx.Graph()
        self.params: list[ParamNodes] = []
        self.sizes = sizes
        self._leaf = leaf
        self._writers = storages(graph).writers
        self._rows = self.graph.placeholder("rows")
        self._weight = self._last_placeholder = self.graph.placeholder("weight")
        self._placeholders: dict[ParamNodes, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, Axes], Converted] = {}
        self._count = 0

    # -- what enters

    @property
    def rows(self) -> Converted:
        return Converted(self._rows, per_pair=True)

    def weight(self, axes: Axes) -> Converted:
        """The pair's weight, with a size-one dimension for each ROW of `axes`."""
        node = self._weight
        for _ in range(row_rank(axes)):
            node = self.call("call_method", "unsqueeze", (node, -1))
        return Converted(node, per_pair=True)

    def parameter(self, node: ParamNodes) -> Converted:
        """One expert's slice of a parameter stacked over experts, or its own of those that are separate."""
        if node not in self._placeholders:
            with self.graph.inserting_after(self._last_placeholder):
                placeholder = self.graph.placeholder(f"param_{len(self.params)}")
            self._placeholders[node] = self._last_placeholder = placeholder
            self.params.append(node)
        return Converted(self._placeholders[node], per_pair=False)

    def finish(self, result: Converted) -> fx.GraphModule:
        """The function that returns `result`, one of its own values."""
        self.graph.output(result.node)
        return fx.GraphModule({}, self.graph, class_name="ExpertFunction")

    def call(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        self._count += 1
        return self.graph.create_node(op, target, args, dict(kwargs or {}), name=f"v{self._count}")

    # -- from a result to what it is computed from

    def convert(self, node: fx.Node, axes: Axes) -> Converted:
        """The function's value for `node`. Raises NoMatch at the first operation that is not pair by pair."""
        key = node, axes
        if key not in self._converted:
            entered = self._leaf(node, axes)
            if entered is None:
                if node in self._writers:
                    raise NoMatch(self._writers[node], "it writes in place to a value inside the experts")
                entered = self._operation(node, axes)
            self._converted[key] = entered
        return self._converted[key]

    def product(self, node: fx.Node, product: Product, axis_of: Mapping[Letter, Any]) -> Converted:
        """A product whose result has the axes `axis_of` (of every letter that is not summed over inside a row)."""
        values: list[tuple[Converted, list[Letter]]] = []
        for term in product.terms:
            axes = []
            for letter, size in zip(term.letters, shape(term.node), strict=True):
                is_broadcast = size == 1 and product.size_of(letter) != 1
                axes.append(ONE if is_broadcast else axis_of.get(letter, ROW))
            letters = [letter for letter, axis in zip(term.letters, axes) if axis == ROW]
            values.append((self._entering(node, term.node, tuple(axes)), letters))
        values.sort(key=lambda one: not one[0].per_pair)
        result, letters = values.pop(0)
        while values:
            index = next((i for i, (_, other) in enumerate(values) if set(other) & set(letters)), 0)
            result, letters = self._times(node, (result, letters), values.pop(index), product, values)
        if missing := [letter for letter in letters if letter not in product.letters]:
            raise NoMatch(node, f"it sums over `{missing[0]}`, which one operand has alone")
        wanted = [letter for letter in product.letters if axis_of.get(letter, ROW) == ROW]
        return self._arranged(node, result, letters, wanted)

    def _entering(self, node: fx.Node, operand: fx.Node, axes: Axes) -> Converted:
        """An operand of a product, in the type that autocast chose for it: the function runs without autocast."""
        converted = self.convert(operand, axes)
        if value(operand).dtype == value(node).dtype:
            return converted
        return self._like(converted, "call_method", "to", (converted.node, value(node).dtype))

    def _times(
        self,
        node: fx.Node,
        left: tuple[Converted, list[Letter]],
        right: tuple[Converted, list[Letter]],
        product: Product,
        later: Sequence[tuple[Converted, list[Letter]]],
    ) -> tuple[Converted, list[Letter]]:
        """Two factors multiplied, and summed over the letters that nobody needs any more."""
        (a, a_letters), (b, b_letters) = left, right
        needed = {*product.letters, *(letter for _, letters in later for letter in letters)}
        summed = [letter for letter in a_letters if letter in b_letters and letter not in needed]
        if not summed:
            if not set(b_letters) <= set(a_letters):
                (a, a_letters), (b, b_letters) = (b, b_letters), (a, a_letters)
            if not set(b_letters) <= set(a_letters):
                raise NoMatch(node, "it is an outer product of rows")
            factor = self._arranged(node, b, b_letters, a_letters)
            multiplied = self.call("call_function", torch.mul, (a.node, factor.node))
            return Converted(multiplied, a.per_pair or b.per_pair), a_letters
        if b.per_pair:
            raise NoMatch(node, "it multiplies rows with rows and sums")
        kept = [letter for letter in b_letters if letter not in summed]
        if len(summed) != 1 or len(kept) != 1 or kept[0] in a_letters:
            raise NoMatch(node, "it is not a product of rows with one matrix an expert")
        others = [letter for letter in a_letters if letter not in summed]
        if not a.per_pair and len(others) != 1:
            raise NoMatch(node, "it is not a product of rows with one matrix an expert")
        rows = self._arranged(node, a, a_letters, [*others, *summed])
        matrix = self._arranged(node, b, b_letters, [*summed, *kept])
        result = self.call("call_function", torch.matmul, (rows.node, matrix.node))
        return Converted(result, a.per_pair), [*others, *kept]

    def _arranged(
        self, node: fx.Node, converted: Converted, letters: Sequence[Letter], wanted: Sequence[Letter]
    ) -> Converted:
        """Rows permuted to the order `wanted`, with dimensions of size one for letters they do not have."""
        present = [letter for letter in wanted if letter in letters]
        if set(present) != set(letters):
            raise NoMatch(node, "rows are lost on the way to its result")
        order = [letters.index(letter) for letter in present]
        result = self._permuted(converted, order)
        return self._with_ones(result, [letter in letters for letter in wanted])

    def _permuted(self, converted: Converted, order: Sequence[int]) -> Converted:
        lead = int(converted.per_pair)
        if list(order) == sorted(order):
            return converted
        if len(order) == 2:
            swapped = self.call("call_method", "transpose", (converted.node, -2, -1))
        else:
            dims = (*range(lead), *(lead + position for position in order))
            swapped = self.call("call_method", "permute", (converted.node, dims))
        return Converted(swapped, converted.per_pair)

    def _with_ones(self, converted: Converted, present: Sequence[bool]) -> Converted:
        """Dimensions of size one where `present` is false; leading ones are needed behind the pairs only."""
        node = converted.node
        lead = int(converted.per_pair)
        first = 0 if converted.per_pair else next((i for i, has in enumerate(present) if has), len(present))
        for position in range(first, len(present)):
            if not present[position]:
                node = self.call("call_method", "unsqueeze", (node, lead + position - first))
        return Converted(node, converted.per_pair)

    # -- one operation

    def _operation(self, node: fx.Node, axes: Axes) -> Converted:
        if node.op not in ("call_function", "call_method"):
            raise NoMatch(node, "a value from outside enters the experts' rows")
        name = target_name(node)
        if name in ("type_as", "to") and len(node.args) > 1 and is_tensor(node.args[1]):
            source = self.convert(node.args[0], axes)  # type: ignore[arg-type]
            return self._like(source, "call_method", "to", (source.node, value(node).dtype))
        if name in POINTWISE:
            return self._pointwise(node, axes)
        source_and_axes = moved(node, axes, self.sizes)
        if source_and_axes is not None:
            return self._moved(node, axes, *source_and_axes)
        product = read_product(node)
        if product is not None:
            return self.product(node, product, dict(zip(product.letters, axes, strict=True)))
        if name in ("linear", "addmm", "baddbmm"):
            return self._product_and_bias(node, axes)
        for names, rule in (
            (_REDUCES_ROWS, self._reduce), ({"getitem"}, self._getitem), (_ALONG_ROWS, self._along_rows),
            ({"layer_norm", "rms_norm"}, self._norm),
        ):  # fmt: skip
            if name in names:
                return rule(node, axes)
        if name == "dropout":
            if argument(node, 1, "p", 0.5) == 0 or not argument(node, 2, "training", True):
                return self.convert(node.args[0], axes)  # type: ignore[arg-type]
            raise NoMatch(node, "random numbers inside an expert depend on the order of its rows")
        raise NoMatch(node, "no rule shows that it acts on each row alone")

    def _like(self, source: Converted, op: str, target: Any, args: Any, kwargs: Any = None) -> Converted:
        return Converted(self.call(op, target, args, kwargs), source.per_pair)

    def _pointwise(self, node: fx.Node, axes: Axes) -> Converted:
        per_pair = False

        def operand(arg: fx.Node) -> fx.Node:
            nonlocal per_pair
            if not is_tensor(arg):
                raise NoMatch(arg, "a value from outside enters the experts' rows")
            own = broadcast(node, axes, shape(node), shape(arg))
            converted = self.convert(arg, own)
            per_pair = per_pair or converted.per_pair
            offset = len(axes) - len(own)
            rows = [position for position, axis in enumerate(axes) if axis == ROW]
            present = [position >= offset and own[position - offset] == ROW for position in rows]
            return self._with_ones(converted, present).node

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        return Converted(self.call(node.op, node.target, args, kwargs), per_pair)

    def _product_and_bias(self, node: fx.Node, axes: Axes) -> Converted:
        """`addmm(bias, a, b)`, `baddbmm(bias, a, b)`, `linear(a, b, bias)`."""
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            raise NoMatch(node, "it has a factor alpha or beta other than 1")
        if is_call(node, "linear"):
            left, right, bias = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")
        else:
            bias, left, right = node.args[:3]  # type: ignore[assignment]
        terms = _product_before_bias(node, left, right, len(axes))  # type: ignore[arg-type]
        multiplied = self.product(node, terms, dict(zip(terms.letters, axes, strict=True)))
        own = broadcast(node, axes, shape(node), shape(bias))  # type: ignore[arg-type]
        rows = [position for position, axis in enumerate(axes) if axis == ROW]
        offset = len(axes) - len(own)
        present = [position >= offset and own[position - offset] == ROW for position in rows]
        added = self._with_ones(self._entering(node, bias, own), present)  # type: ignore[arg-type]
        total = self.call("call_function", torch.add, (multiplied.node, added.node))
        return Converted(total, multiplied.per_pair or added.per_pair)

    # -- dimensions that move

    def _moved(self, node: fx.Node, axes: Axes, source: fx.Node, own: Axes) -> Converted:
        converted = self.convert(source, own)
        order = permutation(node, len(axes))
        if order is not None:
            rows = [d for d, axis in enumerate(own) if axis == ROW]
            return self._permuted(converted, [rows.index(d) for d in order if d in rows])
        before = [size for size, axis in zip(shape(source), own) if axis == ROW]
        after = [size for size, axis in zip(shape(node), axes) if axis == ROW]
        if before == after:
            return converted
        if is_call(node, "expand", "expand_as", "broadcast_to"):
            raise NoMatch(node, "it repeats features of a row")
        if not all(isinstance(size, int) for size in after):
            raise NoMatch(node, "the size of a row is not fixed")
        lead: tuple[Any, ...] = ()
        if converted.per_pair:
            lead = (self.call("call_method", "size", (converted.node, 0)),)
        return self._like(converted, "call_method", "reshape", (converted.node, (*lead, *after)))

    def _getitem(self, node: fx.Node, axes: Axes) -> Converted:
        source, index = node.args
        if not is_tensor(source):  # a part of a chunk or a split
            if not isinstance(index, int) or not isinstance(source, fx.Node):
                raise NoMatch(node, "no rule shows that it acts on each row alone")
            parts = self.convert(source, axes)
            return self._like(parts, "call_function", operator.getitem, (parts.node, index))
        parts_of_index = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(part, fx.Node | list) for part in parts_of_index):
            raise NoMatch(node, "it picks rows by number")
        rank = rank_of(source) or 0  # type: ignore[arg-type]
        named = sum(part is not None and part is not Ellipsis for part in parts_of_index)
        if Ellipsis not in parts_of_index:
            parts_of_index.append(Ellipsis)
        at = parts_of_index.index(Ellipsis)
        parts_of_index[at : at + 1] = [slice(None)] * (rank - named)
        return self._basic_index(node, axes, parts_of_index)

    def _basic_index(self, node: fx.Node, axes: Axes, parts: Sequence[Any]) -> Converted:
        remaining = iter(axes)
        own: list[Any] = []
        taken: list[Any] = []
        for part in parts:
            if part is None:
                taken += [None] if next(remaining) == ROW else []
            elif isinstance(part, int):
                own.append(ROW)
                taken.append(part)
            else:
                own.append(next(remaining))
                if own[-1] == ROW:
                    taken.append(part)
                elif part != slice(None):
                    raise NoMatch(node, "it picks some of the pairs")
        converted = self.convert(node.args[0], tuple(own))  # type: ignore[arg-type]
        if all(part == slice(None) for part in taken):
            return converted
        lead = (slice(None),) if converted.per_pair else ()
        return self._like(converted, "call_function", operator.getitem, (converted.node, (*lead, *taken)))

    # -- along a row

    def _along_rows(self, node: fx.Node, axes: Axes) -> Converted:
        position, default = _ALONG_ROWS[target_name(node)]
        dim = argument(node, position, "dim", default)
        if not isinstance(dim, int) or axes[dim] != ROW:
            raise NoMatch(node, "it may mix rows")
        along = -row_rank(axes[dim % len(axes) :])
        sources = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
        converted = [self.convert(source, axes) for source in sources]  # type: ignore[arg-type]
        if len({one.per_pair for one in converted}) != 1:
            raise NoMatch(node, "it joins rows and parameters")
        nodes = [one.node for one in converted]
        first = nodes if isinstance(node.args[0], tuple | list) else nodes[0]
        args, kwargs = (first, *node.args[1:]), dict(node.kwargs)
        if len(args) > position:
            args = (*args[:position], along, *args[position + 1 :])
        else:
            kwargs["dim"] = along
        return self._like(converted[0], node.op, node.target, args, kwargs)

    def _reduce(self, node: fx.Node, axes: Axes) -> Converted:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        dims, rank = argument(node, 1, "dim"), rank_of(source) or 0
        positional = list(node.args[2:])
        kept: dict[str, Any] = {}
        if is_call(node, "var", "std") and positional and "correction" not in node.kwargs:
            kept["unbiased"] = positional.pop(0)
        keepdim = node.kwargs.get("keepdim", next(iter(positional), False))
        listed = dims if isinstance(dims, tuple | list) else (dims,)
        if not all(isinstance(d, int) for d in listed) or (keepdim and len(listed) != 1):
            raise NoMatch(node, "it may mix rows")
        gone = {d % rank for d in listed}
        if not all(isinstance(shape(source)[d], int) for d in gone):
            raise NoMatch(node, "it may mix rows")
        remaining = iter(axes)
        own = tuple(
            (next(remaining), ROW)[1] if keepdim and d in gone else ROW if d in gone else next(remaining)
            for d in range(rank)
        )
        converted = self.convert(source, own)
        along = tuple(-row_rank(own[d:]) for d in sorted(gone))
        stays = keepdim and axes[next(iter(gone))] == ROW
        kwargs = kept | {k: v for k, v in node.kwargs.items() if k not in ("dim", "keepdim")}
        kwargs |= {"dim": along if len(along) > 1 else along[0], "keepdim": stays}
        return self._like(converted, node.op, node.target, (converted.node,), kwargs)

    def _norm(self, node: fx.Node, axes: Axes) -> Converted:
        normalised = argument(node, 1, "normalized_shape")
        if axes[-len(normalised) :] != (ROW,) * len(normalised):
            raise NoMatch(node, "it normalises over rows")
        # Scale and shift differ between experts, so they cannot stay inside.
        after: list[tuple[Any, Any]] = [(torch.mul, argument(node, 2, "weight"))]
        kwargs: dict[str, Any] = {"eps": argument(node, 3, "eps")}
        if is_call(node, "layer_norm"):
            after.append((torch.add, argument(node, 3, "bias")))
            kwargs = {"eps": argument(node, 4, "eps", 1e-5)}
        source = self.convert(node.args[0], axes)  # type: ignore[arg-type]
        result = self._like(source, node.op, node.target, (source.node, normalised), kwargs)
        for operation, parameter in after:
            if parameter is not None:
                own = self.convert(parameter, (ROW,) * len(normalised))
                result = self._like(result, "call_function", operation, (result.node, own.node))
        return result


def _product_before_bias(node: fx.Node, left: fx.Node, right: fx.Node, rank: int) -> Product:
    letters = tuple(range(rank - 2))
    if is_call(node, "linear"):
        return Product(
            (Term(left, (*letters, "row", "in")), Term(right, ("column", "in"))), (*letters, "row", "column")
        )
    return Product(
        (Term(left, (*letters, "row", "in")), Term(right, (*letters, "in", "column"))),
        (*letters, "row", "column"),
    )
