"""Steps of the script's optimizer: too early, with state of global shape, with gradients clipped by one rank's own norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import GatheringBackend, Model, batch, make_model, topology, worst_parameter_error

from disagmoe_compile.runtime.clip import clip_grad_norm_, norm_of_norms
from disagmoe_compile.runtime.gradient_scale import uniform_factor
from disagmoe_compile.runtime.nonfinite import spread_nonfinite
from disagmoe_compile.runtime.optimizer_hooks import OptimizerGuard
from disagmoe_compile.testing.pool import GlooPool


class Run:
    """A guarded compiled model and its eager twin; two attention ranks, the others FFN."""

    def __init__(self) -> None:
        self.guard = OptimizerGuard()
        self.model, self.reference = make_model(), make_model()
        where = topology(2, dist.get_world_size() - 2)
        self.backend = GatheringBackend(
            self.model, where, on_bind=lambda binding, _: self.guard.watch(binding)
        )
        self.compiled = torch.compile(self.model, backend=self.backend, fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.eager_optimizer = torch.optim.AdamW(self.reference.parameters(), lr=1e-2)

    def backward(self, index: int) -> None:
        self.compiled(batch(index)).backward()
        self.reference(batch(index)).backward()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.eager_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    @property
    def error(self) -> float:
        assert self.backend.binding is not None
        return worst_parameter_error(self.backend.binding, self.reference)


def clip_globally(norm_type: float, max_norm: float) -> tuple[float, float, float]:
    run = Run()
    norms = (0.0, 0.0)
    for i in range(2):
        run.backward(i)
        ours = clip_grad_norm_(run.model.parameters(), max_norm, norm_type)
        eager = torch.nn.utils.clip_grad_norm_(run.reference.parameters(), max_norm, norm_type)
        norms = (ours.item(), eager.item())
        run.step()
    return (*norms, run.error)


@pytest.mark.parametrize(
    ("norm_type", "max_norm"), [(2.0, 0.01), (1.0, 0.01), (float("inf"), 0.001), (2.0, 1e9)]
)
def test_clipping_by_the_global_norm_equals_eager(pool: GlooPool, norm_type: float, max_norm: float) -> None:
    for ours, eager, error in pool.run(clip_globally, norm_type, max_norm, world_size=4):
        assert ours == pytest.approx(eager, rel=1e-6)
        assert error < 1e-6


def clip_nonfinite() -> None:
    run = Run()
    run.backward(0)
    if dist.get_rank() == 3:
        run.model.experts.grad[0, 0, 0] = float("nan")  # type: ignore[index]
    clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)


def test_a_non_finite_gradient_of_one_rank_raises_on_all_when_clipping(pool: GlooPool) -> None:
    outcomes = pool.outcomes(clip_nonfinite, world_size=4)
    assert all(o.failure is not None and "is non-finite" in o.failure.message for o in outcomes)


def clip_locally(how: str) -> float:
    run = Run()
    for i in range(2):
        run.backward(i)
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        elif how == "value":
            for model in (run.model, run.reference):
                torch.nn.utils.clip_grad_value_([p for p in model.parameters() if p.numel()], 1e-4)
        elif how == "divide":
            for parameter in (*run.model.parameters(), *run.reference.parameters()):
                if parameter.grad is not None:
                    parameter.grad /= 3
        run.step()
    return run.error


def test_clipping_by_a_rank_s_own_norm_raises_on_every_rank(pool: GlooPool) -> None:
    for outcome in pool.outcomes(clip_locally, "norm", world_size=4):
        assert outcome.failure is not None and outcome.failure.kind == "DivergenceError"
        assert "use disagmoe_compile.clip_grad_norm_" in outcome.failure.message


@pytest.mark.parametrize("how", ["nothing", "value", "divide"])
def test_changes_that_are_right_on_parts_pass(pool: GlooPool, how: str) -> None:
    assert max(pool.run(clip_locally, how, world_size=4)) < 1e-5


def step_before_the_first_call(call_first: bool) -> None:
    run = Run()
    run.guard.expect_first_call(dist.get_world_size())
    if call_first:
        run.backward(0)
    run.optimizer.step()


def test_a_step_before_the_first_call_raises(pool: GlooPool) -> None:
    for outcome in pool.outcomes(step_before_the_first_call, False, world_size=3):
        assert outcome.failure is not None and "call the compiled model first" in outcome.failure.message
    pool.run(step_before_the_first_call, True, world_size=3)


def other_optimizer_on_one_rank() -> None:
    run = Run()
    run.backward(0)
    parameters = list(run.model.parameters())
    torch.optim.SGD(parameters if dist.get_rank() else parameters[1:], lr=0.1).step()


def test_optimizers_that_differ_between_ranks_raise_on_all(pool: GlooPool) -> None:
    for outcome in pool.outcomes(other_optimizer_on_one_rank, world_size=3):
        assert (
            outcome.failure is not None
            and "build the same optimizer on every rank" in outcome.failure.message
        )


def state_loaded_early(when: str) -> dict[str, Any]:
    """Moments of one eager step are loaded before the first call, or after it."""
    warm = make_model()
    warm_optimizer = torch.optim.AdamW(warm.parameters(), lr=1e-2)
    warm(batch(9)).backward()
    warm_optimizer.step()
    run = Run()
    if when == "after":
        run.backward(0)
        run.optimizer.zero_grad(), run.eager_optimizer.zero_grad()
    for optimizer in (run.optimizer, run.eager_optimizer):
        optimizer.load_state_dict(copy.deepcopy(warm_optimizer.state_dict()))
    for i in range(2):
        run.backward(i)
        run.step()
    elements = {
        n: run.optimizer.state[p]["exp_avg"].numel()
        for n, p in run.model.named_parameters()
        if p in run.optimizer.state
    }
    return {"error": run.error, "elements": elements}


@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizer_state_of_a_whole_model_is_cut_to_parts(pool: GlooPool, when: str) -> None:
    results = pool.run(state_loaded_early, when, world_size=4)
    assert max(r["error"] for r in results) < 1e-6
    assert results[0]["elements"] == {"embed.weight": 64, "embed.bias": 8, "head.weight": 64}
    assert results[3]["elements"] == {"experts": 128}


def overflow_on_one_rank(is_spread: bool) -> tuple[float, int]:
    """A GradScaler on each rank; rank 2's gradient overflows. Returns the new scale and whether the optimizer stepped."""
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.backward(0)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if dist.get_rank() == 2:
        gradients[0].fill_(float("inf"))
    if is_spread:
        assert spread_nonfinite(gradients, dist.group.WORLD) == (2,)
    run.guard.remove()
    scaler.scale(torch.ones(1))
    scaler.step(run.optimizer)
    scaler.update()
    return scaler.get_scale(), len(run.optimizer.state)


