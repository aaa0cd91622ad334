"""Regions that run every expert on every token and rely on routing weights of zero (Llama 4).

    scores_TE = f(full(c).scatter(1, ids, values))            f(c) = 0: all but the top-k are zero by structure
    rows      = tokens.repeat(E, 1) * scores.T.reshape(-1, 1)
    exit      = bmm(act(bmm(rows.view(E, T, D), W1)), W2).sum(0)

Sparse only if both hold: the zeros come from the scatter of a top-k, not from numbers that happen to be small;
and a weight of zero gives a row of zeros, whatever the token and the parameters (so no biases).

Legend: T tokens, k experts a token, D hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from disagmoe_compile.passes.metadata import argument, is_call, rank_of, shape, source_of, value
from disagmoe_compile.passes.program import InputKind
from disagmoe_compile.passes.regions import Found, NoMatch, Region
from disagmoe_compile.passes.styles.rowwise import RowFunction

_RESHAPES = ("view", "reshape", "contiguous")
_POINTWISE_SCORES = ("float", "to", "sigmoid", "relu", "exp", "softmax", "type", "bfloat16", "half")


@dataclass(frozen=True, slots=True)
class MaskedDense:
    name: str = "masked_dense"

    def find(self, graph: fx.Graph) -> Found:
        regions, stopped = [], []
        for node in graph.nodes:
            if (
                is_call(node, "sum")
                and argument(node, 1, "dim") in (0, (0,), [0])
                and _through(node.args[0], "bmm")
            ):
                try:
                    regions.append(_Match(node).region())
                except NoMatch as reason:
                    stopped.append(reason)
        return Found(tuple(regions), tuple(stopped))


class _Match:
    def __init__(self, exit_node: fx.Node) -> None:
        self.exit = exit_node
        self.function = RowFunction(self._leaf)
        self.tokens: fx.Node | None = None
        self.scores: fx.Node | None = None
        self.num_experts: int | None = None

    def region(self) -> Region:
        if argument(self.exit, 2, "keepdim", False) or rank_of(self.exit.args[0]) != 3:  # type: ignore[arg-type]
            raise NoMatch(self.exit, "it does not sum [experts, tokens, hidden] over experts")
        result = self.function.convert(self.exit.args[0])  # type: ignore[arg-type]
        if self.tokens is None or self.scores is None or self.num_experts is None:
            raise NoMatch(self.exit, "no routing scores enter the experts")
        ids = routed_ids(self.scores)
        function = self.function.finish(result)
        self._check_zero(function)
        top_k = shape(ids)[1]
        if not isinstance(top_k, int):
            raise NoMatch(ids, "the number of experts a token is not fixed")
        return Region(
            style="masked_dense",
            tokens=self.tokens,
            token_ids=None,
            expert_ids=ids,
            weights=self.scores,
            params=tuple(self.function.params),
            function=function,
            exit=self.exit,
            num_experts=self.num_experts,
            top_k=top_k,
            weights_by_expert=True,
        )

    def _leaf(self, node: fx.Node) -> fx.Node | None:
        if is_call(node, *_RESHAPES) and rank_of(node.args[0]) in (2, 3) and not self._is_column(node):  # type: ignore[arg-type]
            return self._reshaped(node)
        if is_call(node, "bmm"):
            rows, weight = node.args
            return self.function.call(
                "call_function", torch.matmul, (self.function.convert(rows), self._param(weight))
            )  # type: ignore[arg-type]
        if is_call(node, "repeat") and node.args[2:] == (1,) and isinstance(node.args[1], int):
            self._set("num_experts", node.args[1], node)
            self._set("tokens", node.args[0], node)
            return self.function.rows
        if self._is_column(node):
            transposed = node.args[0]
            self._set("scores", transposed.args[0], node)  # type: ignore[union-attr]
            return self.function.call("call_method", "unsqueeze", (self.function.weight, -1))
        return None

    def _set(self, name: str, found: Any, node: fx.Node) -> None:
        if getattr(self, name) not in (None, found):
            raise NoMatch(node, f"a second kind of {name} enters the experts")
        setattr(self, name, found)

    def _reshaped(self, node: fx.Node) -> fx.Node:
        """Between [E, T, D] and [E * T, D] a row stays a row; anything else does not."""
        source = node.args[0]
        if shape(node)[-1] != shape(source)[-1]:  # type: ignore[arg-type]
            raise NoMatch(node, "it splits or merges rows")
        if rank_of(node) == 3 and not isinstance(shape(node)[0], int):
            raise NoMatch(node, "its first dimension is not the experts")
        return self.function.convert(source)  # type: ignore[arg-type]

    def _is_column(self, node: fx.Node) -> bool:
        """`scores.transpose(0, 1).reshape(-1, 1)`: one score a row, experts first."""
        if not is_call(node, *_RESHAPES) or shape(node)[-1] != 1:
            return False
        transposed = node.args[0]
        return (is_call(transposed, "transpose") and set(transposed.args[1:]) <= {0, 1, -1, -2}) or is_call(
            transposed, "t"
        )  # type: ignore[union-attr]

    def _param(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        if source is not None and source.kind is InputKind.PARAMETER:
            self._set("num_experts", shape(node)[0], node)
            return self.function.parameter(node)
        if is_call(node, "transpose") and all(isinstance(d, int) and d % 3 in (1, 2) for d in node.args[1:]):
            return self.function.call("call_method", "transpose", (self._param(node.args[0]), -2, -1))  # type: ignore[arg-type]
        raise NoMatch(node, "the weights are not a parameter stacked over experts")

    def _check_zero(self, function: fx.GraphModule) -> None:
        """A weight of zero must give a row of zeros. Random parameters would show any bias."""
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.randn([int(size) for size in value(p).shape[1:]], generator=generator).to(value(p).dtype)
            for p in self.function.params
        ]
        rows = torch.randn(3, int(value(self.tokens).shape[-1]), generator=generator).to(
            value(self.tokens).dtype
        )  # type: ignore[arg-type]
        result = function(rows, torch.zeros(3, dtype=value(self.scores).dtype), *params)  # type: ignore[arg-type]
        if result.count_nonzero():
            raise NoMatch(self.exit, "experts return more than zero for tokens that were not routed to them")


def routed_ids(scores: fx.Node) -> fx.Node:
    """The top-k ids [T, k] outside of which scores [T, E] are zero by structure. Raises NoMatch."""
    chain: list[fx.Node] = []
    node = scores
    while is_call(node, *_POINTWISE_SCORES):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if not is_call(node, "scatter") or argument(node, 1, "dim") not in (1, -1):
        raise NoMatch(node, "the scores are not scattered from a top-k")
    background = _constant(node.args[0])  # type: ignore[arg-type]
    # One routed column and one that is not, through the same operations.
    sample = torch.tensor([[0.5, background]])
    for step in reversed(chain):
        name = step.target if isinstance(step.target, str) else step.target.__name__  # type: ignore[union-attr]
        if name == "softmax":
            sample = sample.softmax(-1)
        elif name in ("sigmoid", "relu", "exp"):
            sample = getattr(sample, name)()
    if sample[0, 1] != 0:
        raise NoMatch(scores, "scores outside the top-k are not exactly zero")
    ids = argument(node, 2, "index")
    if rank_of(ids) != 2:
        raise NoMatch(node, "the ids are not [tokens, top_k]")
    return ids


def _constant(node: fx.Node) -> float:
    if is_call(node, "zeros_like", "zeros", "new_zeros"):
        return 0.0
    if is_call(node, "full_like", "full", "new_full"):
        fill = argument(
            node, 1 if is_call(node, "full_like") else 2, "fill_value", argument(node, 1, "fill_value")
        )
        if isinstance(fill, int | float):
            return float(fill)
    raise NoMatch(node, "scores are not scattered into a constant")


def _through(node: object, name: str) -> bool:
    """Whether a call of `name` is behind `node`, through reshapes."""
    while isinstance(node, fx.Node) and is_call(node, *_RESHAPES):
        node = node.args[0]
    return is_call(node, name)
