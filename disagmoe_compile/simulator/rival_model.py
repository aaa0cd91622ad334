"""Pipelines with expert parallelism, as programs of the same engine, costs and options as AF-Pipe: what it has to beat.

A rival's worker holds attention and experts. G GPUs are p pipeline ranks of G / p GPUs each; these are data-parallel in attention
and share the experts in EP groups of e. One GPU stands for all of its pipeline rank: they do the same. Stages are numbered as in
AF-Pipe (2b attention, 2b + 1 experts), with the transfers of the same names; all of a chunk's stages are on one rank.

    megatron_1f1b    interleaved 1F1B; a chunk is A F A F ... in turn, and each all-to-all holds it up
    tutel            the same, tokens in `degree` parts: experts of one part run while others travel
    comet            the same, 8 parts that cost no efficiency and no launch: one fused kernel
    dualpipe         the forward of one micro-batch beside the backward of another, stage by stage; each all-to-all of one hides
                     behind a stage of the other. p = 1: forward of the next beside backward of this one
    dualpipe_ideal   the same with messages that take no time, or what its busiest link needs, whichever is longer

In favour of the rivals: a message to the next pipeline rank travels beside the combine that feeds it, not after it; Comet's
kernel loses nothing to sharing the GPU's cores with communication; an EP group that fits a node uses its links alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.passes.schedule.lower import lower_lists
from disagmoe_compile.plan.action import Action, ActionKind, overlap
from disagmoe_compile.plan.ir import Direction, Schedule, Splits, Transfer, TransferKind
from disagmoe_compile.plan.sharing import Leg, Link
from disagmoe_compile.plan.topology import Group
from disagmoe_compile.planner.hardware import Cluster
from disagmoe_compile.planner.step_costs import Dedup, ModelCosts, expected_copies
from disagmoe_compile.simulator.assumptions import Assumptions
from disagmoe_compile.simulator.dualpipe import dualpipe
from disagmoe_compile.simulator.pipelines import interleaved_1f1b, pipeline_rank
from disagmoe_compile.simulator.program import Program
from disagmoe_compile.simulator.stage_times import Speed, StageSeconds, effective_ranks

RIVALS = ("megatron_1f1b", "tutel", "comet", "dualpipe", "dualpipe_ideal")
COMET_PARTS = 8
GRADIENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class RivalChoice:
    """`ep_size` GPUs share the experts; `parts`: of the tokens of an expert stage; `chunks`: of layers on a pipeline rank."""

    system: str
    pipeline_ranks: int
    ep_size: int
    chunks: int
    micro_batch_size: int
    n_microbatches: int
    parts: int = 1
    dedup: Dedup = Dedup.RANK
    recompute: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline_ranks": self.pipeline_ranks,
            "ep_size": self.ep_size,
            "chunks": self.chunks,
            "micro_batch_size": self.micro_batch_size,
            "n_microbatches": self.n_microbatches,
            "degree": self.parts,
            "dedup": str(self.dedup),
            "recompute": ["all"] if self.recompute else [],
        }


@dataclass(frozen=True, slots=True)
class RivalModel:
    """A model, a cluster and a choice. Raises InputError where they do not fit each other."""

    model: ModelCosts
    cluster: Cluster
    choice: RivalChoice
    assumptions: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        choice, gpus = self.choice, self.cluster.gpus
        if choice.system not in RIVALS:
            raise InputError(f"unknown schedule {choice.system!r}; one of af_pipe, {', '.join(RIVALS)}")
        if gpus % choice.pipeline_ranks or self.replicas % choice.ep_size:
            raise InputError(
                f"{choice.pipeline_ranks} pipeline ranks x EP size {choice.ep_size} does not divide {gpus} GPUs"
            )
        if choice.ep_size > self.model.num_experts:
            raise InputError(f"EP size {choice.ep_size} is more than the {self.model.num_experts} experts")
        if choice.pipeline_ranks * choice.chunks > self.model.n_boundaries:
            raise InputError(
                f"{choice.pipeline_ranks} x {choice.chunks} chunks are more than {self.model.n_boundaries} MoE layers"
            )

    @property
    def depth(self) -> int:
        return self.choice.pipeline_ranks

    @property
    def replicas(self) -> int:
        """GPUs of one pipeline rank."""
        return self.cluster.gpus // self.choice.pipeline_ranks

    @property
    def sequences(self) -> int:
        """Of one step, over all GPUs."""
        return self.replicas * self.choice.micro_batch_size * self.choice.n_microbatches

    @property
    def is_dual(self) -> bool:
        return self.choice.system.startswith("dualpipe")

    @property
    def directions(self) -> int:
        """DualPipe proper has a second copy of the layers, in the other direction."""
        return 2 if self.is_dual and self.choice.pipeline_ranks > 1 else 1

    # Stages

    def boundaries_of_chunk(self, chunk: int) -> range:
        """Consecutive and as even as possible; the head is with the last."""
        n, chunks = self.model.n_boundaries, self.choice.pipeline_ranks * self.choice.chunks
        return range(chunk * n // chunks, (chunk + 1) * n // chunks)

    def rank_of_chunk(self, chunk: int, direction: int) -> int:
        rank = chunk % self.choice.pipeline_ranks
        return self.choice.pipeline_ranks - 1 - rank if direction else rank

    @property
    def width(self) -> int:
        """Stage numbers a boundary: attention, and a part of the experts each."""
        return 1 + self.choice.parts

    def stages_of_chunk(self, chunk: int, direction: int) -> list[int]:
        offset = direction * (self.model.n_boundaries * self.width + 1)
        boundaries = self.boundaries_of_chunk(chunk)
        stages = [offset + b * self.width + k for b in boundaries for k in range(self.width)]
        if boundaries.stop == self.model.n_boundaries:
            stages.append(offset + self.model.n_boundaries * self.width)
        return stages

    def boundary_of(self, stage: int) -> tuple[int, int]:
        """(boundary, 0 for attention or the number of the experts' part)."""
        return divmod(stage % (self.model.n_boundaries * self.width + 1), self.width)

    # Schedule

    def schedule(self) -> Schedule:
        """The pipeline's list of chunks, each chunk as the stages in it."""
        choice = self.choice
        p, n = choice.pipeline_ranks, choice.n_microbatches
        if self.is_dual:
            chunked = dualpipe(p, n) if p > 1 else _beside(n)
        else:
            chunked = interleaved_1f1b(p, choice.chunks, n)
        actions: dict[Group, tuple[Action, ...]] = {
            rank: tuple(a for action in listed for a in self._expanded(action))
            for rank, listed in chunked.actions.items()
        }
        return Schedule(choice.system, lowered=False, actions=actions)

    def _expanded(self, action: Action) -> Iterator[Action]:
        """A chunk's forward as its stages in order, its backward in reverse; a pair in turn, each to hide the other's
        messages.
        """
        if not action.parts:
            yield from self._stages_of(action)
            return
        first, second = (list(self._stages_of(part)) for part in action.parts)
        for k in range(max(len(first), len(second))):
            yield from second[k : k + 1]
            yield from first[k : k + 1]

    def _stages_of(self, action: Action) -> Iterator[Action]:
        p = self.choice.pipeline_ranks
        direction, chunk = (action.stage // p, action.stage % p) if self.is_dual else (0, action.stage)
        stages = self.stages_of_chunk(chunk, direction)
        if action.kind is not ActionKind.FORWARD:
            stages.reverse()
        for stage in stages:
            yield Action(action.kind, stage, action.microbatch)

    def transfers(self) -> tuple[Transfer, ...]:
        """dispatch.b.k to each part of the experts and combine.b.k from it, and their gradients."""
        transfers: list[Transfer] = []
        for direction in range(self.directions):
            offset = direction * (self.model.n_boundaries * self.width + 1)
            for b in range(self.model.n_boundaries):
                attention = offset + b * self.width
                for k in range(1, self.width):
                    mark = f"{b}" + (f".{k - 1}" if self.width > 2 else "") + (".r" if direction else "")
                    transfers += _pair("dispatch", mark, attention, attention + k)
                    transfers += _pair("combine", mark, attention + k, attention + self.width)
        return tuple(transfers)

    def program(self) -> Program:
        transfers = self.transfers()
        lowered = lower_lists(self.schedule(), transfers, release_sends=False)
        launch = 0.0 if self.choice.system == "comet" else self.assumptions.launch_s
        return Program(
            schedule=lowered,
            transfers=transfers,
            seconds=self.action_seconds(launch),
            messages={t.name: self.legs(t) for t in transfers},
            links=self.links(),
            latency=0.0 if self.choice.system == "comet" else self.assumptions.message_latency_s,
        )

    # Compute

    def stage_seconds(self, stage: int) -> StageSeconds:
        choice, model, speed = self.choice, self.model, Speed(self.cluster)
        boundary, part = self.boundary_of(stage)
        size, recompute = choice.micro_batch_size, choice.recompute
        if part:
            is_fused = choice.system == "comet"
            parts = 1 if is_fused else choice.parts
            whole = speed.expert_seconds(
                model, boundary, size * choice.ep_size / parts, choice.ep_size, recompute=recompute
            )
            scale = 1 / choice.parts if is_fused else 1.0
            return StageSeconds(whole.forward * scale, whole.backward * scale, whole.weight * scale)
        if boundary == model.n_boundaries:
            return speed.seconds(model.head, size, recompute=recompute)
        attention = speed.seconds(model.attention[boundary], size, recompute=recompute)
        return attention + speed.seconds(model.shared[boundary], size, recompute=recompute)

    def action_seconds(self, launch: float) -> dict[tuple[ActionKind, int], float]:
        return {
            (kind, stage): seconds + launch
            for stage in range(self.directions * (self.model.n_boundaries * self.width + 1))
            for kind, seconds in self.stage_seconds(stage).by_kind().items()
        }

    # Communication, of one GPU

    def links(self) -> dict[Link, float]:
        speed, found = Speed(self.cluster), {}
        for rank in range(self.choice.pipeline_ranks):
            for way in ("out", "in"):
                found[_link(rank, f"nic {way}")] = speed.nic
                found[_link(rank, f"link {way}")] = speed.link
        return found

    def legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        """An all-to-all sends and receives as much on every GPU; a combine to another rank takes the residual along."""
        first, last = sorted((transfer.src, transfer.dst))
        rank, other = self.rank_of_stage(first), self.rank_of_stage(last)
        nic, link = self.exchange()
        legs = [
            Leg(amount / self.choice.parts, (_link(rank, f"{what} out"), _link(rank, f"{what} in")))
            for what, amount in (("nic", nic), ("link", link))
            if amount
        ]
        if rank != other:
            src, dst = (rank, other) if transfer.direction is Direction.FORWARD else (other, rank)
            hop = self.choice.micro_batch_size * self.model.seq_length * self.model.residual_bytes_per_token
            legs.append(Leg(hop / self.choice.parts, (_link(src, "nic out"), _link(dst, "nic in"))))
        return tuple(legs)

    def rank_of_stage(self, stage: int) -> int:
        boundary, _ = self.boundary_of(stage)
        direction = stage // (self.model.n_boundaries * self.width + 1)
        chunks = self.choice.pipeline_ranks * self.choice.chunks
        boundary = min(boundary, self.model.n_boundaries - 1)
        chunk = next(c for c in range(chunks) if boundary in self.boundaries_of_chunk(c))
        return self.rank_of_chunk(chunk, direction)

    def exchange(self) -> tuple[float, float]:
        """Bytes a GPU sends through its NIC and to its node's others in one all-to-all of a micro-batch.

        A token's copies are spread evenly over the group's ranks; those for the own rank do not move. With de-duplication by node
        one row goes to each other node, and from the rank that gets it to the others there that need it.
        """
        size, per_node = self.choice.ep_size, min(self.cluster.gpus_per_node, self.choice.ep_size)
        model, nodes = self.model, -(-size // per_node)
        ranks = expected_copies(model.num_experts, model.top_k, size)
        copies = float(model.top_k) if self.choice.dedup is Dedup.NONE else ranks
        away, near = copies * (size - per_node) / size, copies * (per_node - 1) / size
        if self.choice.dedup is Dedup.NODE and nodes > 1:
            away = expected_copies(model.num_experts, model.top_k, nodes) * (nodes - 1) / nodes
            near = max(ranks * (size - 1) / size - away, 0.0)
        row = model.token_bytes * model.seq_length * self.choice.micro_batch_size
        return away * row, near * row

    # Memory of one GPU

    def parameters(self) -> tuple[float, float]:
        """Elements of dense and of expert parameters on the GPU that has most."""
        dense = expert = 0.0
        model, choice = self.model, self.choice
        for rank in range(choice.pipeline_ranks):
            own_dense = own_expert = 0.0
            for direction in range(self.directions):
                for chunk in range(choice.pipeline_ranks * choice.chunks):
                    if self.rank_of_chunk(chunk, direction) == rank:
                        stages = self.boundaries_of_chunk(chunk)
                        own_dense += sum(
                            model.attention[b].parameters + model.shared[b].parameters for b in stages
                        )
                        own_expert += sum(model.experts[b].parameters for b in stages)
                        if stages.stop == model.n_boundaries:
                            own_dense += model.head.parameters
            dense, expert = max(dense, own_dense), max(expert, own_expert)
        return dense, expert / effective_ranks(model.num_experts, choice.ep_size)

    def activation_bytes(self) -> dict[int, float]:
        """Per stage and micro-batch what the forward keeps on one GPU."""
        choice, model = self.choice, self.model
        kept: dict[int, float] = {}
        field_name = "activation_bytes_recompute" if choice.recompute else "activation_bytes"
        imbalance = choice.ep_size / effective_ranks(model.num_experts, choice.ep_size)
        for stage in range(self.directions * (model.n_boundaries * self.width + 1)):
            boundary, part = self.boundary_of(stage)
            if part:
                held = getattr(model.experts[boundary], field_name) * imbalance / choice.parts
            elif boundary == model.n_boundaries:
                held = getattr(model.head, field_name)
            else:
                held = getattr(model.attention[boundary], field_name) + getattr(
                    model.shared[boundary], field_name
                )
            kept[stage] = choice.micro_batch_size * held
        return kept

    def gradient_seconds(self) -> float:
        """All-reduce of dense gradients over the replicas, and of experts over their copies, beside nothing."""
        dense, expert = self.parameters()
        copies = self.replicas // self.choice.ep_size * self.directions
        amount = (
            2
            * GRADIENT_BYTES
            * (dense * (self.replicas - 1) / self.replicas + expert * (copies - 1) / copies)
        )
        return amount / Speed(self.cluster).nic


def _pair(kind: str, mark: str, src: int, dst: int) -> Sequence[Transfer]:
    """A transfer and its gradient's."""
    name = f"{kind}.{mark}"
    return (
        Transfer(name, TransferKind.P2P, Direction.FORWARD, src, dst, (), Splits.STATIC),
        Transfer(
            f"{kind}_bwd.{mark}", TransferKind.P2P, Direction.BACKWARD, dst, src, (), Splits.STATIC, name
        ),
    )


def _beside(n_microbatches: int) -> Schedule:
    """One rank: the forward of the next micro-batch beside the backward of this one."""

    def forward(i: int) -> Action:
        return Action(ActionKind.FORWARD, 0, i)

    def backward(i: int) -> Action:
        return Action(ActionKind.BACKWARD, 0, i)

    pairs = [overlap(forward(i + 1), backward(i)) for i in range(n_microbatches - 1)]
    actions = (forward(0), *pairs, backward(n_microbatches - 1))
    return Schedule("beside", lowered=False, actions={pipeline_rank(0): actions})


def _link(rank: int, what: str) -> Link:
    return (f"rank.{rank}", what)
