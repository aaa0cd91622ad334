"""Optimizers, schedulers and averages of training scripts, each in lockstep with eager (see `training_scripts.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from lockstep import Lockstep
from tiny_training import Errors, MakeOptimizer, Options, adamw, make_batch, sgd, tiny
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from disagmoe_compile.errors import DisagMoEError, InputError
from disagmoe_compile.runtime.full_state import full_state_dict


def in_two_groups(model: nn.Module) -> optim.Optimizer:
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    return adamw(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    )


def of_all(kind: Callable[..., optim.Optimizer], **kwargs: float | bool) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), **kwargs)


# A large eps keeps them from turning gradients near zero, whose sign is rounding, into full steps.
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "SGD with momentum": of_all(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW, a loop": of_all(adamw, foreach=False),
    "AdamW, foreach": of_all(adamw, foreach=True),
    "AdamW, fused": of_all(adamw, fused=True),
    "parameter groups": in_two_groups,
    "NAdam": of_all(optim.NAdam, lr=1e-2, eps=1e-3),
    "RAdam": of_all(optim.RAdam, lr=1e-2, eps=1e-3),
    "Adamax": of_all(optim.Adamax, lr=1e-2, eps=1e-3),
    "Adagrad": of_all(optim.Adagrad, lr=1e-2, eps=1e-3),
    "RMSprop": of_all(optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9),
    "Adadelta": of_all(optim.Adadelta, lr=1.0, eps=1e-3),
    "ASGD": of_all(optim.ASGD, lr=0.1),
}
SCHEDULERS: tuple[Callable[[optim.Optimizer], lr_scheduler.LRScheduler], ...] = (
    partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
)


def optimizers_and_schedulers(options: Options) -> Errors:
    both = Lockstep(tiny, sgd, options)
    both.train("first call", **make_batch(0))
    for turn, (name, make) in enumerate(OPTIMIZERS.items()):
        both.optimizer, both.twin_optimizer = make(both.model), make(both.twin)
        _train_scheduled(both, name, SCHEDULERS[turn % len(SCHEDULERS)])
    both.optimizer, both.twin_optimizer = adamw(both.model.parameters()), adamw(both.twin.parameters())
    _train_scheduled(both, "OneCycleLR", partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=3))
    return both.errors


def _train_scheduled(
    both: Lockstep, name: str, schedule: Callable[[optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    schedulers = [schedule(optimizer) for optimizer in (both.optimizer, both.twin_optimizer)]
    for step in range(3):
        both.train(name, **make_batch(step))
        for scheduler in schedulers:
            scheduler.step()
    both.compare_parameters(name)


class Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for one in self._optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self._optimizers:
            one.zero_grad()


def _is_expert(name: str) -> bool:
    return "moe.w" in name or "moe.b" in name


def _one_a_side(model: nn.Module) -> Several:
    """No rank holds parameters of both."""
    named = list(model.named_parameters())
    return Several(
        adamw([p for n, p in named if not _is_expert(n)]),
        optim.SGD([p for n, p in named if _is_expert(n)], lr=0.1, momentum=0.9),
    )


def _muon_and_others(model: nn.Module) -> Several:
    """As Muon is meant: matrices of hidden layers."""
    named = list(model.named_parameters())
    hidden = {n for n, p in named if p.ndim == 2 and n.startswith("blocks") and not _is_expert(n)}
    return Several(
        optim.Muon([p for n, p in named if n in hidden], lr=1e-3),
        adamw([p for n, p in named if n not in hidden]),
    )


def several_optimizers(options: Options) -> Errors:
    errors: dict[str, float] = {}
    for name, make in (("one a side", _one_a_side), ("Muon", _muon_and_others)):
        both = Lockstep(tiny, make, options)  # type: ignore[arg-type]
        for step in range(3):
            both.train(name, **make_batch(step))
        both.compare_parameters(name)
        errors.update(both.errors)
    return errors


def muon_on_what_is_split(options: Options) -> Errors:
    """It makes a matrix orthogonal as a whole: biases of experts, one row each, are one."""

    def of_matrices(model: nn.Module) -> optim.Optimizer:
        return optim.Muon([p for n, p in model.named_parameters() if p.ndim == 2 and "moe.b" in n], lr=1e-3)

    both = Lockstep(tiny, of_matrices, options)
    if options["ffn_group_size"] == 1:
        both.train("whole", **make_batch(0))
        return both.errors
    loss, twin = (call(**make_batch(0)).loss for call, _ in both.sides)
    loss.backward()
    both.note("loss", loss, twin)
    with pytest.raises(
        DisagMoEError, match=r"Muon works with a parameter as a whole, and .*moe\.b.* is split"
    ):
        both.optimizer.step()
    return both.errors


def averaged_weights(options: Options) -> Errors:
    """An exponential average of the weights, made after the first call; one made before is told so."""
    both = Lockstep(tiny, sgd, options)
    averaged = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    too_early = averaged(both.model)
    both.train("first call", **make_batch(0))
    with pytest.raises(
        InputError, match=r"the AveragedModel has the whole of .*: make it after the first call"
    ):
        too_early.update_parameters(both.model)
    ours, theirs = averaged(both.model), averaged(both.twin)
    for step in range(3):
        both.train("averaged", **make_batch(step))
        ours.update_parameters(both.model)
        theirs.update_parameters(both.twin)
    state = full_state_dict(ours.module)
    for name, value in state.items():
        both.note("average", value, theirs.module.state_dict()[name])
    assert bool(state) == (torch.distributed.get_rank() == 0)
    with pytest.raises(InputError, match="is a copy of a model that is spread over ranks"):
        torch.compile(ours, backend="disagmoe", options=dict(options))(**make_batch(0))
    both.train("after", **make_batch(3))
    return both.errors


def weights_written_in_place(options: Options) -> Errors:
    both = Lockstep(tiny, sgd, options)
    both.train("before", **make_batch(0))
    with torch.no_grad():
        for _, model in both.sides:
            for parameter in model.parameters():
                parameter.mul_(0.9).sub_(0.01 * parameter.sign())
    both.train("after", **make_batch(1))
    both.compare_parameters("after")
    return both.errors
