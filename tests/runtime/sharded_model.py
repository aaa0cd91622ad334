"""A small model and a stand-in backend: what binding, guards and re-trace need of a model that is split,
without the pipeline.

Attention-like parameters are whole on the attention ranks, `experts` is split by row over the FFN ranks. The
backend gathers all parts to run the graph, which no real run does, and hands each rank the gradient of its
part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from disagmoe_compile.plan.topology import Group, Role, Topology
from disagmoe_compile.runtime.binding import Binding, bind
from disagmoe_compile.runtime.placement import ParameterPlacement
from disagmoe_compile.runtime.process_group import PipelineGroups
from disagmoe_compile.runtime.retrace import (
    drop_parameter_guards,
    present_global_shapes,
    require_global_shapes,
)

DIM = 8


class Model(nn.Module):
    """`n_experts` stacked experts over the same input; the loss is a mean, so the batch may have any size."""

    def __init__(self, n_experts: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(n_experts, DIM, DIM) * 0.3)
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.dropout = nn.Dropout(0.0)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        hidden_BD = self.dropout(self.embed(x_BD)).tanh()
        hidden_BD = hidden_BD + torch.einsum("bd,edf->bf", hidden_BD, self.experts)
        return self.head(hidden_BD).pow(2).mean()


def topology(attention: int, ffn: int, pipeline_groups: int = 1) -> Topology:
    return Topology(attention, ffn, pipeline_groups, pipeline_groups, n_boundaries=max(1, pipeline_groups))


def make_model(seed: int = 0, **how: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**how)


def place(model: nn.Module, where: Topology) -> dict[str, ParameterPlacement]:
    attention, ffn = Group(Role.ATTENTION, 0), Group(Role.FFN, 0)
    found = {}
    for fqn, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if fqn == "experts":
            owned = [where.experts_of(shape[0], i) for i in range(where.ffn_group_size)]
            ranges = {
                rank: (rows.start, rows.stop)
                for rank, rows in zip(where.ranks_of_group(ffn), owned, strict=True)
            }
            found[fqn] = ParameterPlacement(fqn, shape, ffn, ranges)
        elif fqn != "unused":
            found[fqn] = ParameterPlacement(
                fqn, shape, attention, dict.fromkeys(where.ranks_of_group(attention))
            )
    return found


def batch(index: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, DIM, generator=torch.Generator().manual_seed(100 + index))


@dataclass(eq=False)
class GatheringBackend:
    """A torch.compile backend. `traced` lists the parameter shapes that each trace saw."""

    model: nn.Module
    topology: Topology
    on_bind: Callable[[Binding, PipelineGroups], None] | None = None
    fail_on_trace: int | None = None
    binding: Binding | None = None
    groups: PipelineGroups | None = None
    traced: list[dict[str, tuple[int, ...]]] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        present_global_shapes()
        names = dict(zip(map(id, self.model.parameters()), (n for n, _ in self.model.named_parameters())))
        placeholders = graph.graph.find_nodes(op="placeholder")
        fqns = [names.get(id(example)) for example in examples]
        shapes = {f: tuple(e.shape) for f, e in zip(fqns, examples) if f is not None}
        require_global_shapes([e for e, f in zip(examples, fqns) if f is not None])
        self.traced.append(shapes)
        if len(self.traced) - 1 == self.fail_on_trace:
            raise ValueError("this trace was told to fail")
        parameters = dict(self.model.named_parameters())
        placements = {f: p for f, p in place(self.model, self.topology).items() if f in shapes}
        if self.binding is None:
            self.groups = PipelineGroups.create(self.topology, 60.0)
            self.binding = bind(parameters, placements, dist.get_rank(), self.groups.world)
            if self.on_bind is not None:
                self.on_bind(self.binding, self.groups)
        else:
            self.binding.extend(parameters, placements)
        drop_parameter_guards([n._dynamo_source.name for n, f in zip(placeholders, fqns) if f is not None])
        return self._runner(graph, fqns)

    def _runner(self, graph: fx.GraphModule, fqns: list[str | None]) -> Callable[..., Any]:
        backend = self
        is_training = torch.is_grad_enabled()  # no_grad has a graph of its own

        class Run(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> torch.Tensor:
                wholes = [backend.gather(f, a) if f is not None else a for f, a in zip(fqns, args)]
                needed = [is_training and isinstance(a, torch.Tensor) and a.requires_grad for a in args]
                leaves = [
                    w.detach().requires_grad_(n) if isinstance(w, torch.Tensor) else w
                    for w, n in zip(wholes, needed)
                ]
                with torch.enable_grad():
                    loss = graph(*leaves)[0]
                gradients: list[torch.Tensor | None] = [None] * len(args)
                if any(needed):
                    gradients = list(torch.autograd.grad(loss, [x for x, n in zip(leaves, needed) if n]))
                    found = iter(gradients)
                    gradients = [backend.part(f, next(found)) if n else None for f, n in zip(fqns, needed)]
                ctx.gradients = gradients
                return loss.detach()

            @staticmethod
            def backward(ctx: Any, seed: torch.Tensor) -> Any:
                return tuple(None if g is None else g * seed for g in ctx.gradients)

        def run(*args: Any) -> Any:
            assert backend.binding is not None
            backend.binding.check({f: a for f, a in zip(fqns, args) if f is not None})
            return (Run.apply(*args),)

        return run

    def gather(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        assert self.binding is not None
        placement = self.binding[fqn].placement
        whole = torch.empty(placement.global_shape)
        for owner, rows in placement.ranges.items():
            if rows is None:
                source = next(iter(placement.ranges))
                if dist.get_rank() == source:
                    whole.copy_(local.detach())
                dist.broadcast(whole, source)
                break
            part = whole[rows[0] : rows[1]]
            if dist.get_rank() == owner:
                part.copy_(local.detach())
            dist.broadcast(part, owner)
        return whole

    def part(self, fqn: str | None, gradient: torch.Tensor) -> torch.Tensor | None:
        assert fqn is not None and self.binding is not None
        bound = self.binding[fqn]
        if not bound.is_owned:
            return None
        rows = bound.placement.ranges[bound.rank]
        return gradient if rows is None else gradient[rows[0] : rows[1]].contiguous()


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN counts as infinite."""
    error = ((got - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()
    return float("inf") if error != error else error


def worst_parameter_error(binding: Binding, reference: nn.Module) -> float:
    """Of this rank's parts against the whole parameters of `reference`."""
    wanted = dict(reference.named_parameters())
    errors = [0.0]
    for bound in binding.bound:
        if bound.is_owned:
            rows = bound.placement.ranges[bound.rank]
            whole = wanted[bound.fqn].detach()
            errors.append(
                relative_error(bound.parameter.detach(), whole if rows is None else whole[rows[0] : rows[1]])
            )
    return max(errors)
