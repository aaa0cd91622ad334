"""One expert's addend of an unrolled loop as a function of its rows.

    mlp_e(x[tok]) * weights[tok, slot, None]      or      mlp_e(x) * scores[:, e, None]
        ->  function(rows_PD, weight_P, w_e, b_e, ...)

Taking the rows of the expert's tokens does nothing to a row, so both forms give the same function. What follows from
the expert's parameters alone is copied as it stands; rows meet parameters in products and along their last dimension.

Legend: T tokens, P routed pairs, D hidden size, e the expert.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from disagmoe_compile.passes.metadata import (
    argument,
    is_call,
    is_tensor,
    rank_of,
    shape,
    target_name,
    value,
)
from disagmoe_compile.passes.regions import NoMatch
from disagmoe_compile.passes.styles.loop_parameters import (
    CASTS,
    Slot,
    is_view_of_parameter,
    parameter_behind,
    piece,
)
from disagmoe_compile.passes.styles.loop_routing import Index, Routing, first_part
from disagmoe_compile.passes.styles.rowwise import POINTWISE, RowFunction

_VIEWS = ("view", "reshape", "unflatten")
_ALL = slice(None, None, None)


class Addend:
    """Reads what one expert adds. After `read`, its attributes say what the expert is made of.

    `own`: nodes that no other expert computes with. Raises NoMatch where it is not a function of single rows.
    """

    def __init__(self, routing: Routing, own: Set[fx.Node]) -> None:
        self._routing, self._own = routing, own
        self._function = RowFunction(self._leaf)
        self._only_parameters: dict[fx.Node, bool] = {}
        self.expert: int | None = None
        self.tokens: fx.Node | None = None
        self.ids: fx.Node | None = None
        self.weights: fx.Node | None = None
        self.by_expert = False
        self.weights_ids: fx.Node | None = None  # outside of which the weights are zero
        self.index: Index | None = None  # of the rows; None where the expert runs on every token
        self.slots: list[Slot] = []
        self.masks: list[
            fx.Node
        ] = []  # nodes of the function that are true for routed rows and false for others

    def read(self, rows: fx.Node, index: fx.Node | None, dtype: torch.dtype) -> fx.GraphModule:
        """The function. `index`: where the addend's rows are added to; None: to the same rows."""
        result = self._function.convert(rows)
        if (index is None) != (self.index is None):
            raise NoMatch(rows, "rows of some tokens meet rows of all tokens")
        if index is not None:
            self._select(index)
        if self.tokens is None:
            raise NoMatch(rows, "no tokens enter the expert")
        if value(rows).dtype != dtype:
            result = self._function.call("call_method", "to", (result, dtype))
        if not self.slots:
            raise NoMatch(rows, "no parameter enters the expert")
        return self._function.finish(result)

    # -- what enters

    def _leaf(self, node: fx.Node) -> fx.Node | None:
        for rule in (self._weight_of_pairs, self._weight_of_tokens, self._mask, self._selected, self._column):
            entered = rule(node)
            if entered is not None:
                return entered
        if self._is_of_parameters(node):
            return self._parameters(node)
        if node not in self._own:
            return self._token(node)
        return self._product(node) or self._with_parameters(node) or self._unbatched(node)

    def _weight_of_pairs(self, node: fx.Node) -> fx.Node | None:
        """`weights[tok, slot]`, `weights[tok, slot, None]`, `scores[tok, e]`, `weights[tok]`."""
        if node.target is not operator.getitem or not is_tensor(node.args[0]):
            return None
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        keeps = len(index) > 1 and index[-1] is None
        index = index[:-1] if keeps else index
        token = self._routing.index(index[0]) if isinstance(index[0], fx.Node) else None
        if token is None or not token.is_token or len(index) != rank_of(source) or len(index) > 2:
            return None
        if not value(source).is_floating_point():
            return None
        if shape(source)[0] != shape(token.ids)[0]:
            raise NoMatch(node, "rows are selected twice")
        if len(index) == 1:
            self._select(index[0])
            vector = self._function.convert(source)
            return self._function.call("call_method", "unsqueeze", (vector, -1)) if keeps else vector
        if not isinstance(index[1], int | fx.Node):
            return None
        by_expert = isinstance(index[1], int)
        slot = self._routing.index(index[1]) if isinstance(index[1], fx.Node) else None
        if by_expert:
            self._set("expert", index[1], node)
        elif slot is None or slot.is_token or (slot.ids, slot.expert, slot.slots_first) != (
            token.ids, token.expert, token.slots_first,
        ):  # fmt: skip
            raise NoMatch(node, "weights are taken at other slots than the rows' own")
        elif shape(source) != shape(token.ids):
            raise NoMatch(node, "the weights have another shape than the ids")
        self._select(index[0])
        self._set_weights(source, node, by_expert=by_expert)
        return self._weight(is_column=keeps)

    def _weight_of_tokens(self, node: fx.Node) -> fx.Node | None:
        found = self._routing.weight(node)
        if found is None or found.weights in self._own:
            return None
        self._set("expert", found.expert, node)
        if not found.by_expert and found.ids is not None:
            self._set("ids", found.ids, node)
        self._set_weights(found.weights, node, by_expert=found.by_expert)
        self.weights_ids = found.ids
        return self._weight(is_column=found.keeps_dim)

    def _mask(self, node: fx.Node) -> fx.Node | None:
        """`(ids == e).any(-1)`: true for every routed row."""
        mask = self._routing.token_mask(node)
        if mask is None:
            return None
        self._set("expert", mask.expert, node)
        self._set("ids", mask.ids, node)
        if not self.masks:
            true = self._function.call(
                "call_function", torch.ones_like, (self._function.weight,), {"dtype": torch.bool}
            )
            self.masks.append(true)
        dtype = value(node).dtype
        if dtype is torch.bool:
            return self.masks[0]
        return self._function.call("call_method", "to", (self.masks[0], dtype))

    def _selected(self, node: fx.Node) -> fx.Node | None:
        """`x[tok]`: the rows of x themselves."""
        source, index = _rows_taken(node)
        if source is None or index is None or self._routing.index(index) is None:
            return None
        if shape(source)[0] != shape(self._routing.index(index).ids)[0]:  # type: ignore[union-attr]
            raise NoMatch(node, "rows are selected twice")
        self._select(index)
        return self._function.convert(source)

    def _column(self, node: fx.Node) -> fx.Node | None:
        """A vector over tokens or rows as a column: `v[:, None]`, `v.view(-1, 1)`."""
        source = node.args[0] if node.args else None
        if not is_tensor(source) or rank_of(node) != (rank_of(source) or 0) + 1 or shape(node)[-1] != 1:  # type: ignore[arg-type]
            return None
        is_column = is_call(node, *_VIEWS) and rank_of(source) == 1  # type: ignore[arg-type]
        if node.target is operator.getitem and isinstance(node.args[1], tuple):
            *whole, last = node.args[1]
            is_column = last is None and (whole == [Ellipsis] or all(part == _ALL for part in whole))
        if not is_column:
            return None
        return self._function.call("call_method", "unsqueeze", (self._function.convert(source), -1))  # type: ignore[arg-type]

    def _token(self, node: fx.Node) -> fx.Node:
        """A value that all experts read: the tokens, or the weights of tokens with one expert each."""
        if is_tensor(node) and value(node).is_floating_point():
            if rank_of(node) == self._routing.lead + 1 and shape(node)[-1] != 1:
                self._set("tokens", node, node)
                return self._function.rows
            if rank_of(node) == self._routing.lead:
                self._set_weights(node, node, by_expert=False)
                return self._function.weight
            if is_call(node, "unsqueeze", *_VIEWS) and rank_of(node.args[0]) == self._routing.lead:  # type: ignore[arg-type]
                column = self._function.convert(node.args[0])  # type: ignore[arg-type]
                return self._function.call("call_method", "unsqueeze", (column, -1))
        raise NoMatch(node, "a value that is neither tokens nor routing weights enters the experts")

    # -- parameters

    def _is_of_parameters(self, node: fx.Node) -> bool:
        """Whether the expert's own parameters alone decide this value."""
        if node not in self._only_parameters:
            inputs = node.all_input_nodes
            if node in self._own and inputs:
                found = all(self._is_of_parameters(n) for n in inputs)
            else:
                found = parameter_behind(node) is not None
            self._only_parameters[node] = found
        return self._only_parameters[node]

    def _parameters(self, node: fx.Node) -> fx.Node:
        stacked, expert = first_part(node)
        if stacked is None and is_call(node, "squeeze") and node.args[1:] in ((0,), ()):
            stacked, expert = piece(node.args[0])
        if stacked is None:
            stacked, expert = piece(node, "unbind")
        parameter = None if stacked is None else parameter_behind(stacked)
        if stacked is not None and parameter is not None and parameter not in self._own:
            self._set("expert", expert, node)
            return self._slice(stacked)
        if node.op == "placeholder":
            return self._slot(node, None)
        if node not in self._own:
            raise NoMatch(node, "experts share a value computed from parameters")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._function.convert)
        return self._function.call(node.op, node.target, args, kwargs)

    def _slice(self, stacked: fx.Node) -> fx.Node:
        """One expert's slice of `stacked` [E, ...], through casts and a swap of the last two dimensions."""
        if stacked.op == "placeholder":
            return self._slot(stacked, stacked)
        if is_view_of_parameter(stacked):
            return self._slot(stacked.args[0], stacked)  # type: ignore[arg-type]
        if is_call(stacked, *CASTS):
            inner = self._slice(stacked.args[0])  # type: ignore[arg-type]
            return self._function.call(
                stacked.op, stacked.target, (inner, *stacked.args[1:]), dict(stacked.kwargs)
            )
        dims = stacked.args[1:3]
        if is_call(stacked, "transpose") and rank_of(stacked) == 3 and {d % 3 for d in dims} == {1, 2}:  # type: ignore[operator]
            return self._function.call("call_method", "transpose", (self._slice(stacked.args[0]), -2, -1))  # type: ignore[arg-type]
        if is_call(stacked, "getattr") and stacked.args[1] == "mT" and rank_of(stacked) == 3:
            return self._function.call("call_method", "transpose", (self._slice(stacked.args[0]), -2, -1))  # type: ignore[arg-type]
        raise NoMatch(stacked, "the parameter is not simply stacked over experts")

    def _slot(self, parameter: fx.Node, stacked: fx.Node | None) -> fx.Node:
        slot = Slot(parameter, stacked)
        known = next((s for s in self.slots if s.parameter is parameter), None)
        if known is None:
            self.slots.append(slot)
        elif known.shape != slot.shape or (known.stacked is None) != (stacked is None):
            raise NoMatch(parameter, "one expert sees the same parameter in two ways")
        return self._function.parameter(parameter)

    # -- rows and parameters together

    def _product(self, node: fx.Node) -> fx.Node | None:
        """Rows times a matrix of the expert, in the type that autocast chose."""
        if is_call(node, "linear"):
            rows, others = node.args[0], [argument(node, 1, "weight"), argument(node, 2, "bias")]
        elif is_call(node, "matmul", "mm"):
            rows, others = node.args[0], [argument(node, 1, "other", argument(node, 1, "mat2"))]
        elif is_call(node, "addmm") and not node.kwargs and len(node.args) == 3:
            rows, others = node.args[1], [node.args[2], node.args[0]]
        else:
            return None
        if any(not (other is None or self._is_parameter(other)) for other in others):
            raise NoMatch(node, "it multiplies rows by something else than the expert's parameters")
        if self._is_parameter(rows):
            raise NoMatch(
                node, "it multiplies parameters by rows; rows by parameters is the form that is recognised"
            )
        dtype = value(node).dtype

        def entering(operand: fx.Node | None) -> fx.Node | None:
            if operand is None:
                return None
            converted = self._function.convert(operand)
            if value(operand).dtype == dtype:
                return converted
            return self._function.call("call_method", "to", (converted, dtype))

        converted = [entering(operand) for operand in (rows, *others)]  # type: ignore[arg-type]
        if is_call(node, "addmm"):
            converted = [converted[2], *converted[:2]]
        return self._function.call(node.op, node.target, tuple(converted))

    def _with_parameters(self, node: fx.Node) -> fx.Node | None:
        """Elementwise operations and norms whose parameters lie along the last dimension."""
        params = [n for n in node.all_input_nodes if self._is_parameter(n)]
        if not params or node.op not in ("call_function", "call_method"):
            return None
        along_rows = next((p for p in params if any(size != 1 for size in shape(p)[:-1])), None)
        if along_rows is not None:
            raise NoMatch(node, "a parameter lies along the rows")
        if target_name(node) in ("layer_norm", "rms_norm"):
            return self._affine_norm(node)
        others = {rank_of(n) for n in node.all_input_nodes if n not in params}
        if target_name(node) not in POINTWISE or not others <= {rank_of(node), 0}:
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._function.convert)
        return self._function.call(node.op, node.target, args, kwargs)

    def _affine_norm(self, node: fx.Node) -> fx.Node:
        """The norm of a row, then scale and shift: parameters differ between experts, so they cannot stay inside."""
        normalised = argument(node, 1, "normalized_shape")
        if len(normalised) != 1:
            raise NoMatch(node, "it normalises over rows")
        is_layer_norm = is_call(node, "layer_norm")
        eps = argument(node, 4, "eps", 1e-5) if is_layer_norm else argument(node, 3, "eps")
        result = self._function.call(
            "call_function",
            torch.nn.functional.layer_norm if is_layer_norm else torch.nn.functional.rms_norm,
            (self._function.convert(node.args[0]), tuple(normalised)),  # type: ignore[arg-type]
            {"eps": eps},
        )
        weight = argument(node, 2, "weight")
        bias = argument(node, 3, "bias") if is_layer_norm else None
        if weight is not None:
            result = self._function.call("call_function", torch.mul, (result, self._function.convert(weight)))
        if bias is not None:
            result = self._function.call("call_function", torch.add, (result, self._function.convert(bias)))
        return result

    def _is_parameter(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self._is_of_parameters(node)

    def _unbatched(self, node: fx.Node) -> fx.Node | None:
        """`h[:, :, :n]` counts dimensions that rows do not have: `h[..., :n]`."""
        if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
            return None
        source, (*whole, last) = node.args
        is_along_rows = isinstance(last, slice) and is_tensor(source) and all(part == _ALL for part in whole)
        if not is_along_rows or len(whole) + 1 != rank_of(source):  # type: ignore[arg-type]
            return None
        rows = self._function.convert(source)  # type: ignore[arg-type]
        return self._function.call("call_function", operator.getitem, (rows, (Ellipsis, last)))

    # -- facts that must agree within the expert

    def _select(self, index: fx.Node) -> None:
        found = self._routing.index(index)
        if found is None or not found.is_token:
            raise NoMatch(index, "it does not select the tokens of one expert")
        if self.index not in (None, found):
            raise NoMatch(index, "rows are taken from, or added to, other tokens than the expert's")
        self.index = found
        self._set("expert", found.expert, index)
        self._set("ids", found.ids, index)

    def _set_weights(self, weights: fx.Node, node: fx.Node, *, by_expert: bool) -> None:
        self._set("weights", weights, node)
        self.by_expert = by_expert

    def _set(self, name: str, found: Any, node: fx.Node) -> None:
        known = getattr(self, name)
        if known is not None and known is not found and known != found:
            raise NoMatch(node, _SECOND[name])
        setattr(self, name, found)

    def _weight(self, *, is_column: bool) -> fx.Node:
        weight = self._function.weight
        return self._function.call("call_method", "unsqueeze", (weight, -1)) if is_column else weight


_SECOND = {
    "expert": "what belongs to one expert meets another expert's",
    "ids": "it is routed by other ids than the rest of the expert",
    "weights": "a second kind of routing weights enters the expert",
    "tokens": "a second kind of tokens enters the expert",
}


def _rows_taken(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(x, index) of `x[index]`, `x[index, :]`, `x[None, index].reshape(-1, D)`, `x.index_select(0, index)`."""
    if is_call(node, "index_select") and argument(node, 1, "dim") == 0:
        return node.args[0], argument(node, 2, "index")  # type: ignore[return-value]
    source = node.args[0] if node.args else None
    if not is_tensor(source):
        return None, None
    if is_call(node, *_VIEWS, "squeeze") and rank_of(node) == 2 and source.target is operator.getitem:  # type: ignore[union-attr]
        rows, index = source.args  # type: ignore[union-attr]
        is_batched = isinstance(index, tuple) and len(index) == 2 and index[0] is None and is_tensor(index[1])
        if is_batched and rank_of(rows) == 2 and shape(node)[-1] == shape(rows)[-1]:  # type: ignore[arg-type]
            return rows, index[1]  # type: ignore[return-value, index]
    if node.target is operator.getitem:
        parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if is_tensor(parts[0]) and all(part == _ALL or part is Ellipsis for part in parts[1:]):
            return source, parts[0]  # type: ignore[return-value]
    return None, None
