"""The transfers of a pipeline: built from the sizes at each boundary, and looked up by the stages they join.

Legend: T tokens of one micro-batch on one attention rank, K experts a token, D_in / D_out features into / out of the experts;
`rows` (tokens that go to one FFN rank) and `pairs` (its token-expert pairs) are decided by the routing of the step. Without
de-duplication a row travels for each pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.exchange import AS_COMPUTED, RowExchange
from disagmoe_compile.plan.ir import Direction, Splits, TensorSpec, TokenDim, Transfer, TransferKind
from disagmoe_compile.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class BoundarySizes:
    """Sizes of one MoE boundary. `tokens` is T. `carried` are the tensors (shapes of one micro-batch on one attention rank) that
    the next attention stage reads; `carried_requires_grad` says, one by one, which of them send a gradient back.
    """

    tokens: int
    top_k: int
    in_features: int
    out_features: int
    token_dtype: str
    weight_dtype: str
    out_dtype: str
    num_experts: int
    carried: tuple[TensorSpec, ...] = ()
    carried_requires_grad: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "in_features", "out_features", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        if len(self.carried) != len(self.carried_requires_grad):
            raise ValueError(
                f"{len(self.carried)} carried tensors but {len(self.carried_requires_grad)} requires-grad flags"
            )


def build_transfers(
    topology: Topology,
    boundaries: Sequence[BoundarySizes],
    gradients: Mapping[int, Mapping[str, int]] | None = None,
    *,
    training: bool = True,
    exchange: RowExchange = AS_COMPUTED,
) -> tuple[Transfer, ...]:
    """Every transfer of the pipeline, boundary by boundary, then the reductions of gradients. `exchange`: how M2N sends rows.

    `gradients`: attention stage -> dtype -> number of elements whose gradients it owns; nothing is reduced without replicas
    (attention_group_size 1). `training=False` leaves out what only a backward needs. Raises ValueError on a boundary too many or
    too few.
    """
    if len(boundaries) != topology.n_boundaries:
        raise ValueError(
            f"{len(boundaries)} boundary sizes for a topology of {topology.n_boundaries} boundaries"
        )
    transfers: list[Transfer] = []
    for b, sizes in enumerate(boundaries):
        crosses = topology.group_of_stage(2 * b) != topology.group_of_stage(2 * b + 2)
        transfers += _forward(b, sizes, crosses, exchange)
        if training:
            transfers += _backward(b, sizes, crosses, exchange)
    if training and topology.attention_group_size > 1:
        transfers += [
            _reduction(stage, numels) for stage, numels in sorted((gradients or {}).items()) if numels
        ]
    return tuple(transfers)


def _forward(b: int, sizes: BoundarySizes, crosses: bool, exchange: RowExchange) -> Iterable[Transfer]:
    rows, pairs = _token_dims(sizes, exchange)
    dispatch = (
        TensorSpec("header", (2,), "int64"),
        *_rows("tokens", rows, sizes.in_features, sizes.token_dtype, exchange),
        TensorSpec("routing", (2, pairs), "int32"),
        TensorSpec("weights", (pairs,), sizes.weight_dtype),
    )
    combined = _rows("combined", rows, sizes.out_features, sizes.out_dtype, exchange)
    forward = Direction.FORWARD
    a, f, following = 2 * b, 2 * b + 1, 2 * b + 2
    yield Transfer(f"dispatch.{b}", TransferKind.DISPATCH, forward, a, f, dispatch, Splits.ROUTED)
    yield Transfer(f"combine.{b}", TransferKind.COMBINE, forward, f, following, combined, Splits.ROUTED)
    if crosses:
        routing = TensorSpec("routing", (2, sizes.tokens * sizes.top_k), "int32")
        carried = (routing, *sizes.carried)
        yield Transfer(f"residual.{b}", TransferKind.P2P, forward, a, following, carried, Splits.STATIC)


def _backward(b: int, sizes: BoundarySizes, crosses: bool, exchange: RowExchange) -> Iterable[Transfer]:
    rows, pairs = _token_dims(sizes, exchange)
    d_combined = _rows("d_combined", rows, sizes.out_features, sizes.out_dtype, exchange)
    d_dispatch = (
        *_rows("d_tokens", rows, sizes.in_features, sizes.token_dtype, exchange),
        TensorSpec("d_weights", (pairs,), sizes.weight_dtype),
    )
    d_carried = tuple(
        spec for spec, grad in zip(sizes.carried, sizes.carried_requires_grad, strict=True) if grad
    )
    backward = Direction.BACKWARD
    a, f, following = 2 * b, 2 * b + 1, 2 * b + 2
    yield Transfer(
        f"combine_bwd.{b}",
        TransferKind.COMBINE,
        backward,
        following,
        f,
        d_combined,
        Splits.ROUTED,
        f"combine.{b}",
    )
    yield Transfer(
        f"dispatch_bwd.{b}", TransferKind.DISPATCH, backward, f, a, d_dispatch, Splits.ROUTED, f"dispatch.{b}"
    )
    if crosses and d_carried:
        yield Transfer(
            f"residual_bwd.{b}",
            TransferKind.P2P,
            backward,
            following,
            a,
            d_carried,
            Splits.STATIC,
            f"residual.{b}",
        )


def _reduction(stage: int, numels: Mapping[str, int]) -> Transfer:
    payload = tuple(TensorSpec(dtype, (numel,), dtype) for dtype, numel in sorted(numels.items()))
    return Transfer(
        f"grads.{stage}", TransferKind.COLLECTIVE, Direction.FORWARD, stage, stage, payload, Splits.STATIC
    )


def _token_dims(sizes: BoundarySizes, exchange: RowExchange) -> tuple[TokenDim, TokenDim]:
    """Of what has a row, and of what has a pair."""
    pairs = TokenDim("pairs", sizes.tokens * sizes.top_k)
    return (pairs if exchange.row_per_pair else TokenDim("rows", sizes.tokens)), pairs


def _rows(
    name: str, rows: TokenDim, features: int, dtype: str, exchange: RowExchange
) -> tuple[TensorSpec, ...]:
    wire = exchange.wire_dtype(dtype)
    exponent = (TensorSpec(f"{name}_exponent", (1,), "int32"),) if exchange.is_scaled(dtype) else ()
    return (TensorSpec(name, (rows, features), wire), *exponent)


class Routes:
    """Transfers by name, by the stage they end at and by the stage they start from.

    Order matters to lowering: forward, a residual is received before the combine whose routing it carries; everything else is
    handled experts first, because the FFN group is waiting for it.
    """

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.by_name: dict[str, Transfer] = {}
        self._into: defaultdict[tuple[int, Direction], list[Transfer]] = defaultdict(list)
        self._out_of: defaultdict[tuple[int, Direction], list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            self.by_name[transfer.name] = transfer
            if transfer.kind is not TransferKind.COLLECTIVE:
                self._into[transfer.dst, transfer.direction].append(transfer)
                self._out_of[transfer.src, transfer.direction].append(transfer)
        for (_, direction), found in self._into.items():
            found.sort(key=lambda t: (t.kind is TransferKind.P2P) == (direction is Direction.BACKWARD))
        for found in self._out_of.values():
            found.sort(key=lambda t: t.kind is TransferKind.P2P)

    def into(self, stage: int, direction: Direction) -> Sequence[Transfer]:
        return self._into.get((stage, direction), ())

    def out_of(self, stage: int, direction: Direction) -> Sequence[Transfer]:
        return self._out_of.get((stage, direction), ())

    def size_source(self, transfer: Transfer) -> tuple[ActionKind, str] | None:
        """The action on the receiver (kind, transfer) that fixes the sizes of this receive; None where nothing has to.

        A dispatch carries its sizes in a header, residuals are static. A combine has the sizes of its dispatch: known where it
        was sent from, or from the residual that carried the routing over. Backward reuses the sizes of forward.
        """
        if transfer.kind is TransferKind.DISPATCH:
            return None if transfer.backward_of is None else (ActionKind.SEND, transfer.backward_of)
        if transfer.kind is not TransferKind.COMBINE:
            return None
        experts = transfer.src if transfer.direction is Direction.FORWARD else transfer.dst
        dispatches = [t for t in self.into(experts, Direction.FORWARD) if t.kind is TransferKind.DISPATCH]
        if transfer.direction is Direction.BACKWARD:
            return (ActionKind.WAIT, dispatches[0].name) if dispatches else None
        residuals = [t for t in self.into(transfer.dst, Direction.FORWARD) if t.kind is TransferKind.P2P]
        if residuals:
            return ActionKind.WAIT, residuals[0].name
        return (ActionKind.SEND, dispatches[0].name) if dispatches else None
