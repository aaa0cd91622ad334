"""How the experts of an unrolled loop meet: the chain of additions from the first expert to the last.

    y = zeros + a_0;  y = y + a_1;  ...          y = y.index_add(0, tok_e, a_e)          y[tok_e] += a_e
    sum(a_e for e ...)                           stack([a_0, a_1, ...]).sum(0)          y[tok_e] = a_e

What tells experts apart (ids compared with numbers, columns of scores) is followed forward; the first value that all of
them reach is the sum, and the chain is walked back from there. What the sum starts from is handed on as its base.

Legend: e an expert, a_e what it adds, tok_e its tokens.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, is_gather, is_tensor, rank_of, shape, value
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.loop_parameters import parameter_behind
from disagmoe_compile.passes.styles.loop_routing import column, compared, first_part, zero_outside
from disagmoe_compile.passes.styles.zeros import is_zero


def starts_of_experts(graph: fx.Graph) -> list[dict[int, list[fx.Node]]]:
    """For every value that tells experts apart: expert -> the nodes where its routing begins."""
    found: dict[tuple[str, fx.Node], dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        for kind, (source, expert) in (
            ("ids", compared(node, "eq")),
            ("ids", compared(node, "ne")),
            ("column", column(node)),
            ("column", column(node, keeps_dim=True)),
            ("row", first_part(node)),
        ):
            if source is not None and _tells_experts_apart(kind, source):
                found[kind, source][expert].append(node)
    return [starts for starts in found.values() if len(starts) > 1]


def _tells_experts_apart(kind: str, source: fx.Node) -> bool:
    """Comparisons with numbers always; columns of scores that are zero by structure; parts of a turned one-hot."""
    if kind == "ids":
        return True
    if kind == "row":
        return is_call(source, "permute", "transpose", "t") and is_call(source.args[0], "one_hot")
    rank = rank_of(source) or 0
    if rank not in (2, 3) or not is_tensor(source):
        return False
    try:
        zero_outside(source)
    except NoMatch:
        return is_call(source, "one_hot")
    return True


def with_parameters(graph: fx.Graph, starts: Mapping[int, list[fx.Node]]) -> dict[int, list[fx.Node]]:
    """Those experts that compute with parameters: a number may also stand for no expert, or for the token itself."""
    bits = {node: 1 << i for i, nodes in enumerate(starts.values()) for node in nodes}
    reached: dict[fx.Node, int] = {}
    learned, computing = set(), 0
    for node in graph.nodes:
        sources = node.all_input_nodes
        reached[node] = bits.get(node, 0)
        for source in sources:
            reached[node] |= reached[source]
        if parameter_behind(node) is not None or (sources and all(source in learned for source in sources)):
            learned.add(node)
        elif _is_single(reached[node]) and any(source in learned for source in sources):
            computing |= reached[node]
    return {expert: nodes for i, (expert, nodes) in enumerate(starts.items()) if computing >> i & 1}


@dataclass(frozen=True, slots=True)
class Link:
    """What one expert adds: `rows`, to the rows `index` (None: to all, in place). `replaces`: it overwrites them instead."""

    rows: fx.Node
    index: fx.Node | None
    node: fx.Node
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    exit: fx.Node
    links: tuple[Link, ...]
    base: fx.Node | None


def chain_of(graph: fx.Graph, starts: Mapping[int, Sequence[fx.Node]], order: Mapping[fx.Node, int]) -> Chain:
    """The additions through which all experts meet, first expert first. Raises NoMatch."""
    bits = {node: 1 << i for i, nodes in enumerate(starts.values()) for node in nodes}
    everyone = (1 << len(starts)) - 1
    reached: dict[fx.Node, int] = {}
    first = min(bits, key=order.__getitem__)
    for node in list(graph.nodes)[order[first] :]:
        reached[node] = bits.get(node, 0)
        for source in node.all_input_nodes:
            reached[node] |= reached.get(source, 0)
        if reached[node] == everyone and is_tensor(node) and not _takes_rows_of_the_sum(node, reached):
            return _walk(node, reached)
    raise NoMatch(first, "the experts that it tells apart never meet in one sum")


def _takes_rows_of_the_sum(node: fx.Node, reached: Mapping[fx.Node, int]) -> bool:
    """`y[tok]`, or `y[tok] + rows`, on the way to `y[tok] += rows`."""
    if is_call(node, "add"):
        return any(is_gather(side) and not _is_single(reached.get(side, 0)) for side in node.args[:2])  # type: ignore[arg-type]
    return is_gather(node) and not _is_single(reached.get(node.args[0], 0))  # type: ignore[arg-type]


def _walk(exit_node: fx.Node, reached: Mapping[fx.Node, int]) -> Chain:
    if is_call(exit_node, "stack"):
        return _stacked(exit_node, reached)
    links: list[Link] = []
    node = exit_node
    while not _is_single(reached.get(node, 0)):
        node = _same_type(node, exit_node)
        before, link = _addition(node, reached)
        links.append(link)
        node = before
    node = _same_type(node, exit_node)
    found = _first_addition(node, links, reached)
    if found is None:
        links.append(Link(node, None, node))
        base = None
    else:
        base, link = found
        links.append(link)
    return Chain(exit_node, tuple(reversed(links)), base)


def _stacked(stack: fx.Node, reached: Mapping[fx.Node, int]) -> Chain:
    """`stack([addend_0, ...], d).sum(d)`."""
    addends, dim = stack.args[0], argument(stack, 1, "dim", 0)
    total = next(iter(stack.users), stack)
    if not is_call(total, "sum") or len(stack.users) != 1 or argument(total, 2, "keepdim", False):
        raise NoMatch(total, "the experts' rows are stacked, and not plainly summed")
    summed = argument(total, 1, "dim")
    listed = summed if isinstance(summed, tuple | list) else (summed,)
    rank = rank_of(stack) or 0
    if len(listed) != 1 or not isinstance(listed[0], int) or listed[0] % rank != dim % rank:
        raise NoMatch(total, "it does not sum over the experts")
    for addend in addends:  # type: ignore[union-attr]
        if not _is_single(reached.get(addend, 0)):  # type: ignore[arg-type]
            raise NoMatch(stack, "one of the stacked values is not of one expert")
    return Chain(total, tuple(Link(addend, None, stack) for addend in addends), None)  # type: ignore[union-attr, arg-type]


def _addition(node: fx.Node, reached: Mapping[fx.Node, int]) -> tuple[fx.Node, Link]:
    """(the sum before, what one expert adds to it)."""
    added = _rows_added(node)
    if added is not None:
        before, link = added
    elif is_call(node, "add") and _is_plain_sum(node):
        left, right = node.args[:2]
        before, rows = (right, left) if _is_single(reached.get(left, 0)) else (left, right)  # type: ignore[arg-type]
        if _is_single(reached.get(before, 0)):  # the first two, in the order they are written
            before, rows = left, right
        link = Link(rows, None, node)  # type: ignore[arg-type]
    else:
        raise NoMatch(node, "it is not a plain sum of the experts")
    expert, others = reached.get(link.rows, 0), reached.get(before, 0)  # type: ignore[arg-type]
    if not _is_single(expert):
        raise NoMatch(
            node,
            "what it adds is not of one expert" if expert else "it adds something else between the experts",
        )
    if expert & others:
        raise NoMatch(node, "it adds an expert a second time")
    return before, link  # type: ignore[return-value]


def _first_addition(
    node: fx.Node, links: Sequence[Link], reached: Mapping[fx.Node, int]
) -> tuple[fx.Node | None, Link] | None:
    """(what the sum starts from, what the first expert adds), or None where the sum starts with the expert itself."""
    added = _rows_added(node)
    if added is None:
        if not is_call(node, "add") or not _is_plain_sum(node, allow_number=True):
            return None
        sides = [side for side in node.args[:2] if isinstance(side, fx.Node) and reached.get(side, 0)]
        if len(sides) != 1:
            return None
        rows = sides[0]
        start = next(side for side in node.args[:2] if side is not rows)
        is_alike = any(link.rows.target == node.target for link in links)
        if is_alike and not is_zero(start):
            return None  # the addition is a part of every expert
        added = start, Link(rows, None, node)
    start, link = added
    if not reached.get(link.rows, 0) or (isinstance(start, fx.Node) and reached.get(start, 0)):
        raise NoMatch(node, "it does not add one expert to what comes before")
    if is_zero(start):
        return None, link
    assert isinstance(start, fx.Node), "numbers other than zero are no plain sum"
    if shape(start) != shape(node) or value(start).dtype != value(node).dtype:
        raise NoMatch(node, "the experts are added to a value of another shape or type")
    return start, link


def _rows_added(node: fx.Node) -> tuple[fx.Node, Link] | None:
    """`before.index_add(0, tok, rows)`, `scatter_add`, `index_put(accumulate=True)`, `before[tok] += rows` or `= rows`."""
    if is_call(node, "index_add", "scatter_add"):
        index, rows = argument(node, 2, "index"), argument(node, 3, "source", argument(node, 3, "src"))
        if argument(node, 1, "dim") not in (0, -(rank_of(node) or 0)) or argument(node, 4, "alpha", 1) != 1:
            raise NoMatch(node, "it does not add rows to rows")
        if is_call(node, "scatter_add"):
            index = _behind_expansion(index, node)
        return node.args[0], Link(rows, index, node)  # type: ignore[return-value]
    if is_call(node, "index_put"):
        before, indices, rows = node.args[:3]
        if not isinstance(indices, tuple | list) or len(indices) != 1 or not is_tensor(indices[0]):
            raise NoMatch(node, "it does not add rows to rows")
        if argument(node, 3, "accumulate", False):
            return before, Link(rows, indices[0], node)  # type: ignore[return-value, arg-type]
        if is_call(rows, "add") and _is_plain_sum(rows):  # type: ignore[arg-type]
            for taken, added in (rows.args[:2], rows.args[1::-1]):  # type: ignore[union-attr]
                if is_call(taken, "getitem") and taken.args == (before, indices[0]):  # type: ignore[union-attr]
                    return before, Link(added, indices[0], node)  # type: ignore[return-value, arg-type]
        return before, Link(rows, indices[0], node, replaces=True)  # type: ignore[return-value, arg-type]
    return None


def _behind_expansion(index: fx.Node, node: fx.Node) -> fx.Node:
    """The vector behind `tok[:, None].expand_as(rows)`."""
    while rank_of(index) != 1:
        is_column = index.target is operator.getitem and is_tensor(index.args[0])
        if not is_column and not is_call(index, "expand", "expand_as", "view", "reshape", "unsqueeze"):
            raise NoMatch(node, "its index is not one token a row")
        if (rank_of(index.args[0]) or 0) > (rank_of(index) or 0):  # type: ignore[arg-type]
            raise NoMatch(node, "its index is not one token a row")
        index = index.args[0]  # type: ignore[assignment]
    return index


def _is_plain_sum(node: fx.Node, *, allow_number: bool = False) -> bool:
    """Of two tensors of the result's shape (or of one and a zero)."""
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("out") is not None:
        return False
    for side in node.args:
        if isinstance(side, int | float):
            if not allow_number or side != 0:
                return False
        elif not is_tensor(side) or shape(side) != shape(node):  # type: ignore[arg-type]
            return False
    return True


def _same_type(node: fx.Node, exit_node: fx.Node) -> fx.Node:
    """Through the casts that an in-place sum leaves, to the type of the sum."""
    while is_call(node, "to") and is_tensor(node) and value(node).dtype == value(exit_node).dtype:
        if not is_tensor(node.args[0]) or not _adds(node.args[0]):  # type: ignore[arg-type]
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _adds(node: fx.Node) -> bool:
    return is_call(node, "add", "index_add", "scatter_add", "index_put")


def _is_single(bits: int) -> bool:
    return bits != 0 and bits & (bits - 1) == 0


def adds_pairs(link: Link) -> bool:
    """Whether tokens that come twice are added twice."""
    return link.index is not None and not (
        is_call(link.node, "index_put") and not argument(link.node, 3, "accumulate", False)
    )
