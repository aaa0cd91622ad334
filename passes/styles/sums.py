"""How a region ends: one axis of pairs is summed away, in any of the ways people write a weighted sum.

`rows.sum(1)`, `rows.mean(1)`, `einsum("tkd,tk->td", rows, weights)`, `bmm(weights.unsqueeze(1), rows).squeeze(1)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_tensor, rank_of, shape
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.axes import ROW, Axis, reshaped
from disagmoe_compile.passes.styles.pair_function import Converted, PairFunction
from disagmoe_compile.passes.styles.products import Letter, Product, Term, read_product


@dataclass(frozen=True, slots=True)
class PairSum:
    """`node` is `product` summed over the letter `pairs`, which has `size`; divided by that where it is a mean.

    `computed` is where the product stands: `node`, or what `node` reshapes by a dimension of size one.
    """

    node: fx.Node
    computed: fx.Node
    product: Product
    pairs: Letter
    size: Dim
    is_mean: bool = False

    def convert(self, function: PairFunction, token_axes: tuple[Axis, ...], pair_axis: Axis) -> Converted:
        """The summed value, pair by pair, where the sum has the axes `(*token_axes, ROW)`. Raises NoMatch."""
        axes = (*token_axes, ROW)
        if self.computed is not self.node:
            axes = reshaped(self.node, axes, shape(self.node), shape(self.computed), function.sizes)
        if len(axes) != len(self.product.letters):
            raise NoMatch(self.node, "it sums to something else than rows of tokens")
        axis_of: dict[Letter, Axis] = dict(zip(self.product.letters, axes, strict=True))
        every = replace(self.product, letters=(*self.product.letters, self.pairs))
        result = function.product(self.computed, every, axis_of | {self.pairs: pair_axis})
        if self.is_mean:
            divided = function.call("call_method", "div", (result.node, self.size))
            return Converted(divided, result.per_pair)
        return result


def pair_sums(node: fx.Node) -> Iterator[PairSum]:
    """Every reading of `node` as a sum over one dimension."""
    if is_call(node, "sum", "mean") and is_tensor(node.args[0]):
        yield from _reduction(node)
        return
    computed = node
    if is_call(node, "squeeze", "view", "reshape", "flatten", "getitem") and is_tensor(node.args[0]):
        computed = node.args[0]  # type: ignore[assignment]
        if (rank_of(computed) or 0) != (rank_of(node) or 0) + 1 or 1 not in shape(computed):
            return
        if is_call(node, "getitem"):
            return
    product = read_product(computed)
    if product is None:
        return
    for letter in product.summed:
        yield PairSum(node, computed, product, letter, product.size_of(letter))


def _reduction(node: fx.Node) -> Iterator[PairSum]:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dims, rank = argument(node, 1, "dim"), rank_of(source) or 0
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    if len(listed) != 1 or not isinstance(listed[0], int) or node.kwargs.get("dtype") is not None:
        return
    if argument(node, 2, "keepdim", False):
        return
    summed = listed[0] % rank
    letters = tuple(range(rank))
    product = Product((Term(source, letters),), tuple(letter for letter in letters if letter != summed))
    yield PairSum(node, node, product, summed, shape(source)[summed], is_call(node, "mean"))
