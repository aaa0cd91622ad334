"""`state_dict()` of a model whose ranks hold parts: distributed tensors of the global shape, under unchanged
names.

Attention parameters are DTensors replicated over their group, expert parameters DTensors sharded over theirs;
on a rank outside the group a DTensor has no local part but still tells the global shape. Nothing is
communicated, because scripts often call `state_dict()` on rank 0 alone. torch.distributed.checkpoint saves,
loads and merges both kinds.

DTensor knows one way to split rows (torch.chunk's). Where the plan's differs (9 experts on 4 ranks: 3, 2, 2,
2, not 3, 3, 3, 0) the value is a ShardedTensor, which states every offset. A wrong DTensor would make a wrong
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime.binding import Binding, BoundParameter
from disagmoe_compile.runtime.model_hooks import Family, ModelHook, watch_calls
from disagmoe_compile.runtime.placement import ParameterPlacement
from disagmoe_compile.runtime.process_group import PipelineGroups


class PartElsewhere(DTensor):
    """On a rank outside the mesh. DTensor itself would make nothing of it in silence, and a checkpoint would lack the parameter.

    Everything that gathers a DTensor (`full_tensor`, torch's full state dicts) redistributes it.
    """

    __slots__ = ()

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        raise DisagMoEError(
            f"a parameter of shape {tuple(self.shape)} lives on ranks {self.device_mesh.mesh.tolist()} only and cannot be "
            "gathered here: call disagmoe_compile.full_state_dict(model) on all ranks for the whole model on rank 0, or save "
            "model.state_dict() with torch.distributed.checkpoint"
        )


class UnevenParts(ShardedTensor):
    """torch gathers a ShardedTensor as if every rank of the group had an equal chunk, which these are not, on all ranks together,
    of which some were refused above. It begins by asking for the number of elements.
    """

    __slots__ = ()

    def size(self, dim: int | None = None) -> Any:
        whole = _SizeOfUnevenParts(self.metadata().size)
        return whole if dim is None else whole[dim]


class _SizeOfUnevenParts(tuple[int, ...]):
    def numel(self) -> int:
        raise DisagMoEError(
            f"a parameter of shape {tuple(self)} is split unevenly over ranks, which torch does not gather: call "
            "disagmoe_compile.full_state_dict(model) on all ranks for the whole model on rank 0, or save model.state_dict() with "
            "torch.distributed.checkpoint"
        )


class StateDicts:
    """The global view of one model's bound parameters and of optimizer state laid out like them."""

    def __init__(self, module: nn.Module, binding: Binding, groups: PipelineGroups) -> None:
        self._binding, self._groups = binding, groups
        self._family = Family(module, binding)
        self._meshes: dict[tuple[tuple[int, ...], str], DeviceMesh] = {}

    def install(self, module: nn.Module) -> None:
        """Hooks `module`, the root that was compiled: its `state_dict()` becomes global, `load_state_dict()`
        takes global tensors (whole, DTensor or ShardedTensor) and keeps this rank's part. So do its copies.
        """
        module.register_state_dict_post_hook(ModelHook(self._after_state_dict))
        module.register_load_state_dict_pre_hook(ModelHook(self._before_load))
        watch_calls(module)

    def install_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its `state_dict()` becomes global; what it loads is cut to parts at the next step
        (optimizer_state.py).
        """
        optimizer.register_state_dict_post_hook(self._after_optimizer_state_dict)

    def to_global(self, local: torch.Tensor, bound: BoundParameter) -> torch.Tensor:
        """This rank's part -> the tensor of the global shape. Shares the storage."""
        placement, local = bound.placement, local.detach()
        if placement.is_sharded and not is_chunked(placement):
            return sharded_tensor(local, bound, self._groups.world)
        mesh = self._mesh(placement, local.device.type)
        where = Shard(0) if placement.is_sharded else Replicate()
        shape = torch.Size(placement.global_shape)
        value = DTensor.from_local(
            local, mesh, [where], run_check=False, shape=shape, stride=bound.hollow.stride()
        )
        if not bound.is_owned:
            value.__class__ = PartElsewhere
        return value

    def _mesh(self, placement: ParameterPlacement, device_type: str) -> DeviceMesh:
        """Of the parameter's owners. If they are not this rank's group, or a single rank, it describes and cannot
        communicate.
        """
        ranks = list(placement.ranges)
        key = tuple(ranks), device_type
        if key not in self._meshes:
            groups = self._groups
            if groups.members is not None and ranks == list(groups.topology.ranks_of_group(groups.group)):
                self._meshes[key] = DeviceMesh.from_group(groups.members, device_type, mesh=ranks)
            else:
                self._meshes[key] = DeviceMesh(device_type, ranks, _init_backend=False)
        return self._meshes[key]

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, bound in self._family.bound_of(module).items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor | ShardedTensor):
                state[prefix + name] = self.to_global(value, bound)

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, bound in self._family.bound_of(module).items():
            if prefix + name in state:
                state[prefix + name] = to_local(state[prefix + name], bound)

    def _after_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        known = {id(bound.reference()): bound for bound in self._binding.bound}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in state["param_groups"] for i in group["params"]]
        entries = dict(state["state"])
        for index, parameter in zip(indices, parameters, strict=True):
            bound = known.get(id(parameter))
            if bound is not None and index in entries:
                entries[index] = {
                    name: self.to_global(value, bound) if _is_like(value, bound) else value
                    for name, value in entries[index].items()
                }
        return {**state, "state": entries}