def test_an_overflow_on_one_rank_makes_every_grad_scaler_skip(pool: GlooPool) -> None:
    assert pool.run(overflow_on_one_rank, True, world_size=3) == [(4.0, 0)] * 3


def test_without_spreading_the_overflow_the_ranks_would_part(pool: GlooPool) -> None:
    assert [scale for scale, _ in pool.run(overflow_on_one_rank, False, world_size=3)] == [8.0, 8.0, 4.0]


def test_in_one_process_clipping_is_torch_s_own() -> None:
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(batch(0)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    assert torch.equal(clip_grad_norm_(ours.parameters(), 0.01), wanted)
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(ours.parameters(), theirs.parameters())
        if a.grad is not None
    )


def test_norm_of_norms_keeps_nan_and_infinity() -> None:
    assert norm_of_norms([3.0, 4.0], 2.0) == pytest.approx(5.0)
    assert norm_of_norms([1.0, float("inf")], 2.0) == float("inf")
    assert norm_of_norms([float("inf"), float("nan")], 2.0) != norm_of_norms([1.0], 2.0)
    assert norm_of_norms([], 2.0) == 0.0


def test_uniform_factor_tells_scaling_from_clipping_by_value() -> None:
    before = torch.randn(64, dtype=torch.float64)
    assert uniform_factor(before, before * 0.25, 1e-3) == pytest.approx(0.25)
    assert uniform_factor(before, before.clamp(-0.1, 0.1), 1e-3) is None
    assert (
        uniform_factor(torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), 1e-3) is None
    )
