"""Binding: each rank keeps the parameters it owns, on the very Parameter objects that the script's optimizer
holds.

Rank 0's values go to the owners, as in DDP, or each owner reads its own (`pending.py`). `p.data` becomes this rank's part in
storage of its own, or an empty tensor. The optimizer built before the first call therefore updates exactly the part, with state
of the part's size.

`HOLDERS` maps every bound Parameter of the process to what is known of it: optimizers and gradient clipping
meet Parameters without their model, so this is the one place where the process remembers them. Entries die
with their Parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from disagmoe_compile.errors import DisagMoEError, InputError, UnsupportedModelError
from disagmoe_compile.runtime.agreement import agree
from disagmoe_compile.runtime.history import BackwardHistory
from disagmoe_compile.runtime.hollow import hollow_like
from disagmoe_compile.runtime.pending import give, pending_of, values_for
from disagmoe_compile.runtime.placement import ParameterPlacement

_SAME_ORIGIN = "every rank must call load_safetensors with the same files, or init_weights in the same state of torch's generator"
_TAG = 1  # messages of a binding; nothing else runs on the control group's p2p meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class BoundParameter:
    """A bound Parameter as it must stay. `hollow` has the global shape and no storage: never read it.

    `fqns`: all names of the same Parameter in the graph; the first is its name in messages. The Parameter
    itself is held weakly, because `HOLDERS` keeps this record alive for as long as the Parameter lives.
    """

    reference: weakref.ref[nn.Parameter]
    fqns: tuple[str, ...]
    placement: ParameterPlacement
    rank: int
    hollow: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.reference()
        if parameter is None:
            raise DisagMoEError(
                f"parameter {self.fqn} is gone: keep the model alive while its compiled form is used"
            )
        return parameter

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def is_owned(self) -> bool:
        return self.rank in self.placement.ranges

    @property
    def is_resharded(self) -> bool:
        """Whether this rank's part differs from the whole."""
        return self.local_shape != self.placement.global_shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.placement.shape_on(self.rank)

    def check(self, current: torch.Tensor) -> None:
        """Raises DisagMoEError if `current`, the parameter of this call, is not what was bound."""
        bound = self.reference()
        if bound is None or bound is not current:
            raise self._changed(
                "was replaced by another Parameter", "assign to its .data or use load_state_dict"
            )
        if tuple(current.shape) != self.local_shape:
            why = f"has shape {tuple(current.shape)} where this rank's part is {self.local_shape}"
            raise self._changed(why, "load with model.load_state_dict, which cuts out each rank's part")
        if current.dtype != self.dtype or current.device != self.device:
            why = f"is {current.dtype} on {current.device} and was {self.dtype} on {self.device}"
            raise self._changed(why, "convert or move the model before its first call")
        if current.requires_grad != self.requires_grad:
            why = f"has requires_grad={current.requires_grad} and had {self.requires_grad}"
            raise self._changed(why, "freeze or unfreeze parameters before the first call")

    def _changed(self, what: str, then: str) -> DisagMoEError:
        return DisagMoEError(f"parameter {self.fqn} changed after its ranks were bound: it {what}; {then}")


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """`group` is the control group of all ranks of the model: messages on CPU tensors. `history`: of the model."""

    bound: BoundParameter
    group: dist.ProcessGroup
    history: BackwardHistory = field(default_factory=BackwardHistory)


HOLDERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # nn.Parameter -> Holder


def holder_of(parameter: torch.Tensor) -> Holder | None:
    """What is known of a Parameter; None if no call has bound it."""
    holder: Holder | None = HOLDERS.get(parameter)
    return holder