def is_chunked(placement: ParameterPlacement) -> bool:
    """Whether the shards are those of torch.chunk, the only rule of DTensor's Shard(0)."""
    size, n_rows = len(placement.ranges), placement.global_shape[0]
    step = -(-n_rows // size)
    expected = [(min(i * step, n_rows), min((i + 1) * step, n_rows)) for i in range(size)]
    return list(placement.ranges.values()) == expected


def sharded_tensor(local: torch.Tensor, bound: BoundParameter, group: dist.ProcessGroup) -> ShardedTensor:
    """Without communication; a rank that holds no rows has no local shard."""
    placement = bound.placement
    rest = list(placement.global_shape[1:])

    def metadata(rank: int, device: str) -> ShardMetadata:
        start, end = placement.ranges[rank] or (0, placement.global_shape[0])
        return ShardMetadata([start] + [0] * len(rest), [end - start, *rest], f"rank:{rank}/{device}")

    shards = [
        metadata(r, str(local.device) if r == bound.rank else local.device.type) for r in placement.ranges
    ]
    mine = [LocalShard(local, shards[list(placement.ranges).index(bound.rank)])] if bound.is_owned else []
    properties = TensorProperties(dtype=local.dtype, requires_grad=local.requires_grad)
    whole = ShardedTensorMetadata(shards, torch.Size(placement.global_shape), properties)
    made: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, whole, process_group=group
    )
    made.__class__ = UnevenParts
    return made


def to_local(value: Any, bound: BoundParameter) -> Any:
    """This rank's part of a global tensor. What is none is returned as it is, for torch to say what is wrong
    with it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not bound.is_owned:
        return torch.empty(bound.local_shape, dtype=bound.dtype, device=bound.device)
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return value.local_shards()[0].tensor
    rows = bound.placement.ranges[bound.rank]
    if rows is not None and tuple(value.shape) == bound.placement.global_shape:
        return value[rows[0] : rows[1]]
    return value


def _is_like(value: object, bound: BoundParameter) -> bool:
    """Whether an optimizer's state tensor is laid out like this rank's part."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor | ShardedTensor):
        return False
    return tuple(value.shape) == bound.local_shape and value.dim() > 0


def install(
    module: nn.Module, binding: Binding, groups: PipelineGroups
) -> Callable[[torch.optim.Optimizer], None]:
    """Hooks the model; returns what to give to `OptimizerGuard.watch(on_first_step=...)` for its optimizers."""
    views = StateDicts(module, binding, groups)
    views.install(module)
    return views.install_optimizer
