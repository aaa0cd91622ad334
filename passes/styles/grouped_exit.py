"""How sorted rows of a region with grouped products leave the order of the experts, and how those of a token are summed.

    out[inverse(perm)].view(T, k, D).sum(1)      or      zeros(T, D).index_add(0, perm // k, out)

Where rows come in pair by pair, or leave unsummed (experts inside an attention), pairs take the place of tokens:
`zeros(P, D).index_add(0, perm, out)`.

Legend: T tokens, k experts a token, P = T * k pairs, D hidden size.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import sympy
from torch import fx

from disagmoe_compile.passes.aliasing import storages
from disagmoe_compile.passes.metadata import (
    argument,
    is_call,
    is_gather,
    is_tensor,
    rank_of,
    same_value,
    shape,
)
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.grouped_rows import EnteringRows, broadcast_index, divided
from disagmoe_compile.passes.styles.rowwise import check_rowwise
from disagmoe_compile.passes.styles.zeros import is_zero

_ADDS_ROWS = ("index_add", "scatter_add")


@dataclass(frozen=True, slots=True)
class Summed:
    """`exit` [T, D] sums the `top_k` rows of every token, times `weights` [T, k] if they are not in the rows already, and
    adds them to `base` [T, D] if it is not zero (what a shared expert returned)."""

    exit: fx.Node
    top_k: int
    weights: fx.Node | None
    base: fx.Node | None = None


def last_rows(product: fx.Node, entered: EnteringRows) -> tuple[fx.Node, fx.Node]:
    """The last value over sorted rows, and the call through which it leaves the row order."""
    pending, seen, stopped = [product], set(), None
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if is_gather(user) and user.args[0] is node:
                if _is_inverse(user.args[1], entered.perm):
                    return node, user
                stopped = NoMatch(user, "it does not undo the sort by expert")
            elif is_call(user, *_ADDS_ROWS) and argument(user, 3, "source", argument(user, 3, "src")) is node:
                return node, user
            elif is_call(user, "index_put") and user.args[1:] == ((entered.perm,), node):
                if shape(user)[0] not in (shape(entered.expert_ids)[0], shape(node)[0]):
                    raise NoMatch(user, "rows are put among others")
                return node, user
            elif user not in seen:
                seen.add(user)
                try:
                    check_rowwise(user)
                    pending.append(user)
                except NoMatch as reason:
                    stopped = reason
    raise stopped or NoMatch(product, "its result goes nowhere")


def _is_inverse(index: fx.Node, perm: fx.Node) -> bool:
    """Whether `index` is the inverse of the sorting permutation."""
    if is_call(index, "argsort"):
        return index.args[0] is perm
    writers = [user for user in index.users if user.target is operator.setitem and user.args[0] is index]
    return (
        is_call(index, "empty_like", "empty", "new_empty", "zeros_like", "zeros", "new_zeros")
        and len(writers) == 1
        and writers[0].args[1] is perm
        and is_call(writers[0].args[2], "arange")
    )


def summed_rows(leaving: fx.Node, entered: EnteringRows) -> Summed | None:
    """How the rows that leave through `leaving` are summed; None where each pair leaves by itself. Raises NoMatch."""
    if is_call(leaving, *_ADDS_ROWS) and argument(leaving, 2, "index") is not entered.perm:
        summed: Summed | None = _added(leaving, entered)
    else:
        summed = _summed_if_at_all(leaving, entered)
    if summed is not None and entered.gathered_top_k not in (None, summed.top_k):
        raise NoMatch(
            summed.exit, f"it sums {summed.top_k} rows a token, but {entered.gathered_top_k} were gathered"
        )
    return summed


def _summed_if_at_all(leaving: fx.Node, entered: EnteringRows) -> Summed | None:
    """How rows that are back in the order of pairs are summed; None where each leaves by itself."""
    if is_call(leaving, *_ADDS_ROWS):
        _require_zero(leaving)
    try:
        return _unsorted(leaving, entered)
    except NoMatch:
        if entered.gathered_top_k is None and entered.token_ids is None and not entered.by_pair:
            raise
        return None


def _unsorted(gathered: fx.Node, entered: EnteringRows) -> Summed:
    """`rows[inverse].view(T, k, D)`, weighted here or before, summed over k."""
    split = _only_user(gathered)
    if not is_call(split, "view", "reshape", "unflatten") or rank_of(split) != 3:
        raise NoMatch(split, "rows in token order are not split into [tokens, top_k, hidden]")
    top_k = shape(split)[1]
    if not isinstance(top_k, int):
        raise NoMatch(split, "the number of experts a token is not fixed")
    total, found = _only_user(split), None
    if is_call(total, "mul"):
        weights = next((a for a in total.args if a is not split), None)
        if (
            entered.weights is not None
            or weights is None
            or not _adds_last_dimension(weights)
            or shape(weights)[1:] != (top_k, 1)
        ):
            raise NoMatch(total, "it is not a product with the routing weights")
        found = weights.args[0]
        total = _only_user(total)
    dims = argument(total, 1, "dim")
    if (
        not is_call(total, "sum")
        or dims not in (1, (1,), [1], -2)
        or argument(total, 2, "keepdim", False)
        or total.kwargs.get("dtype") is not None
    ):
        raise NoMatch(total, "the pairs of a token are not plainly summed")
    return Summed(total, top_k, found)


def _added(total: fx.Node, entered: EnteringRows) -> Summed:
    """`base.index_add(0, token of row, rows)` or the same with scatter_add."""
    base = _base(total)
    index = argument(total, 2, "index")
    if is_call(total, "scatter_add"):
        index = broadcast_index(index)
    if entered.by_pair:
        top_k = divided(index, entered.perm)
        if top_k is None:
            raise NoMatch(total, "it adds rows to other tokens than those of their pairs")
        return Summed(total, top_k, None, base)
    if not same_value(index, entered.row_index):
        raise NoMatch(total, "it adds rows to other tokens than they came from")
    pairs, tokens = shape(entered.expert_ids)[0], shape(entered.tokens)[0]  # type: ignore[arg-type]
    top_k = entered.gathered_top_k or sympy.sympify(pairs) / sympy.sympify(tokens)
    if not isinstance(top_k, int) and not top_k.is_Integer:
        raise NoMatch(total, "the number of experts a token is not fixed")
    return Summed(total, int(top_k), None, base)


def _require_zero(total: fx.Node) -> None:
    if _base(total) is not None:
        raise NoMatch(total, "it does not sum rows into zeros")


def _base(total: fx.Node) -> fx.Node | None:
    """What rows are added to, or None where it is zero."""
    base = total.args[0]
    if argument(total, 1, "dim") != 0 or argument(total, 4, "alpha", 1) != 1:
        raise NoMatch(total, "it does not add rows to rows")
    if not isinstance(base, fx.Node) or base in storages(total.graph).writers:
        raise NoMatch(total, "what it adds rows to is written in place")
    return None if is_zero(base) else base


def _adds_last_dimension(node: object) -> bool:
    """`w.unsqueeze(-1)`, `w[..., None]`"""
    if not is_tensor(node) or not is_call(node, "unsqueeze", "getitem") or not is_tensor(node.args[0]):  # type: ignore[attr-defined]
        return False
    source, index = node.args[:2]  # type: ignore[attr-defined]
    whole = not isinstance(index, tuple) or all(part in (None, Ellipsis, slice(None)) for part in index)
    return whole and not is_tensor(index) and shape(source) == shape(node)[:-1]  # type: ignore[arg-type]


def _only_user(node: fx.Node) -> fx.Node:
    users = list(node.users)
    if len(users) != 1:
        raise NoMatch(node, f"it is read {len(users)} times, once expected")
    return users[0]
