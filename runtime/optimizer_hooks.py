"""What every `optimizer.step()` of the process passes through first, while a compiled model is spread over
several ranks.

1. A step after torch.compile(backend="disagmoe") but before the first call raises: each rank would train a
model of its own. 2. State of global shape is cut to this rank's part (optimizer_state.py). 3. All ranks
compare which parameters the optimizer holds, which backwards ran and by which factor its gradients were scaled since; a
   difference raises, because a factor that comes from a rank's own gradients is not the model's.

Only optimizers that hold bound parameters take part; all ranks must step them in the same order, as one
script does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
import torch.optim.optimizer as optim
from torch import nn

from disagmoe_compile.errors import DisagMoEError, DivergenceError
from disagmoe_compile.runtime.agreement import gather_numbers
from disagmoe_compile.runtime.binding import Binding, Holder, holder_of
from disagmoe_compile.runtime.gradient_scale import GradientScale
from disagmoe_compile.runtime.history import SAME_BACKWARDS
from disagmoe_compile.runtime.optimizer_state import slice_optimizer_state

_DIGEST_BITS = 48  # exact in a float64


class OptimizerGuard:
    """One per process. `expect_first_call` at torch.compile, `watch` after each binding."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._awaits_first_call = False
        self._scale = GradientScale()
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._on_first_step: list[WeakMethod[Callable[[torch.optim.Optimizer], None]]] = []

    def expect_first_call(self, n_ranks: int) -> None:
        """From now on, until something is bound, a step of any optimizer raises if there are several ranks."""
        if n_ranks > 1:
            self._awaits_first_call = True
            self._install()

    def watch(
        self, binding: Binding, on_first_step: Callable[[torch.optim.Optimizer], None] | None = None
    ) -> None:
        """`on_first_step`, a method, meets each optimizer that holds bound parameters once, before its first step, for as long as
        its object lives: the guard must not keep a dropped model's process groups.
        """
        self._on_first_step = [meet for meet in self._on_first_step if meet() is not None]
        if on_first_step is not None:
            self._on_first_step.append(WeakMethod(on_first_step))
        self._awaits_first_call = False
        self._install()
        self._scale.watch(binding.owned.values())

    def remove(self) -> None:
        """Optimizers step as if there were no guard."""
        self._awaits_first_call = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _install(self) -> None:
        if self._handle is None or self._handle.id not in optim._global_optimizer_pre_hooks:
            self._handle = optim.register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        held = [(p, holder) for p in everything if (holder := holder_of(p)) is not None]
        if not held:
            if self._awaits_first_call:
                raise DisagMoEError(
                    "optimizer.step() before the first call of the compiled model: each rank would train a whole model of its "
                    "own; call the compiled model first, and if it was called, torch.compile(model, fullgraph=True) says why it "
                    "made no graph of it"
                )
            return
        check_works_on_parts(optimizer, [holder for _, holder in held])
        slice_optimizer_state(optimizer)
        parameters = [p for p, _ in held]
        scale, tolerance = self._scale.measure(parameters)
        compare_steps(held, scale, tolerance)
        self._scale.forget(parameters)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._scale.watch(parameters)
            for method in self._on_first_step:
                if (meet := method()) is not None:
                    meet(optimizer)


def check_works_on_parts(optimizer: torch.optim.Optimizer, holders: Sequence[Holder]) -> None:
    """Raises DisagMoEError for optimizers of torch whose step of a part is not the part of the whole's step."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise DisagMoEError(
            f"{name} works with sums over all parameters, which are spread over ranks: use an optimizer that works element by "
            "element"
        )
    split = [holder.bound.fqn for holder in holders if holder.bound.placement.is_split]
    if split and isinstance(optimizer, torch.optim.Adafactor | torch.optim.Muon):
        raise DisagMoEError(
            f"{name} works with a parameter as a whole, and {split[0]} is split over ranks by expert: use an optimizer that "
            "works element by element for such parameters, or ffn_group_size=1"
        )


def _as_number(data: bytes) -> float:
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BITS // 8).digest()
    return float(int.from_bytes(digest, "little"))


def _same_on_all(of_rank: torch.Tensor, message: str) -> None:
    different = [rank for rank, value in enumerate(of_rank.tolist()) if value != of_rank[0].item()]
    if different:
        raise DivergenceError("optimizer.step(): " + message.format(different[0]))


def compare_steps(held: Sequence[tuple[nn.Parameter, Holder]], scale: float | None, tolerance: float) -> None:
    """Collective over the control group. Raises DivergenceError on all ranks.

    `scale` None takes part without an opinion. The tolerance of the coarsest gradients of any rank counts.
    """
    names = ",".join(sorted(holder.bound.fqn for _, holder in held)).encode()
    backwards = b"".join({id(h.history): h.history.digest for _, h in held}.values())
    mine = (math.nan if scale is None else scale, tolerance, _as_number(names), _as_number(backwards))
    numbers = gather_numbers("optimizer.step()", mine, held[0][1].group)
    _same_on_all(
        numbers[:, 2],
        "the optimizer of rank {} holds other parameters of the model than rank 0's; build the same optimizer on every rank",
    )
    _same_on_all(
        numbers[:, 3],
        "rank {} differs from rank 0 in " + SAME_BACKWARDS + "; every rank must run the same ones",
    )
    scales = {rank: value for rank, value in enumerate(numbers[:, 0].tolist()) if not math.isnan(value)}
    if not scales:
        return
    low, high = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    span = scales[high] - scales[low]
    if span > numbers[:, 1].max().item() * max(abs(scales[high]), abs(scales[low])):
        raise DivergenceError(
            f"gradients were scaled by {scales[low]:.4g} on rank {low} and by {scales[high]:.4g} on rank {high} since backward: "
            "a factor that depends on gradients must come from all of them; to clip, use disagmoe_compile.clip_grad_norm_"
        )
