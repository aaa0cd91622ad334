"""An FFN rank: its own experts, run on only the rows routed to them. It never holds another rank's experts or a dense layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from disagmoe_compile.plan.ir import Direction, Plan, Transfer, TransferKind
from disagmoe_compile.runtime.messages import (
    Expected,
    Message,
    Receiving,
    ReceivingRouted,
    receive,
    receive_headers,
)
from disagmoe_compile.runtime.routing import ReceivedPairs, receive_pairs, sum_pairs_to_rows
from disagmoe_compile.runtime.stages import Boundary, ExpertStage, Saved
from disagmoe_compile.runtime.transport.base import Transport
from disagmoe_compile.runtime.worker import StepInputs, Worker, boundary_of, is_a, mismatch

_N_EXPERT_INPUTS = 4  # rows, weights, offsets, expert ids: the parameters follow


@dataclass(frozen=True, slots=True)
class _Rows:
    """A dispatched micro-batch as it arrived: rows of all sources, weights of their pairs."""

    tokens_RD: torch.Tensor
    weight_P: torch.Tensor


class ExpertWorker(Worker):
    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, ExpertStage],
        boundaries: Sequence[Boundary],
        transport: Transport,
        device: torch.device,
    ) -> None:
        super().__init__(plan, rank, boundaries, transport, device)
        self.stages = stages

    def begin(self, step: StepInputs) -> None:
        super().begin(step)
        self._pairs: dict[tuple[int, int], ReceivedPairs] = {}
        self._params: dict[int, list[torch.Tensor]] = {}  # by stage, put together once a step

    # ---- compute
    def forward(self, stage: int, microbatch: int) -> None:
        spec, boundary = self.stages[stage], stage // 2
        rows = self.read(f"dispatch.{boundary}", microbatch)
        assert isinstance(rows, _Rows)
        pairs = self._pairs[boundary, microbatch]
        order_P = pairs.by_expert_P
        if stage not in self._params:
            self._params[stage] = [param.together(self.step.parameters) for param in spec.params]
        outputs, saved = spec.compiled.forward(
            [
                rows.tokens_RD[pairs.pair_rows_P[order_P]],
                rows.weight_P[order_P],
                pairs.offsets_E,
                pairs.expert_P[order_P],
                *self._params[stage],
            ]
        )
        if self.step.trains:
            self._saved[stage, microbatch] = saved
        rows_RD = sum_pairs_to_rows(_undo(order_P, outputs[0]), pairs.pair_rows_P, pairs.n_rows)
        destinations = self.peers_of_stage(stage + 1)
        combined_rows = self.boundaries[boundary].combined_rows
        self._outgoing[f"combine.{boundary}", microbatch] = [
            Message(peer, combined_rows.encode(part))
            for peer, part in zip(destinations, rows_RD.split(pairs.rows_per_source), strict=True)
        ]

    def backward(self, stage: int, microbatch: int, *, split: bool) -> None:
        spec, boundary = self.stages[stage], stage // 2
        rows_grad_RD = self.read(f"combine_bwd.{boundary}", microbatch)
        assert isinstance(rows_grad_RD, torch.Tensor)
        pairs = self._pairs.pop((boundary, microbatch))
        saved: Saved = self._saved.pop((stage, microbatch))
        tangents = {0: rows_grad_RD[pairs.pair_rows_P[pairs.by_expert_P]]}
        if split:
            gradients, self._weight_work[stage, microbatch] = spec.compiled.backward_input(saved, tangents)
        else:
            gradients = spec.compiled.backward(saved, tangents)
        self._add_parameter_gradients(spec, gradients)
        sizes = self.boundaries[boundary]
        device = self.device
        pair_grads_PD = gradients.get(
            0, torch.zeros(pairs.n_pairs, sizes.in_features, dtype=sizes.token_dtype, device=device)
        )
        weight_grads_P = gradients.get(1, torch.zeros(pairs.n_pairs, dtype=sizes.weight_dtype, device=device))
        token_grads_RD = sum_pairs_to_rows(
            _undo(pairs.by_expert_P, pair_grads_PD), pairs.pair_rows_P, pairs.n_rows
        )
        parts = zip(
            self.peers_of_stage(stage - 1),
            token_grads_RD.split(pairs.rows_per_source),
            _undo(pairs.by_expert_P, weight_grads_P).split(pairs.pairs_per_source),
            strict=True,
        )
        self._outgoing[f"dispatch_bwd.{boundary}", microbatch] = [
            Message(peer, (*sizes.token_rows.encode(tokens), weights)) for peer, tokens, weights in parts
        ]

    def backward_weight(self, stage: int, microbatch: int) -> None:
        spec = self.stages[stage]
        self._add_parameter_gradients(
            spec, spec.compiled.backward_weight(self._weight_work.pop((stage, microbatch)))
        )

    def _add_parameter_gradients(self, spec: ExpertStage, gradients: Mapping[int, torch.Tensor]) -> None:
        for position, param in enumerate(spec.params, _N_EXPERT_INPUTS):
            if position in gradients:
                for fqn, gradient in param.apart(gradients[position], self.step.parameters).items():
                    self.add_gradient(fqn, gradient)

    # ---- transfers
    def post_receive(self, transfer: Transfer, microbatch: int) -> Receiving | ReceivingRouted:
        """A dispatch comes with a header of its sizes; its payload is posted as soon as the headers of all sources are there."""
        if not is_a(transfer, TransferKind.DISPATCH, Direction.FORWARD):
            return super().post_receive(transfer, microbatch)
        sources = self.peers_of_stage(transfer.src)
        header_specs = [Expected(peer, (((2,), torch.int64),)) for peer in sources]
        headers = receive_headers(self.transport, self.tags, transfer.name, microbatch, header_specs)

        def post_payload() -> Receiving:
            sizes = [message.tensors[0].tolist() for message in headers.messages]
            expected = [
                self._payload(boundary_of(transfer), peer, *one)
                for peer, one in zip(sources, sizes, strict=True)
            ]
            payload = receive(self.transport, self.tags, transfer.name, microbatch, expected)
            payload.nbytes += headers.nbytes
            headers.release()
            return payload

        return ReceivingRouted(self.transport.when_arrived(headers.works, post_payload))

    def _payload(self, boundary: int, peer: int, n_rows: int, n_pairs: int) -> Expected:
        sizes = self.boundaries[boundary]
        tokens = sizes.token_rows.specs(n_rows)
        return Expected(peer, (*tokens, ((2, n_pairs), torch.int32), ((n_pairs,), sizes.weight_dtype)))

    def expected(self, transfer: Transfer, microbatch: int) -> list[Expected]:
        if not is_a(transfer, TransferKind.COMBINE, Direction.BACKWARD):
            raise mismatch(transfer, "FFN")
        boundary = boundary_of(transfer)
        sizes, pairs = self.boundaries[boundary], self._pairs[boundary, microbatch]
        return [
            Expected(peer, sizes.combined_rows.specs(n_rows))
            for peer, n_rows in zip(self.peers_of_stage(transfer.src), pairs.rows_per_source, strict=True)
        ]

    def take_in(self, transfer: Transfer, microbatch: int, messages: list[Message]) -> object:
        boundary = boundary_of(transfer)
        sizes = self.boundaries[boundary]
        if is_a(transfer, TransferKind.COMBINE, Direction.BACKWARD):
            return torch.cat([sizes.combined_rows.decode(message.tensors) for message in messages])
        tokens = [sizes.token_rows.decode(message.tensors) for message in messages]
        routing, weights = zip(*(message.tensors[-2:] for message in messages), strict=True)
        n_local = len(self.stages[transfer.dst].experts)
        self._pairs[boundary, microbatch] = receive_pairs(routing, [len(t) for t in tokens], n_local)
        return _Rows(torch.cat(tokens), torch.cat(weights))


def _undo(order_P: torch.Tensor, sorted_P: torch.Tensor) -> torch.Tensor:
    """Values back in the order they had before `value[order_P]`."""
    out = torch.empty_like(sorted_P)
    out[order_P] = sorted_P
    return out
