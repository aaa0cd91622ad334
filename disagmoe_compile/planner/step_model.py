"""Predicted time and memory of a training step, for one choice of sizes. One function, `predict`, for solver, search and reports.

Seconds of a step, per role c and per resource, of the busiest of its p groups (B sequences, n micro-batches, u = E / ceil(E/N)):

    compute[A]    n b a                      a: seconds of all its attention stages for one sequence, forward and backward
    compute[F]    B (f / (e u) + g / N)      f: routed experts, e: grouped-GEMM efficiency; g: shared experts, if they are on F
    exchange[A]   B L/p (2 V + 2 res) + 2 (M-1) w    over its NICs: dispatch out and combine-backward out (as much comes in),
                                             the residual and its gradient where p > 1, and the gradient all-reduce of w bytes
    exchange[F]   B L/p 2 V                  combine out and dispatch-backward out
    link[F]       B L/p 2 V_link / N         copies inside a node, with de-duplication by node

    step = max of these * fill * stall
    fill  = 1 + 2 (2p - 1) / (n L/p)         2p - 1 stages and as many exchanges before the last group has work, each at the
                                             pace of the bottleneck: an upper bound of the paper's p(a+f) + (2p-1)c - max(a,f)
    stall = 1 + 0.3 (1 - 1/p) 4p/q + 1/(4 q^2)    waiting for a micro-batch to come back; fitted to a simulation of the schedule
                                             that we generate: within a quarter of it in the tests; ours

Modelled as overlapped: compute, sending and receiving of different micro-batches. Not modelled: contention of A-to-F pairs
inside a group, imbalance of routing, latency of a message, optimizer time, reading the data. Traffic between ranks of one node
is counted as NIC traffic, so groups that share nodes look slower than they are. A simulator may refine all of it.

Bytes of a rank: weights, gradients and optimizer state of its stages, and what the schedule holds (`residency.py`); with
recompute the inputs of a stage, and what the second forward of one stage makes while its backward runs.

Legend: see `sizing_problem.py`; L boundaries, V bytes of one exchange for one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from disagmoe_compile.planner.residency import group_of_boundary, peak_resident
from disagmoe_compile.planner.sizing_problem import Candidate, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_costs import (
    ComponentCosts,
    Dedup,
    ExchangeBytes,
    exchange_bytes,
    grouped_gemm_efficiency,
    with_recompute,
)

STALL_OF_DEPTH = 0.3
STALL_OF_ONE_IN_FLIGHT = 0.25


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Seconds of a step on each resource of the busiest group of a role, and bytes on each of its ranks."""

    compute_s: float
    exchange_s: float
    link_s: float
    state_bytes: float
    activation_bytes: float

    @property
    def busy_s(self) -> float:
        return max(self.compute_s, self.exchange_s, self.link_s)

    @property
    def memory_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """`stages`: (micro-batch, boundary) pairs that a group runs in a step; `tokens`: of a step."""

    attention: RoleLoad
    ffn: RoleLoad
    fill: float
    stall: float
    stages: float
    tokens: int

    @property
    def pace_s(self) -> float:
        """Seconds of a step that the busiest resource works."""
        return max(self.attention.busy_s, self.ffn.busy_s)

    @property
    def step_s(self) -> float:
        return self.pace_s * self.fill * self.stall

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def balance(self) -> float:
        """Sum over both roles of min(1, intensity / ridge): compute time over exchange time. 2: neither waits for its NICs."""
        return sum(
            1.0 if load.compute_s >= load.exchange_s else load.compute_s / load.exchange_s
            for load in (self.attention, self.ffn)
        )

    def resources(self) -> dict[str, float]:
        """Seconds of a step by resource."""
        named = {}
        for role, load in (("attention", self.attention), ("ffn", self.ffn)):
            named[f"compute[{role}]"] = load.compute_s
            named[f"exchange[{role}]"] = load.exchange_s
        return {**named, "link[ffn]": self.ffn.link_s}


def stall_factor(pipeline_groups: int, in_flight: int) -> float:
    """How much longer a step takes because groups wait for micro-batches to come back; see the module docstring."""
    depth = STALL_OF_DEPTH * (1 - 1 / pipeline_groups) * 4 * pipeline_groups / in_flight
    return 1 + depth + STALL_OF_ONE_IN_FLIGHT / in_flight**2


