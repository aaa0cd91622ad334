"""AF-Pipe of a real model on a real cluster, as a program: the schedule that the runtime would run, with seconds and bytes.

Links of a group are those of all its ranks together: `nic` one way out and one way in, `link` inside its nodes.

    dispatch, combine and their gradients    A-group's NICs <-> F-group's NICs, copies inside the F-group's nodes over `link`
    residual                                 from A-group to A-group where there are several
    gradients of attention parameters        ring all-reduce in the A-group, over `link` where the group fits a node

Not modelled: pairs of ranks that are slower than the group's mean, imbalance of routing, the optimizer, reading data. Groups that
share a node still talk over NICs, as in the planner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.schedule.af_pipe import af_pipe
from disagmoe_compile.passes.schedule.in_order import in_order
from disagmoe_compile.passes.schedule.list_schedule import Rehearsed, rehearse
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.passes.schedule.rehearsal import Message, Rehearsal
from disagmoe_compile.plan.action import ActionKind
from disagmoe_compile.plan.ir import Direction, Schedule, Transfer, TransferKind
from disagmoe_compile.plan.sharing import Leg, Link
from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.plan.transfers import BoundarySizes, build_transfers
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts, exchange_bytes
from disagmoe_compile.simulator.assumptions import Assumptions
from disagmoe_compile.simulator.mixed_cluster import AnyCluster, MixedCluster, side
from disagmoe_compile.simulator.program import Program, Queueing
from disagmoe_compile.simulator.stage_times import Speed, StageSeconds, effective_ranks

GRADIENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class AFChoice:
    """What the planner decides. `order`: `rounds` as `passes/schedule/af_pipe.py` makes them, `in_order` as `in_order.py`, with
    `in_flight` as their `interleave` (None: the default), or `list` as `list_schedule.py`, of at most `in_flight` in all.
    `attention_nics`, `ffn_nics`: of one group, where they are not those of its GPUs.
    """

    pipeline_groups: int
    attention_group_size: int
    ffn_group_size: int
    micro_batch_size: int
    n_microbatches: int
    dedup: Dedup = Dedup.RANK
    shared_on_ffn: bool = False
    recompute_attention: bool = False
    recompute_ffn: bool = False
    in_flight: int | None = None
    split_weight_gradient: bool = True
    order: str = "rounds"
    attention_nics: float | None = None
    ffn_nics: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ("rounds", "in_order", "list"):
            raise InputError(f"order must be rounds, in_order or list, got {self.order!r}")

    @property
    def gpus(self) -> int:
        return self.pipeline_groups * (self.attention_group_size + self.ffn_group_size)

    @property
    def sequences(self) -> int:
        """Of one step."""
        return self.attention_group_size * self.micro_batch_size * self.n_microbatches

    @property
    def group_sequences(self) -> int:
        """Of one micro-batch in a group."""
        return self.attention_group_size * self.micro_batch_size

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline_groups": self.pipeline_groups,
            "attention_group_size": self.attention_group_size,
            "ffn_group_size": self.ffn_group_size,
            "micro_batch_size": self.micro_batch_size,
            "n_microbatches": self.n_microbatches,
            "dedup": str(self.dedup),
            "shared_experts_on": "ffn" if self.shared_on_ffn else "attention",
            "recompute": [
                role
                for role, on in (("attention", self.recompute_attention), ("ffn", self.recompute_ffn))
                if on
            ],
            "order": self.order,
            "in_flight": self.in_flight,
        }


@dataclass(frozen=True, slots=True)
class AFModel:
    """A model, a cluster and a choice. Of two kinds of nodes each side has its own.

    Raises InputError where ranks have no GPU, a group would have no stage or an FFN rank no expert.
    """

    model: ModelCosts
    cluster: AnyCluster
    choice: AFChoice
    assumptions: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        choice, model = self.choice, self.model
        if isinstance(self.cluster, MixedCluster):
            for role, size in (
                (Role.ATTENTION, choice.attention_group_size),
                (Role.FFN, choice.ffn_group_size),
            ):
                ranks, on = choice.pipeline_groups * size, self.cluster.of(role)
                if ranks > on.gpus:
                    raise InputError(
                        f"{ranks} {role} ranks do not fit on {on.gpus} GPUs ({on.name}); add nodes"
                    )
        elif choice.gpus > self.cluster.gpus:
            raise InputError(f"{choice.gpus} ranks do not fit on {self.cluster.gpus} GPUs; add nodes")
        if choice.pipeline_groups > model.n_boundaries:
            raise InputError(
                f"{choice.pipeline_groups} pipeline groups are more than the {model.n_boundaries} MoE layers"
            )
        if choice.ffn_group_size > model.num_experts:
            raise InputError(
                f"ffn_group_size {choice.ffn_group_size} is more than the {model.num_experts} experts"
            )

    @property
    def depth(self) -> int:
        return self.choice.pipeline_groups

    @property
    def topology(self) -> Topology:
        choice = self.choice
        return Topology(
            choice.attention_group_size,
            choice.ffn_group_size,
            choice.pipeline_groups,
            choice.pipeline_groups,
            self.model.n_boundaries,
            tied_head=self.model.tied_embeddings,
        )

    def transfers(self) -> tuple[Transfer, ...]:
        sizes = BoundarySizes(1, 1, 1, 1, "bfloat16", "bfloat16", "bfloat16", self.model.num_experts)
        carried = replace(sizes, carried=(), carried_requires_grad=())
        owned = {2 * b: {"bfloat16": 1} for b in range(self.model.n_boundaries + 1)}
        built = build_transfers(self.topology, [carried] * self.model.n_boundaries, owned)
        residuals = [t for t in built if t.kind is TransferKind.P2P]
        backwards = [
            replace(
                t,
                name=t.name.replace("residual.", "residual_bwd."),
                direction=Direction.BACKWARD,
                src=t.dst,
                dst=t.src,
                backward_of=t.name,
            )
            for t in residuals
        ]
        return (*built, *backwards)

    def schedule(self) -> Schedule:
        """Compute-only; of `list` the one that should be shortest."""
        if self.choice.order == "list":
            return self.orders()[0].schedule()
        generate = in_order if self.choice.order == "in_order" else af_pipe
        return generate(
            self.topology,
            self.choice.n_microbatches,
            split_weight_gradient=self.choice.split_weight_gradient,
            interleave=self.choice.in_flight,
        )

    def orders(self, limit: float = math.inf) -> tuple[Rehearsed, ...]:
        """Of list scheduling: the one that should be shortest first, those that may hold less after it, none that should take
        longer than `limit` seconds.
        """
        return rehearse(
            self.topology,
            self.choice.n_microbatches,
            in_flight=self.choice.in_flight or 4 * self.choice.pipeline_groups,
            rehearsal=self.rehearsal(),
            limit=limit,
        )

    def rehearsal(self) -> Rehearsal:
        """The program's times and messages, for list scheduling."""
        messages: defaultdict[tuple[Direction, int], list[Message]] = defaultdict(list)
        sums: dict[int, tuple[Leg, ...]] = {}
        for transfer in self.transfers():
            if transfer.kind is not TransferKind.COLLECTIVE:
                messages[transfer.direction, transfer.src].append(Message(transfer.dst, self.legs(transfer)))
            elif self.choice.attention_group_size > 1:
                sums[transfer.src] = self.legs(transfer)
        launch = self.assumptions.launch_s
        return Rehearsal(
            {action: seconds + launch for action, seconds in self.action_seconds().items()},
            messages,
            self.links(),
            sums,
            self.assumptions.message_latency_s,
        )

    def program(self, schedule: Schedule | None = None, queueing: Queueing = Queueing.LIST) -> Program:
        """`schedule`: a compute-only one to use instead of the generator's."""
        transfers = self.transfers()
        owned = tuple(range(0, 2 * self.model.n_boundaries + 1, 2))
        reducing = self.topology.groups if self.choice.attention_group_size > 1 else ()
        lowered = lower_lists(
            schedule or self.schedule(),
            transfers,
            reduced={group: owned for group in reducing if group.role is Role.ATTENTION},
            release_sends=queueing is Queueing.HOST,
        )
        return Program(
            schedule=lowered,
            transfers=transfers,
            seconds=self.action_seconds(),
            messages={t.name: self.legs(t) for t in transfers},
            links=self.links(),
            latency=self.assumptions.message_latency_s,
            overhead=self.assumptions.launch_s,
            queueing=queueing,
        )

    # Compute

    def stage_seconds(self, stage: int) -> StageSeconds:
        choice, model = self.choice, self.model
        boundary, speed = stage // 2, self._speed(Role.FFN if stage % 2 else Role.ATTENTION)
        if stage % 2:
            sequences, ranks = choice.group_sequences, choice.ffn_group_size
            routed = speed.expert_seconds(model, boundary, sequences, ranks, recompute=choice.recompute_ffn)
            if not choice.shared_on_ffn:
                return routed
            shared = speed.seconds(model.shared[boundary], sequences / ranks, recompute=choice.recompute_ffn)
            return routed + shared
        size, recompute = choice.micro_batch_size, choice.recompute_attention
        if boundary == model.n_boundaries:
            return speed.seconds(model.head, size, recompute=recompute)
        attention = speed.seconds(model.attention[boundary], size, recompute=recompute)
        if choice.shared_on_ffn:
            return attention
        return attention + speed.seconds(model.shared[boundary], size, recompute=recompute)

    def action_seconds(self) -> dict[tuple[ActionKind, int], float]:
        return {
            (kind, stage): seconds
            for stage in range(self.topology.n_stages)
            for kind, seconds in self.stage_seconds(stage).by_kind().items()
        }

    def _speed(self, role: Role) -> Speed:
        return Speed(side(self.cluster, role))

    # Communication

    def links(self) -> dict[Link, float]:
        """Bytes/s of each group's ranks together."""
        found: dict[Link, float] = {}
        for group in self.topology.groups:
            speed = self._speed(group.role)
            size = len(self.topology.ranks_of_group(group))
            nics = self.choice.attention_nics if group.role is Role.ATTENTION else self.choice.ffn_nics
            rate = size * speed.nic if nics is None else nics * speed.one_nic
            found[_link(group, "nic out")] = found[_link(group, "nic in")] = rate
            found[_link(group, "link")] = size * speed.link
        return found

    def legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        """Bytes of one message between whole groups."""
        src, dst = (self.topology.group_of_stage(s) for s in (transfer.src, transfer.dst))
        if transfer.kind is TransferKind.COLLECTIVE:
            return self._reduction(transfer.src, src)
        nic = (_link(src, "nic out"), _link(dst, "nic in"))
        tokens = self.choice.group_sequences * self.model.seq_length
        if transfer.kind is TransferKind.P2P:
            return (Leg(tokens * self.model.residual_bytes_per_token, nic),)
        nic_bytes, link_bytes = self.exchange()
        experts = src if src.role is Role.FFN else dst
        copies = (Leg(link_bytes, (_link(experts, "link"),)),) if link_bytes else ()
        return (Leg(nic_bytes, nic), *copies)

    def exchange(self) -> tuple[float, float]:
        """Bytes of one exchange of a micro-batch in one direction: over NICs, and inside the F-group's nodes.

        Shared experts on FFN ranks need a row of their own only where every expert gets one.
        """
        choice, model = self.choice, self.model
        moved = exchange_bytes(
            model,
            choice.dedup,
            ffn_ranks=choice.ffn_group_size,
            ranks_per_node=side(self.cluster, Role.FFN).gpus_per_node,
        )
        extra = choice.shared_on_ffn and choice.dedup is Dedup.NONE
        rows = model.token_bytes * model.seq_length if extra else 0
        return choice.group_sequences * (moved.nic + rows), choice.group_sequences * moved.link

    def _reduction(self, stage: int, group: Group) -> tuple[Leg, ...]:
        """Ring: each of M ranks sends 2 (M - 1) / M of the gradients."""
        boundary, ranks = stage // 2, self.choice.attention_group_size
        is_head = boundary == self.model.n_boundaries
        parameters = (self.model.head if is_head else self.model.attention[boundary]).parameters
        if not is_head and not self.choice.shared_on_ffn:
            parameters += self.model.shared[boundary].parameters
        amount = 2 * (ranks - 1) * parameters * GRADIENT_BYTES
        if ranks <= side(self.cluster, Role.ATTENTION).gpus_per_node:
            return (Leg(amount, (_link(group, "link"),)),)
        return (Leg(amount, (_link(group, "nic out"), _link(group, "nic in"))),)

    # Memory of a rank, beside weights and optimizer

    def activation_bytes(self) -> dict[int, float]:
        """Per stage and micro-batch what the forward keeps on one rank."""
        choice, model = self.choice, self.model
        share = choice.group_sequences / effective_ranks(model.num_experts, choice.ffn_group_size)
        kept: dict[int, float] = {}

        def held(costs: Any, recompute: bool) -> float:
            return float(costs.activation_bytes_recompute if recompute else costs.activation_bytes)

        for b in range(model.n_boundaries):
            shared_on = choice.recompute_ffn if choice.shared_on_ffn else choice.recompute_attention
            shared = held(model.shared[b], shared_on)
            attention = held(model.attention[b], choice.recompute_attention)
            routed = share * held(model.experts[b], choice.recompute_ffn)
            if choice.shared_on_ffn:
                routed += shared * choice.group_sequences / choice.ffn_group_size
            else:
                attention += shared
            kept[2 * b], kept[2 * b + 1] = choice.micro_batch_size * attention, routed
        kept[2 * model.n_boundaries] = choice.micro_batch_size * held(model.head, choice.recompute_attention)
        return kept

    def message_bytes(self) -> dict[str, float]:
        """Per transfer the buffer of one message on one rank of the larger side's share."""
        nic, link = self.exchange()
        small = min(self.choice.attention_group_size, self.choice.ffn_group_size)
        tokens = self.choice.micro_batch_size * self.model.seq_length
        sizes = {}
        for transfer in self.transfers():
            if transfer.kind is TransferKind.P2P:
                sizes[transfer.name] = float(tokens * self.model.residual_bytes_per_token)
            elif transfer.kind is not TransferKind.COLLECTIVE:
                sizes[transfer.name] = (nic + link) / small
        return sizes


def _link(group: Group, what: str) -> tuple[str, str]:
    return (str(group), what)