@dataclass(slots=True, eq=False)
class Binding:
    """All bound parameters of one model on this rank. `extend` adds those that only a later graph of the
    model uses.
    """

    rank: int
    group: dist.ProcessGroup
    payload_group: dist.ProcessGroup
    history: BackwardHistory = field(default_factory=BackwardHistory)
    _by_fqn: dict[str, BoundParameter] = field(default_factory=dict)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._by_fqn

    def __getitem__(self, fqn: str) -> BoundParameter:
        return self._by_fqn[fqn]

    @property
    def bound(self) -> tuple[BoundParameter, ...]:
        """Each Parameter once, in the order of binding, which is the same on all ranks."""
        return tuple({id(b): b for b in self._by_fqn.values()}.values())

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """Name -> Parameter of what this rank holds a part of, under every name."""
        return {fqn: b.parameter for fqn, b in self._by_fqn.items() if b.is_owned}

    @property
    def local_bytes(self) -> int:
        """Bytes of parameters on this rank."""
        return sum(b.parameter.untyped_storage().nbytes() for b in self.bound if b.is_owned)

    def check(self, current: Mapping[str, torch.Tensor]) -> None:
        """`current`: the parameters that this call reads, by name. Raises DisagMoEError naming what changed."""
        for fqn, tensor in current.items():
            if fqn in self._by_fqn:
                self._by_fqn[fqn].check(tensor)

    def extend(
        self, parameters: Mapping[str, nn.Parameter], placements: Mapping[str, ParameterPlacement]
    ) -> tuple[BoundParameter, ...]:
        """Binds what is not bound yet, collectively; returns the new ones.

        Raises DisagMoEError where a parameter is bound already and the new placement differs, InputError for
        a gradient of before the first call. Parameters without a placement are left alone.
        """
        todo = _by_parameter(parameters, placements)
        fresh: list[tuple[nn.Parameter, tuple[str, ...], ParameterPlacement]] = []
        for parameter, fqns, placement in todo:
            holder = holder_of(parameter)
            if holder is None:
                _check_unbound(parameter, fqns[0], placement)
                fresh.append((parameter, fqns, placement))
                continue
            bound = holder.bound
            if bound.placement.ranges != placement.ranges:
                raise DisagMoEError(
                    f"parameter {fqns[0]} is on ranks {list(bound.placement.ranges)} since the first call, but the plan of this "
                    f"call wants it on {list(placement.ranges)}: use one plan for all calls of a model"
                )
            self._by_fqn.update(dict.fromkeys(fqns, bound))
        withheld = self._read_withheld(fresh)
        return tuple(self._bind(*one, withheld.get(id(one[0]))) for one in fresh)

    def _read_withheld(
        self, fresh: Sequence[tuple[nn.Parameter, tuple[str, ...], ParameterPlacement]]
    ) -> dict[int, torch.Tensor]:
        """id of the Parameter -> this rank's part, where every rank gets its own from somewhere else than rank 0."""
        if not fresh:
            return {}
        origins = [one.values.identity if (one := pending_of(p)) else "rank 0" for p, _, _ in fresh]
        compared = {"where parameters get their first values": "\n".join(origins)}
        agree("the binding of a model", compared, self.group, _SAME_ORIGIN)
        waiting = [(p, placement) for p, _, placement in fresh if pending_of(p)]
        owned = [(p, at.ranges[self.rank]) for p, at in waiting if self.rank in at.ranges]
        nothing = {
            id(p): p.new_empty(at.shape_on(self.rank)) for p, at in waiting if self.rank not in at.ranges
        }
        return {**nothing, **values_for(owned)}

    def _bind(
        self,
        parameter: nn.Parameter,
        fqns: tuple[str, ...],
        placement: ParameterPlacement,
        part: torch.Tensor | None,
    ) -> BoundParameter:
        """`part`: this rank's values; None where rank 0 has them."""
        bound = BoundParameter(
            reference=weakref.ref(parameter),
            fqns=fqns,
            placement=placement,
            rank=self.rank,
            hollow=hollow_like(parameter),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=parameter.requires_grad,
        )
        if part is None:
            part = _distribute(parameter.data, placement, self.rank, self.payload_group)
        give(parameter, part)
        HOLDERS[parameter] = Holder(bound, self.group, self.history)
        self._by_fqn.update(dict.fromkeys(fqns, bound))
        return bound


def bind(
    parameters: Mapping[str, nn.Parameter],
    placements: Mapping[str, ParameterPlacement],
    rank: int,
    group: dist.ProcessGroup,
    payload_group: dist.ProcessGroup | None = None,
) -> Binding:
    """Collective over all ranks; see Binding.extend for errors.

    `group`: control messages, on CPU tensors. `payload_group`: carries the parameters on their device;
    `group` if not given.
    """
    binding = Binding(rank, group, group if payload_group is None else payload_group)
    binding.extend(parameters, placements)
    return binding


def _by_parameter(
    parameters: Mapping[str, nn.Parameter], placements: Mapping[str, ParameterPlacement]
) -> list[tuple[nn.Parameter, tuple[str, ...], ParameterPlacement]]:
    """One entry per Parameter object, in the order of `placements`: tied names share one."""
    names: dict[int, list[str]] = {}
    for fqn in placements:
        names.setdefault(id(parameters[fqn]), []).append(fqn)
    todo = []
    for fqns in names.values():
        first = placements[fqns[0]]
        for fqn in fqns[1:]:
            if placements[fqn].ranges != first.ranges:
                raise UnsupportedModelError(
                    f"{first.fqn} and {fqn} are one tied parameter, but the plan puts them on ranks {list(first.ranges)} "
                    f"and {list(placements[fqn].ranges)}: set pipeline_groups=1"
                )
        todo.append((parameters[fqns[0]], tuple(fqns), first))
    return todo


def _check_unbound(parameter: nn.Parameter, fqn: str, placement: ParameterPlacement) -> None:
    if tuple(parameter.shape) != placement.global_shape:
        raise DisagMoEError(
            f"parameter {fqn} has shape {tuple(parameter.shape)}, but the plan was made for {placement.global_shape}: plan again"
        )
    if parameter.grad is not None:
        raise InputError(
            f"parameter {fqn} has a gradient from before the first compiled call, which this rank alone computed: "
            "call optimizer.zero_grad() first"
        )


def _distribute(
    whole: torch.Tensor, placement: ParameterPlacement, rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rank 0 sends every owner its part and no more; memory: one parameter at a time, and no copy of it on
    rank 0.
    """
    if rank == 0:
        parts = {owner: part_of(whole, placement, owner) for owner in placement.ranges if owner != 0}
        payloads = {owner: as_bytes(part) for owner, part in parts.items()}
        _wait(dist.isend(payload, owner, group=group, tag=_TAG) for owner, payload in payloads.items())
    if rank not in placement.ranges:
        return whole.new_empty(placement.shape_on(rank))
    mine = part_of(whole, placement, rank)
    if rank == 0:
        return mine.clone() if placement.is_sharded else whole
    target = torch.empty_like(mine)
    landing = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
    _wait([dist.irecv(as_bytes(landing), 0, group=group, tag=_TAG)])
    return landing if target.is_contiguous() else target.copy_(landing)


def part_of(whole: torch.Tensor, placement: ParameterPlacement, rank: int) -> torch.Tensor:
    rows = placement.ranges[rank]
    return whole if rows is None else whole[rows[0] : rows[1]]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes travel the same for every dtype; gloo knows only some."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in list(works):
        if work is not None:
            work.wait()
