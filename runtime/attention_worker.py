"""An attention rank: dense stages on its share of the samples. It never holds an expert's weights and never runs an expert."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from disagmoe_compile.plan.ir import Direction, Plan, Transfer, TransferKind
from disagmoe_compile.runtime.buffer_sums import BufferSums
from disagmoe_compile.runtime.messages import Expected, Message
from disagmoe_compile.runtime.rng import derive_seed, private_rng
from disagmoe_compile.runtime.routing import RankRoute, route, scatter_pairs, sum_partial_rows
from disagmoe_compile.runtime.stages import AttentionStage, Boundary, SizedStages, Source, SourceKind
from disagmoe_compile.runtime.transport.base import Transport
from disagmoe_compile.runtime.worker import (
    StepInputs,
    Worker,
    boundary_of,
    is_a,
    mismatch,
)

StageKey = tuple[int, int]  # (stage or boundary, micro-batch)


class AttentionWorker(Worker):
    """`outputs[i][microbatch]` collects the model's outputs; `numerators` the sums of the loss terms (head ranks only),
    `buffer_sums` what this rank's samples add to buffers, `input_gradients` the gradients of arguments by position, zero where
    other ranks have the samples.

    A micro-batch without samples runs no stage: it sends messages without rows, and gradients of zero.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sized: Mapping[int, SizedStages],
        transport: Transport,
        device: torch.device,
    ) -> None:
        largest = sized[plan.workload.microbatch_size]
        super().__init__(plan, rank, largest.boundaries, transport, device)
        self._sized, self.stages = sized, largest.stages
        topology = plan.topology
        self._owners = [
            [topology.experts_of(b.num_experts, n) for n in range(topology.ffn_group_size)]
            for b in largest.boundaries
        ]

    def begin(self, step: StepInputs) -> None:
        super().begin(step)
        self.outputs: dict[int, dict[int, torch.Tensor]] = {}
        self.numerators: list[torch.Tensor] = []
        self.buffer_sums = BufferSums()
        self.input_gradients: dict[int, torch.Tensor] = {}
        self._routes: dict[StageKey, tuple[RankRoute, ...]] = {}
        self._carried: dict[StageKey, list[torch.Tensor]] = {}
        self._carried_grads: dict[StageKey, list[torch.Tensor | None]] = {}

    # ---- sizes
    def samples(self, microbatch: int) -> range:
        return self.plan.samples_of(self.member, microbatch)

    def _stage(self, stage: int, microbatch: int) -> AttentionStage:
        return self._sized[len(self.samples(microbatch))].stages[stage]

    def _boundary(self, boundary: int, microbatch: int) -> Boundary:
        samples = self.samples(microbatch)
        if samples:
            return self._sized[len(samples)].boundaries[boundary]
        return replace(self.boundaries[boundary], n_tokens=0, n_pairs=0, carried=())

    # ---- compute
    def forward(self, stage: int, microbatch: int) -> None:
        if not self.samples(microbatch):
            self._forward_nothing(self.stages[stage], microbatch)
            return
        spec = self._stage(stage, microbatch)
        inputs = [self._input(source, stage, microbatch) for source in spec.sources]
        self._carried.pop((stage, microbatch), None)
        with self._rng(spec, microbatch):
            outputs, saved = spec.compiled.forward(inputs)
        if self.step.trains:
            self._saved[stage, microbatch] = saved
        if spec.dispatch is not None:
            self._prepare_dispatch(spec, microbatch, outputs)
            self._hand_on(spec, microbatch, outputs)
        self.buffer_sums.add(
            spec.buffer_deltas,
            outputs,
            self.step.arguments,
            is_first=microbatch == 0 and self.member == 0,
        )
        for index, position in spec.model_outputs.items():
            self.outputs.setdefault(index, {})[microbatch] = outputs[position]
        if spec.loss_numerators:
            terms = [outputs[position].detach() for position in spec.loss_numerators]
            self.numerators = [a + b for a, b in zip(self.numerators, terms)] if self.numerators else terms

    def backward(self, stage: int, microbatch: int, *, split: bool) -> None:
        if not self.samples(microbatch):
            self._backward_nothing(self.stages[stage], microbatch)
            return
        spec = self._stage(stage, microbatch)
        saved = self._saved.pop((stage, microbatch))
        tangents = self._tangents(spec, microbatch)
        with self._rng(spec, microbatch):  # a recomputed stage draws again what its forward drew
            if split:
                gradients, self._weight_work[stage, microbatch] = spec.compiled.backward_input(
                    saved, tangents
                )
            else:
                gradients = spec.compiled.backward(saved, tangents)
        self._add_parameter_gradients(spec, gradients)
        self._add_input_gradients(spec, microbatch, gradients)
        if stage:
            self._send_back(spec, microbatch, gradients)
        self._routes.pop((stage // 2, microbatch), None)

    def _rng(self, spec: AttentionStage, microbatch: int) -> AbstractContextManager[None]:
        if not spec.uses_rng:
            return nullcontext()
        seed = derive_seed(self.step.call_seed, microbatch, spec.index, self.member)
        return private_rng(seed, self.device)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        if self.samples(microbatch):
            spec = self._stage(stage, microbatch)
            self._add_parameter_gradients(
                spec, spec.compiled.backward_weight(self._weight_work.pop((stage, microbatch)))
            )

    def _forward_nothing(self, spec: AttentionStage, microbatch: int) -> None:
        if spec.dispatch is None:
            return
        nothing = [
            torch.empty(0, *shape[1:], dtype=dtype, device=self.device) for shape, dtype in spec.outputs
        ]
        self._prepare_dispatch(spec, microbatch, nothing)
        following = spec.index + 2
        if following not in self.stages:
            peer = self.peers_of_stage(following)[self.member]
            self._outgoing[f"residual.{spec.index // 2}", microbatch] = [Message(peer, ())]

    def _backward_nothing(self, spec: AttentionStage, microbatch: int) -> None:
        """Zeros for every parameter that has a gradient on the replicas, so that all sum the same ones."""
        for position in spec.compiled.gradient_inputs:
            source = spec.sources[position]
            if source.kind is SourceKind.PARAMETER and source.name not in self.gradients:
                self.add_gradient(source.name, torch.zeros_like(self.step.parameters[source.name]))
        if spec.index:
            self._send_back(spec, microbatch, {})
        self._routes.pop((spec.index // 2, microbatch), None)

    # ---- inputs and outputs of a stage
    def _input(self, source: Source, stage: int, microbatch: int) -> torch.Tensor:
        match source.kind:
            case SourceKind.PARAMETER:
                return self.step.parameters[source.name]
            case SourceKind.REPLICATED:
                return self._argument(source)
            case SourceKind.SAMPLES:
                samples = self.samples(microbatch)
                return self._argument(source).narrow(0, samples.start, len(samples)).contiguous()
            case SourceKind.COMBINED:
                combined = self.read(f"combine.{stage // 2 - 1}", microbatch)
                assert isinstance(combined, torch.Tensor)
                return combined.view(source.shape)
            case SourceKind.CARRIED:
                return self._carried[stage, microbatch][source.position]

    def _argument(self, source: Source) -> torch.Tensor:
        argument = self.step.arguments[source.position]
        assert isinstance(argument, torch.Tensor)
        return argument.detach()

    def _prepare_dispatch(self, spec: AttentionStage, microbatch: int, outputs: list[torch.Tensor]) -> None:
        assert spec.dispatch is not None
        boundary = spec.index // 2
        tokens_TD, token_P, expert_P, weight_P = (
            outputs[position]
            for position in (
                spec.dispatch.tokens,
                spec.dispatch.token_ids,
                spec.dispatch.expert_ids,
                spec.dispatch.weights,
            )
        )
        owners, sizes = self._owners[boundary], self.boundaries[boundary]
        routes = self._route(boundary, token_P, expert_P)
        self._routes[boundary, microbatch] = routes
        self._outgoing[f"dispatch.{boundary}", microbatch] = [
            Message(
                peer,
                (
                    *sizes.token_rows.encode(tokens_TD[one.rows_R]),
                    torch.stack([one.pair_rows_P, expert_P[one.pairs_P] - owned.start]).to(torch.int32),
                    weight_P[one.pairs_P],
                ),
                header=torch.tensor([one.n_rows, one.n_pairs], device=self.device),
            )
            for peer, one, owned in zip(self.peers_of_stage(spec.index + 1), routes, owners, strict=True)
        ]

    def _route(self, boundary: int, token_P: torch.Tensor, expert_P: torch.Tensor) -> tuple[RankRoute, ...]:
        sizes = self.boundaries[boundary]
        return route(
            token_P,
            expert_P,
            self._owners[boundary],
            sizes.num_experts,
            row_per_pair=sizes.exchange.row_per_pair,
        )

    def _hand_on(self, spec: AttentionStage, microbatch: int, outputs: list[torch.Tensor]) -> None:
        """To the next attention stage: locally if this group runs it, else with the routing that its combine needs."""
        assert spec.dispatch is not None
        carried = [outputs[position] for position in spec.carried]
        following = spec.index + 2
        if following in self.stages:
            self._carried[following, microbatch] = carried
            return
        routing_2P = torch.stack([outputs[spec.dispatch.token_ids], outputs[spec.dispatch.expert_ids]]).to(
            torch.int32
        )
        peer = self.peers_of_stage(following)[self.member]
        self._outgoing[f"residual.{spec.index // 2}", microbatch] = [Message(peer, (routing_2P, *carried))]

    # ---- gradients of a stage
    def _tangents(self, spec: AttentionStage, microbatch: int) -> dict[int, torch.Tensor]:
        boundary = spec.index // 2
        tangents: dict[int, torch.Tensor] = {}

        def add(position: int, gradient: torch.Tensor) -> None:
            shaped = gradient.reshape(spec.outputs[position][0])
            tangents[position] = tangents[position] + shaped if position in tangents else shaped

        if spec.dispatch is not None:
            arrived = self.read(f"dispatch_bwd.{boundary}", microbatch)
            assert isinstance(arrived, tuple)
            add(spec.dispatch.tokens, arrived[0])
            add(spec.dispatch.weights, arrived[1])
            for position, gradient in zip(
                spec.carried, self._carried_grads_of(spec, microbatch), strict=True
            ):
                if gradient is not None:
                    add(position, gradient)
        assert self.seeds is not None, "a backward has seeds"
        if spec.loss_numerators and self.seeds.numerators:
            for position, seed in zip(spec.loss_numerators, self.seeds.numerators, strict=True):
                shape, dtype = spec.outputs[position]
                add(position, torch.full(shape, seed, dtype=dtype, device=self.device))
        for index, position in spec.model_outputs.items():
            incoming = self.seeds.outputs.get(index)
            part = incoming and incoming.of_samples(
                self.samples(microbatch), self.plan.workload.global_batch_size
            )
            if part is not None:
                add(position, part)
        for position in spec.compiled.tangents:
            if position not in tangents:  # nothing downstream used this output
                shape, dtype = spec.outputs[position]
                tangents[position] = torch.zeros(shape, dtype=dtype, device=self.device)
        return {position: tangents[position] for position in spec.compiled.tangents}

    def _carried_grads_of(self, spec: AttentionStage, microbatch: int) -> list[torch.Tensor | None]:
        if spec.index + 2 in self.stages:
            return self._carried_grads.pop((spec.index, microbatch))
        values = self._boundary(spec.index // 2, microbatch).carried
        if not any(value.requires_grad for value in values):
            return [None] * len(values)  # nothing comes back: there is no such transfer
        arrived = iter(self.read(f"residual_bwd.{spec.index // 2}", microbatch))  # type: ignore[call-overload]
        return [next(arrived) if value.requires_grad else None for value in values]

    def _add_parameter_gradients(self, spec: AttentionStage, gradients: Mapping[int, torch.Tensor]) -> None:
        for position, source in enumerate(spec.sources):
            if source.kind is SourceKind.PARAMETER and position in gradients:
                self.add_gradient(source.name, gradients[position])

    def _add_input_gradients(
        self, spec: AttentionStage, microbatch: int, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        for position, source in enumerate(spec.sources):
            if position not in gradients or source.kind not in (SourceKind.SAMPLES, SourceKind.REPLICATED):
                continue
            if source.position not in self.input_gradients:
                self.input_gradients[source.position] = torch.zeros_like(self._argument(source))
            total = self.input_gradients[source.position]
            samples = self.samples(microbatch)
            is_whole = source.kind is SourceKind.REPLICATED
            (total if is_whole else total.narrow(0, samples.start, len(samples))).add_(gradients[position])

    def _send_back(
        self, spec: AttentionStage, microbatch: int, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        boundary = spec.index // 2 - 1
        routes = self._routes[boundary, microbatch]
        combined_grad: torch.Tensor | None = None
        carried: dict[int, torch.Tensor] = {}
        for position, source in enumerate(spec.sources):
            if source.kind is SourceKind.COMBINED and position in gradients:
                combined_grad = (
                    gradients[position] if combined_grad is None else combined_grad + gradients[position]
                )
            elif source.kind is SourceKind.CARRIED and position in gradients:
                carried[source.position] = gradients[position]
        sizes = self._boundary(boundary, microbatch)
        if combined_grad is None:
            combined_TD = torch.zeros(
                sizes.n_tokens, sizes.out_features, dtype=sizes.out_dtype, device=self.device
            )
        else:
            combined_TD = combined_grad.reshape(-1, sizes.out_features)
        self._outgoing[f"combine_bwd.{boundary}", microbatch] = [
            Message(peer, sizes.combined_rows.encode(combined_TD[one.rows_R]))
            for peer, one in zip(self.peers_of_stage(spec.index - 1), routes, strict=True)
        ]
        before = spec.index - 2
        if before in self.stages:
            n_carried = len(self.stages[before].carried)
            self._carried_grads[before, microbatch] = [carried.get(i) for i in range(n_carried)]
            return
        self._outgoing[f"residual_bwd.{boundary}", microbatch] = [
            Message(
                self.peers_of_stage(before)[self.member],
                tuple(
                    carried[i]
                    if i in carried
                    else torch.zeros(value.shape, dtype=value.dtype, device=self.device)
                    for i, value in enumerate(sizes.carried)
                    if value.requires_grad
                ),
            )
        ]

    # ---- transfers
    def expected(self, transfer: Transfer, microbatch: int) -> list[Expected]:
        boundary = boundary_of(transfer)
        sizes, sources = self._boundary(boundary, microbatch), self.peers_of_stage(transfer.src)
        if transfer.kind is TransferKind.P2P:
            values = [v for v in sizes.carried if transfer.direction is Direction.FORWARD or v.requires_grad]
            specs = [(v.shape, v.dtype) for v in values]
            if transfer.direction is Direction.FORWARD:
                specs.insert(0, ((2, sizes.n_pairs), torch.int32))
            return [Expected(sources[self.member], tuple(specs))]
        routes = zip(sources, self._routes[boundary, microbatch], strict=True)
        if is_a(transfer, TransferKind.COMBINE, Direction.FORWARD):
            return [Expected(peer, sizes.combined_rows.specs(one.n_rows)) for peer, one in routes]
        if is_a(transfer, TransferKind.DISPATCH, Direction.BACKWARD):
            return [
                Expected(peer, (*sizes.token_rows.specs(one.n_rows), ((one.n_pairs,), sizes.weight_dtype)))
                for peer, one in routes
            ]
        raise mismatch(transfer, "attention")

    def take_in(self, transfer: Transfer, microbatch: int, messages: list[Message]) -> object:
        boundary = boundary_of(transfer)
        sizes = self._boundary(boundary, microbatch)
        if is_a(transfer, TransferKind.P2P, Direction.FORWARD):
            routing_2P, *carried = messages[0].tensors
            token_P, expert_P = routing_2P.long()
            self._routes[boundary, microbatch] = self._route(boundary, token_P, expert_P)
            self._carried[transfer.dst, microbatch] = carried
            return None
        if is_a(transfer, TransferKind.P2P, Direction.BACKWARD):
            return messages[0].tensors
        routes = self._routes[boundary, microbatch]
        is_combine = is_a(transfer, TransferKind.COMBINE, Direction.FORWARD)
        rows = sizes.combined_rows if is_combine else sizes.token_rows
        summed_TD = sum_partial_rows([rows.decode(m.tensors) for m in messages], routes, sizes.n_tokens)
        if is_combine:
            return summed_TD
        return summed_TD, scatter_pairs([m.tensors[-1] for m in messages], routes, sizes.n_pairs)
