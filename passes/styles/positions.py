"""What is certain about masks and slot numbers of a router with a capacity, from how they are computed.

    mask      = one_hot(ids, E)                               pairs in any order, flattened or not
    position  = ((mask.cumsum(pairs) - 1) * mask).sum(E)      how many pairs of the same expert come before this one
    kept      = position < capacity
    slot      = position, position.clamp(max=c), position * kept
    combine   = einsum("tk,tke,tkc->tec", weights * kept, mask, one_hot(slot, C))

Pairs of one expert have distinct positions only if the cumulative sum runs over *all* pairs, so that is checked: over the
tokens alone, the first and the second choice of two tokens may share a slot. Values are read from results to operands with the
axes they must have (see `axes.py`).

Legend: T tokens, k experts a token, E experts, C slots an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from disagmoe_compile.passes.metadata import argument, expression, is_call, is_tensor, shape, value
from disagmoe_compile.passes.program import Dim
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.axes import ONE, Axes, Axis, broadcast
from disagmoe_compile.passes.styles.moves import moved
from disagmoe_compile.passes.styles.products import read_product
from disagmoe_compile.passes.styles.signs import is_not_negative

TOKEN, CHOICE, EXPERT, SLOT = "token", "choice", "expert", "slot"
_NOTHING = "it is not certain which pair is in which slot"


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot number: the pair's position wherever that is below `exact_below` (None: everywhere), else `otherwise`."""

    exact_below: Dim | None
    otherwise: Dim | None


@dataclass(frozen=True, slots=True)
class Kept:
    """`node` is `position < limit`, a value for every pair."""

    node: fx.Node
    axes: Axes
    limit: Dim


@dataclass(frozen=True, slots=True)
class Factors:
    """A product of known parts: is this the pair's expert, is this its slot, is it kept, and weights of pairs.

    `changed_by`: a `detach`, or a conversion that loses digits, of the product with its weights.
    """

    has_expert: bool = False
    slot: Slot | None = None
    kept: Kept | None = None
    weights: tuple[tuple[fx.Node, Axes], ...] = ()
    changed_by: fx.Node | None = None

    def times(self, node: fx.Node, other: Factors) -> Factors:
        if self.slot and other.slot and self.slot != other.slot:
            raise NoMatch(node, "it multiplies masks of different slots")
        if self.kept and other.kept and not same(self.kept.limit, other.kept.limit):
            raise NoMatch(node, "it multiplies masks of different capacities")
        return Factors(
            self.has_expert or other.has_expert,
            self.slot or other.slot,
            self.kept or other.kept,
            (*self.weights, *other.weights),
            self.changed_by or other.changed_by,
        )


def same(left: Dim, right: Dim) -> bool:
    return difference(left, right) == 0


def difference(left: Dim, right: Dim) -> object:
    """left - right, a number where that is certain."""
    return sympy.expand(sympy.sympify(left) - sympy.sympify(right))


def certainly_at_least(left: Dim, right: Dim) -> bool:
    found = sympy.sympify(difference(left, right))
    return bool(found.is_number and found >= 0)