class StepModel:
    """The numbers of a problem that its choices share, each computed once. All seconds are of ONE sequence unless said."""

    def __init__(self, problem: SizingProblem) -> None:
        self.problem = problem
        self.costs, self.cluster, self.options = problem.costs, problem.cluster, problem.options
        self._cache: dict[Hashable, float] = {}
        self._exchanges: dict[int, ExchangeBytes] = {}
        self._stages: dict[bool, list[ComponentCosts]] = {}

    def predict(self, candidate: Candidate) -> Prediction:
        """Of any choice, whether it fits the memory or not."""
        layout, policy = candidate.layout, candidate.policy
        batch = layout.global_batch_size
        attention = RoleLoad(
            compute_s=layout.n_microbatches
            * layout.micro_batch_size
            * self.attention_s(layout.pipeline_groups, layout.shared_on_ffn, policy.recompute_attention),
            exchange_s=batch * self.attention_nic_s(layout) / candidate.attention_nics,
            link_s=0.0,
            state_bytes=self.attention_state_bytes(layout, policy.shard_optimizer),
            activation_bytes=layout.micro_batch_size * self.attention_held_bytes(layout, policy),
        )
        ffn = RoleLoad(
            compute_s=batch * self.ffn_s(layout, policy.recompute_ffn),
            exchange_s=batch * self.ffn_nic_s(layout) / candidate.ffn_nics,
            link_s=batch * self.ffn_link_s(layout),
            state_bytes=self.ffn_state_bytes(layout),
            activation_bytes=self.ffn_held_bytes(layout, policy),
        )
        return Prediction(
            attention,
            ffn,
            fill=self.fill(layout),
            stall=stall_factor(layout.pipeline_groups, policy.in_flight),
            stages=layout.n_microbatches * self.boundaries_of_group(layout.pipeline_groups),
            tokens=batch * self.costs.seq_length,
        )

    def fits(self, prediction: Prediction) -> bool:
        """Both roles' ranks hold what they must."""
        return (
            max(prediction.attention.memory_bytes, prediction.ffn.memory_bytes) <= self.problem.memory_bytes
        )

    def boundaries_of_group(self, groups: int) -> int:
        return -(-self.costs.n_boundaries // groups)

    def fill(self, layout: Layout) -> float:
        hops = 2 * (2 * layout.pipeline_groups - 1)
        return 1 + hops / (layout.n_microbatches * self.boundaries_of_group(layout.pipeline_groups))

    def attention_bytes(self, layout: Layout, policy: Policy) -> float:
        """Memory of an attention rank."""
        held = layout.micro_batch_size * self.attention_held_bytes(layout, policy)
        return self.attention_state_bytes(layout, policy.shard_optimizer) + held

    def ffn_bytes(self, layout: Layout, policy: Policy) -> float:
        """Memory of an FFN rank."""
        return self.ffn_state_bytes(layout) + self.ffn_held_bytes(layout, policy)

    # Compute

    def attention_s(self, groups: int, shared_on_ffn: bool, recompute: bool) -> float:
        """Seconds of one GPU for the stages of the busiest attention group."""

        def busiest() -> float:
            seconds = self.seconds_of_attention_stages(shared_on_ffn, recompute)
            return max(sum(seconds[b] for b in members) for members in self._members(groups))

        return self._once(("attention_s", groups, shared_on_ffn, recompute), busiest)

    def seconds_of_attention_stages(self, shared_on_ffn: bool, recompute: bool) -> list[float]:
        """Seconds of one GPU for each, the head last."""
        stages = self._attention_stages(shared_on_ffn)
        return [self._seconds(with_recompute(stage, recompute=recompute)) for stage in stages]

    def ffn_s(self, layout: Layout, recompute: bool) -> float:
        """Seconds that one sequence of the batch takes the busiest rank of an FFN group."""
        routed, shared = self._ffn_unit_s(layout.pipeline_groups, recompute)
        rows = layout.attention_group_size * layout.micro_batch_size * self.costs.seq_length
        efficiency = grouped_gemm_efficiency(
            rows * self.costs.top_k / self.costs.num_experts,
            ridge_flops_per_byte=self.cluster.ridge_flops_per_byte,
            element_bytes=self.costs.element_bytes,
        )
        seconds = routed / (efficiency * self.effective_ranks(layout.ffn_group_size))
        return seconds + shared / layout.ffn_group_size if layout.shared_on_ffn else seconds

    def effective_ranks(self, ffn: int) -> float:
        """E / ceil(E / N): the rank with most experts sets the pace."""
        return self.costs.num_experts / -(-self.costs.num_experts // ffn)

    def _ffn_unit_s(self, groups: int, recompute: bool) -> tuple[float, float]:
        """One GPU, one sequence, the busiest group: routed experts at a large matmul's speed, shared experts."""

        def busiest(stages: tuple[ComponentCosts, ...]) -> float:
            members = [range(g, len(stages), groups) for g in range(groups)]
            return max(
                sum(self._seconds(with_recompute(stages[b], recompute=recompute)) for b in m) for m in members
            )

        return (
            self._once(("routed_s", groups, recompute), lambda: busiest(self.costs.experts)),
            self._once(("shared_s", groups, recompute), lambda: busiest(self.costs.shared)),
        )

    def _seconds(self, costs: ComponentCosts) -> float:
        """Of one GPU, forward and backward."""
        core = costs.core_forward_flops + costs.core_backward_flops
        plain = costs.forward_flops + costs.backward_flops - core
        return plain / self._matmul_flops + core / self._core_flops

    @cached_property
    def _matmul_flops(self) -> float:
        return self.cluster.gpu.flops * self.cluster.efficiencies.gemm.value

    @cached_property
    def _core_flops(self) -> float:
        return self.cluster.gpu.flops * self.cluster.efficiencies.attention_core.value

    # Exchange

    def exchange(self, ffn: int) -> ExchangeBytes:
        """Bytes of one exchange of one boundary for one sequence, in one direction."""
        if ffn not in self._exchanges:
            self._exchanges[ffn] = exchange_bytes(
                self.costs, self.options.dedup, ffn_ranks=ffn, ranks_per_node=self.cluster.gpus_per_node
            )
        return self._exchanges[ffn]

    def attention_nic_s(self, layout: Layout) -> float:
        """Seconds of one NIC for one sequence of the batch: what an attention group sends (it receives as much)."""
        groups = layout.pipeline_groups
        row_bytes = self.exchanged_bytes(layout)
        if groups > 1:
            row_bytes += self.costs.residual_bytes_per_token * self.costs.seq_length
        sent = 2 * self.boundaries_of_group(groups) * row_bytes
        reduced = self.attention_parameters(groups, layout.shared_on_ffn) * self.options.state.gradient_bytes
        all_reduce = 2 * (layout.attention_group_size - 1) * reduced / layout.global_batch_size
        return (sent + all_reduce) / self.nic_bytes_per_s

    def ffn_nic_s(self, layout: Layout) -> float:
        sent = 2 * self.boundaries_of_group(layout.pipeline_groups) * self.exchanged_bytes(layout)
        if layout.shared_on_ffn:
            reduced = self._shared_parameters(layout.pipeline_groups) * self.options.state.gradient_bytes
            sent += 2 * (layout.ffn_group_size - 1) * reduced / layout.global_batch_size
        return sent / self.nic_bytes_per_s

    def ffn_link_s(self, layout: Layout) -> float:
        rate = (
            self.cluster.gpu.link_bytes_per_s * self.cluster.efficiencies.link.value * layout.ffn_group_size
        )
        boundaries = self.boundaries_of_group(layout.pipeline_groups)
        return 2 * boundaries * self.exchange(layout.ffn_group_size).link / rate

    def even_nics(self, layout: Layout, pair: float) -> tuple[float, float]:
        """`pair` NICs in fractions, shared out so that both sides' exchanges take equally long: no split of them is faster."""
        attention, ffn = self.attention_nic_s(layout), self.ffn_nic_s(layout)
        share = attention / (attention + ffn) if attention + ffn > 0 else 0.5
        return pair * share, pair * (1 - share)

    def exchanged_bytes(self, layout: Layout) -> float:
        """Shared experts on FFN ranks need a row of their own only where every expert gets one."""
        extra = layout.shared_on_ffn and self.options.dedup is Dedup.NONE
        row = self.costs.token_bytes * self.costs.seq_length
        return self.exchange(layout.ffn_group_size).nic + (row if extra else 0)

    @cached_property
    def nic_bytes_per_s(self) -> float:
        return self.cluster.nic_bytes_per_s * self.cluster.efficiencies.network.value

    # Memory

    def attention_parameters(self, groups: int, shared_on_ffn: bool) -> float:
        """Elements on a rank of the attention group that has most; a tied head adds none."""
        stages = self._attention_stages(shared_on_ffn)
        return self._once(
            ("parameters", groups, shared_on_ffn),
            lambda: max(sum(stages[b].parameters for b in members) for members in self._members(groups)),
        )

    def attention_state_bytes(self, layout: Layout, shard_optimizer: bool) -> float:
        state = self.options.state
        replicas = layout.attention_group_size if shard_optimizer else 1
        parameters = self.attention_parameters(layout.pipeline_groups, layout.shared_on_ffn)
        return parameters * (state.weight_bytes + state.gradient_bytes + state.optimizer_bytes / replicas)

    def attention_held_bytes(self, layout: Layout, policy: Policy) -> float:
        """Of a micro-batch of ONE sequence: what a rank of the group that holds most keeps at once."""
        groups, recompute = layout.pipeline_groups, policy.recompute_attention

        def held() -> float:
            stages = self._attention_stages(layout.shared_on_ffn)
            most = 0.0
            for members in self._members(groups):
                weights = [0.0] * (2 * self.costs.n_boundaries + 1)
                for b in members:
                    weights[2 * b] = with_recompute(stages[b], recompute=recompute).activation_bytes
                again = max(stages[b].second_forward_bytes for b in members) if recompute else 0.0
                most = max(most, peak_resident(weights, policy.in_flight) + again)
            return most

        return self._once(("held", groups, layout.shared_on_ffn, recompute, policy.in_flight), held)

    def ffn_state_bytes(self, layout: Layout) -> float:
        """The rank with most experts, and the shared ones if they are here. Experts have no replicas to shard over."""
        state = self.options.state
        per_parameter = state.weight_bytes + state.gradient_bytes + state.optimizer_bytes
        boundaries = self.boundaries_of_group(layout.pipeline_groups)
        of_boundary = self._once("expert parameters", lambda: max(e.parameters for e in self.costs.experts))
        routed = boundaries * of_boundary
        shared = self._shared_parameters(layout.pipeline_groups) if layout.shared_on_ffn else 0
        return per_parameter * (routed / self.effective_ranks(layout.ffn_group_size) + shared)

    def ffn_held_bytes(self, layout: Layout, policy: Policy) -> float:
        kept, working = self.ffn_activation_bytes(layout, policy.recompute_ffn)
        return self.ffn_resident(layout.pipeline_groups, policy.in_flight) * kept + working

    def ffn_activation_bytes(self, layout: Layout, recompute: bool) -> tuple[float, float]:
        """Of one stage and micro-batch on the rank with most experts: bytes kept, and more while it is worked on."""

        def on_rank(field: str) -> float:
            routed = self._once(
                (field, "experts"), lambda: max(getattr(e, field) for e in self.costs.experts)
            )
            shared = self._once((field, "shared"), lambda: max(getattr(s, field) for s in self.costs.shared))
            shared *= layout.shared_on_ffn
            share = routed / self.effective_ranks(layout.ffn_group_size) + shared / layout.ffn_group_size
            return layout.attention_group_size * layout.micro_batch_size * share

        if not recompute:
            return on_rank("activation_bytes"), 0.0
        return on_rank("activation_bytes_recompute"), on_rank("second_forward_bytes")

    def ffn_resident(self, groups: int, in_flight: int) -> float:
        """(stage, micro-batch) activations that the FFN group with most of them holds at once."""

        def most() -> float:
            n_stages = 2 * self.costs.n_boundaries + 1
            return max(
                peak_resident(
                    [float(s % 2 == 1 and s // 2 % groups == g) for s in range(n_stages)], in_flight
                )
                for g in range(groups)
            )

        return self._once(("ffn_resident", groups, in_flight), most)

    def _shared_parameters(self, groups: int) -> float:
        return self.boundaries_of_group(groups) * max(s.parameters for s in self.costs.shared)

    # Placement

    def _attention_stages(self, shared_on_ffn: bool) -> list[ComponentCosts]:
        """Attention stages and the head, shared experts included where they run there."""
        if shared_on_ffn not in self._stages:
            pairs = zip(self.costs.attention, self.costs.shared)
            stages = [a if shared_on_ffn else a + s for a, s in pairs]
            self._stages[shared_on_ffn] = [*stages, self.costs.head]
        return self._stages[shared_on_ffn]

    def _members(self, groups: int) -> list[list[int]]:
        """Boundaries of each attention group, the head among them."""
        n = self.costs.n_boundaries
        members: list[list[int]] = [[] for _ in range(groups)]
        for b in range(n + 1):
            members[group_of_boundary(b, n, groups, tied_head=self.costs.tied_embeddings)].append(b)
        return members

    def _once(self, key: Hashable, compute: Callable[[], float]) -> float:
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]


def is_finite(prediction: Prediction) -> bool:
    """False where a cost is not a number or infinite: then no comparison of plans means anything."""
    return math.isfinite(prediction.step_s) and prediction.step_s > 0