@dataclass(frozen=True, slots=True)
class Router:
    """Reads values of one router. `is_ids(node, axes)`: whether a value is the ids of the pairs laid out along `axes`."""

    is_ids: Callable[[fx.Node, Axes], bool]
    sizes: Mapping[str, Dim]
    written: Mapping[fx.Node, fx.Node]  # see `writers`

    @property
    def pair_names(self) -> frozenset[str]:
        return frozenset({TOKEN, CHOICE} & set(self.sizes))

    def _moved(self, node: fx.Node, axes: Axes) -> tuple[fx.Node, Axes] | None:
        if node in self.written:
            raise NoMatch(self.written[node], "it writes in place to what says which pair is in which slot")
        return moved(node, axes, self.sizes)

    def factors(self, node: fx.Node, axes: Axes) -> Factors:
        """Raises NoMatch where `node` is no product of known parts."""
        if _names(axes) <= self.pair_names and value(node).is_floating_point():
            try:
                found = self._factors(node, axes)
            except NoMatch:
                found = Factors(weights=((node, axes),))
            if found.changed_by is not None:  # of a kept pair the value itself is its weight
                return replace(found, weights=((node, axes),), changed_by=None)
            return found
        return self._factors(node, axes)

    def _factors(self, node: fx.Node, axes: Axes) -> Factors:
        source = self._moved(node, axes)
        if source is not None:
            found = self.factors(*source)
            if value(node).dtype == torch.bool:
                return replace(found, weights=(), changed_by=None)
            if found.weights and not _keeps_weights(node, found):
                return replace(found, changed_by=node)
            return found
        if is_call(node, "one_hot"):
            return self._one_hot(node, axes)
        if is_call(node, "lt", "le", "gt", "ge"):
            return self._comparison(node, axes)
        if is_call(node, "bool") or (is_call(node, "ne") and node.args[1] == 0):
            return replace(self.factors(node.args[0], axes), weights=(), changed_by=None)  # type: ignore[arg-type]
        if is_call(node, "mul", "logical_and", "and_"):
            operands = []
            for operand in node.args[:2]:
                if not isinstance(operand, fx.Node) or not is_tensor(operand):
                    raise NoMatch(node, _NOTHING)
                operands.append((operand, broadcast(node, axes, shape(node), shape(operand))))
            return self._product(node, operands)
        if is_call(node, "sum") and CHOICE not in _names(axes):
            dim = argument(node, 1, "dim")
            if isinstance(dim, int) and not argument(node, 2, "keepdim", False):
                dim %= len(axes) + 1
                if CHOICE not in self.sizes:
                    if shape(node.args[0])[dim] != 1:  # type: ignore[arg-type]
                        raise NoMatch(node, _NOTHING)
                    return self.factors(node.args[0], (*axes[:dim], ONE, *axes[dim:]))  # type: ignore[arg-type]
                return self._summed(node, self.factors(node.args[0], (*axes[:dim], (CHOICE,), *axes[dim:])))  # type: ignore[arg-type]
        product = read_product(node)
        if product is not None and len(product.summed) <= 1:
            axis_of: dict[object, Axis] = dict(zip(product.letters, axes, strict=True))
            is_one = CHOICE not in self.sizes and all(product.size_of(x) == 1 for x in product.summed)
            axis_of |= dict.fromkeys(product.summed, ONE if is_one else (CHOICE,))
            if product.summed and not is_one and (CHOICE not in self.sizes or CHOICE in _names(axes)):
                raise NoMatch(node, _NOTHING)
            terms = [(term.node, tuple(axis_of[x] for x in term.letters)) for term in product.terms]
            result = self._product(node, terms)
            return self._summed(node, result) if product.summed else result
        raise NoMatch(node, _NOTHING)

    def _product(self, node: fx.Node, operands: Sequence[tuple[fx.Node, Axes]]) -> Factors:
        found = [self.factors(*operand) for operand in operands]
        has_sum = CHOICE in self.sizes and any(CHOICE not in _names(axes) for _, axes in operands)
        if has_sum and not all(one.has_expert for one in found):
            raise NoMatch(node, "it multiplies one choice of a token with another")
        result = Factors()
        for one in found:
            result = result.times(node, one)
        return result

    @staticmethod
    def _summed(node: fx.Node, found: Factors) -> Factors:
        """Of a token's choices only one has a given expert, so that their sum keeps them apart."""
        if not found.has_expert:
            raise NoMatch(node, "it sums the choices of a token without telling their experts apart")
        return found

    def _one_hot(self, node: fx.Node, axes: Axes) -> Factors:
        numbers: fx.Node = node.args[0]  # type: ignore[assignment]
        if axes[-1] == (EXPERT,) and self.is_ids(numbers, axes[:-1]):
            return Factors(has_expert=True)
        if axes[-1] == (SLOT,):
            return Factors(slot=self.slot(numbers, axes[:-1]))
        raise NoMatch(node, _NOTHING)

    def _comparison(self, node: fx.Node, axes: Axes) -> Factors:
        number, limit = node.args[:2]
        if is_call(node, "gt") and limit == 0:
            found = self.factors(number, axes)  # type: ignore[arg-type]
            for weight, _ in found.weights:
                if not is_not_negative(weight):
                    raise NoMatch(weight, "weights may be negative, and are compared with zero")
            return replace(found, weights=(), changed_by=None)
        if is_call(node, "gt", "ge") or not isinstance(number, fx.Node):
            raise NoMatch(node, _NOTHING)
        if self.position(number, axes) != 0:
            raise NoMatch(number, "it does not count the pairs before this one")
        size = _size(limit)
        return Factors(kept=Kept(node, axes, size if is_call(node, "lt") else size + 1))

    def slot(self, node: fx.Node, axes: Axes) -> Slot:
        source = self._moved(node, axes)
        if source is not None:
            return self.slot(*source)
        if is_call(node, "clamp", "clip", "clamp_max", "minimum"):
            last = argument(node, 1, "max") if is_call(node, "clamp_max") else argument(node, 2, "max")
            if is_call(node, "minimum") or argument(node, 1, "min") not in (None, 0, last) or last is None:
                raise NoMatch(node, _NOTHING)
            self._require_position(node.args[0], axes)  # type: ignore[arg-type]
            return Slot(_size(last) + 1, _size(last))
        if is_call(node, "where"):
            condition, chosen, other = node.args
            kept = self.factors(condition, axes).kept  # type: ignore[arg-type]
            self._require_position(chosen, axes)  # type: ignore[arg-type]
            if kept is None or isinstance(other, float):
                raise NoMatch(node, _NOTHING)
            return Slot(kept.limit, _size(other))
        if is_call(node, "mul"):
            for number, mask in (node.args[:2], node.args[1::-1]):
                try:
                    kept = self.factors(mask, axes).kept  # type: ignore[arg-type]
                    self._require_position(number, axes)  # type: ignore[arg-type]
                except NoMatch:
                    continue
                if kept is not None:
                    return Slot(kept.limit, 0)
        self._require_position(node, axes)
        return Slot(None, None)

    def _require_position(self, node: fx.Node, axes: Axes) -> None:
        if self.position(node, axes) != 0:
            raise NoMatch(node, "it does not count the pairs before this one")

    def position(self, node: fx.Node, axes: Axes) -> int:
        """n where `node` is n plus the number of pairs of the same expert before this one. Raises NoMatch."""
        source = self._moved(node, axes)
        if source is not None:
            return self.position(*source)
        if is_call(node, "sub", "add") and isinstance(node.args[1], int):
            step = node.args[1] if is_call(node, "add") else -node.args[1]
            return self.position(node.args[0], axes) + step  # type: ignore[arg-type]
        if is_call(node, "sum"):
            dims, rank = argument(node, 1, "dim"), len(axes) + 1
            listed = dims if isinstance(dims, tuple | list) else (dims,)
            product = node.args[0]
            if len(listed) == 1 and isinstance(listed[0], int) and is_call(product, "mul"):
                at = listed[0] % rank
                own = (*axes[:at], (EXPERT,), *axes[at:])
                for counts, mask in (product.args[:2], product.args[1::-1]):  # type: ignore[union-attr]
                    if is_tensor(mask) and self._is_mask(mask, own):  # type: ignore[arg-type]
                        return self._counts(counts, own)  # type: ignore[arg-type]
        picks = (
            is_call(node, "gather") and axes[-1] == ONE and argument(node, 1, "dim") in (-1, len(axes) - 1)
        )
        if picks and self.is_ids(argument(node, 2, "index"), axes):
            return self._counts(node.args[0], (*axes[:-1], (EXPERT,)))  # type: ignore[arg-type]
        raise NoMatch(node, "it is not certain that pairs of one expert have distinct positions")

    def _counts(self, node: fx.Node, axes: Axes) -> int:
        """n where `node` [pairs, E], at the pair's own expert, is n plus the number of earlier pairs of that expert."""
        source = self._moved(node, axes)
        if source is not None:
            return self._counts(*source)
        if is_call(node, "sub", "add"):
            step = 1 if is_call(node, "add") else -1
            other = node.args[1]
            if isinstance(other, int):
                return self._counts(node.args[0], axes) + step * other  # type: ignore[arg-type]
            if is_tensor(other) and self._is_mask(other, axes):  # type: ignore[arg-type]
                return self._counts(node.args[0], axes) + step  # type: ignore[arg-type]
        if is_call(node, "mul"):  # the own expert's column alone
            for counts, mask in (node.args[:2], node.args[1::-1]):
                if is_tensor(mask) and self._is_mask(mask, axes):  # type: ignore[arg-type]
                    return self._counts(counts, axes)  # type: ignore[arg-type]
        if is_call(node, "cumsum") and value(node).dtype not in (torch.float16, torch.bfloat16):
            along = axes[argument(node, 1, "dim")]
            if not isinstance(along, tuple) or set(along) != self.pair_names:
                raise NoMatch(node, "it counts along some of the pairs only, so two pairs may share a slot")
            if self._is_mask(node.args[0], axes):  # type: ignore[arg-type]
                return 1
        raise NoMatch(node, "it is not certain that pairs of one expert have distinct positions")

    def _is_mask(self, node: fx.Node, axes: Axes) -> bool:
        try:
            return self._factors(node, axes) == Factors(has_expert=True)
        except NoMatch:
            return False


def _keeps_weights(node: fx.Node, found: Factors) -> bool:
    """Whether what `node` makes of a product with weights, in the end converted to its own type, is that product."""
    source, result = value(node.args[0]), value(node)  # type: ignore[arg-type]
    if is_call(node, "detach") or not (result.is_floating_point() and source.is_floating_point()):
        return False
    widens = torch.finfo(result.dtype).bits > torch.finfo(source.dtype).bits
    return not widens or all(
        torch.finfo(value(weight).dtype).bits <= torch.finfo(source.dtype).bits for weight, _ in found.weights
    )


def _names(axes: Axes) -> set[str]:
    return {name for axis in axes if isinstance(axis, tuple) for name in axis}


def _size(number: object) -> Dim:
    """A number or a computed size, as an expression."""
    if isinstance(number, fx.Node):
        return expression(value(number))
    assert isinstance(number, int)
    return number
