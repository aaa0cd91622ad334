"""Steps of the script's optimizer: too early, with state of global shape, with gradients clipped by one rank's own norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import GatheringBackend, Model, batch, make_model, topology, worst_parameter_error
from torch.nn.utils import clip_grad_norm_ as torch_s_clip

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.clip import clip_grad_norm_, norm_of_norms, refuse_norms_of_parts
from disagmoe_compile.runtime.gradient_scale import uniform_factor
from disagmoe_compile.runtime.optimizer_hooks import OptimizerGuard
from disagmoe_compile.runtime.overflows import share_overflows
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
        if how == "own factor":
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 1 + dist.get_rank()
        elif how == "value":
            for model in (run.model, run.reference):
                torch.nn.utils.clip_grad_value_([p for p in model.parameters() if p.numel()], 1e-4)
        elif how == "divide":
            for parameter in (*run.model.parameters(), *run.reference.parameters()):
                if parameter.grad is not None:
                    parameter.grad /= 3
        run.step()
    return run.error


def test_a_factor_of_a_rank_s_own_raises_on_every_rank(pool: GlooPool) -> None:
    for outcome in pool.outcomes(clip_locally, "own factor", world_size=4):
        assert outcome.failure is not None and outcome.failure.kind == "DivergenceError"
        assert "use disagmoe_compile.clip_grad_norm_" in outcome.failure.message


def clip_by_torch(max_norm: float) -> tuple[str, float]:
    """What a function imported before the model was spread says to a model that is, and does to one that is not."""
    run = Run()
    run.backward(0)
    refuse_norms_of_parts()
    theirs = float(torch_s_clip(run.reference.parameters(), max_norm))
    try:
        torch_s_clip(run.model.parameters(), max_norm)
    except InputError as error:
        return str(error), theirs
    return "no error", theirs


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_by_a_rank_s_own_norm_is_refused_also_where_it_would_clip_nothing(
    pool: GlooPool, max_norm: float
) -> None:
    for said, theirs in pool.run(clip_by_torch, max_norm, world_size=4):
        assert "use disagmoe_compile.clip_grad_norm_" in said
        assert 1e-3 < theirs < 1e3


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


def step_of(name: str, n_ffn: int) -> None:
    run = Run()
    assert dist.get_world_size() == 2 + n_ffn
    optimizer = getattr(torch.optim, name)(run.model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = run.compiled(batch(0))
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


@pytest.mark.parametrize(
    ("name", "why"), [("LBFGS", "sums over all parameters"), ("Adafactor", "experts is split")]
)
def test_an_optimizer_that_needs_whole_parameters_raises_on_every_rank(
    pool: GlooPool, name: str, why: str
) -> None:
    for outcome in pool.outcomes(step_of, name, 2, world_size=4):
        assert outcome.failure is not None and why in outcome.failure.message


def test_an_optimizer_that_needs_whole_parameters_may_step_where_none_is_split(pool: GlooPool) -> None:
    pool.run(step_of, "Adafactor", 1, world_size=3)


def part_ways(what: str) -> None:
    """Rank 1's script does something else than the others'."""
    run = Run()
    run.backward(0)
    assert run.backend.binding is not None
    history = run.backend.binding.history
    for rank_of_script in range(2):
        if dist.get_rank() == 1 and what == "skips a backward" and rank_of_script:
            continue
        scale = 2.0 if dist.get_rank() == 1 and what == "scales its loss" else 1.0
        history.note(history.start_call(), scale)
    run.step()


@pytest.mark.parametrize("what", ["skips a backward", "scales its loss"])
def test_a_rank_whose_backwards_differ_raises_on_every_rank(pool: GlooPool, what: str) -> None:
    for outcome in pool.outcomes(part_ways, what, world_size=3):
        assert outcome.failure is not None and outcome.failure.kind == "DivergenceError"
        assert "rank 1 differs from rank 0 in the backward() calls" in outcome.failure.message
    pool.run(part_ways, "does the same", world_size=3)


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


def overflow_on_one_rank(is_shared: bool, fused: bool = False) -> tuple[float, bool]:
    """A GradScaler on each rank; rank 2's gradient overflows. Returns the new scale and whether a parameter changed."""
    run = Run()
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.MonkeyPatch.context() as patch:
        unscale = torch.amp.GradScaler._unscale_grads_
        patch.setattr(torch.amp.GradScaler, "_unscale_grads_", getattr(unscale, "__wrapped__", unscale))
        if is_shared:
            share_overflows()
        run.backward(0)
        if dist.get_rank() == 2:
            next(p.grad for p in run.model.parameters() if p.grad is not None).fill_(float("inf"))
        before = [p.detach().clone() for p in run.model.parameters()]
        run.guard.remove()
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    changed = not all(map(torch.equal, before, run.model.parameters()))
    return scaler.get_scale(), changed


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_makes_every_grad_scaler_skip(pool: GlooPool, fused: bool) -> None:
    assert pool.run(overflow_on_one_rank, True, fused, world_size=3) == [(4.0, False)] * 3


def test_without_sharing_the_overflow_the_ranks_would_part(pool: GlooPool) -> None:
    assert [scale for scale, _ in pool.run(overflow_on_one_rank, False, world_size=3)] == [8.0, 8.0, 4.0]


def scaled_step_of(names: tuple[str, ...], trained: bool) -> float:
    """A GradScaler and an optimizer of some parameters; returns how far they end up from eager's."""
    run = Run()
    share_overflows()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    run.backward(0)
    for model, scaler in zip((run.model, run.reference), scalers, strict=True):
        parameters = [p for n, p in model.named_parameters() if n in names]
        if not trained:
            for parameter in parameters:
                parameter.grad = None
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    return run.error


def test_a_grad_scaler_steps_where_all_gradients_are_on_other_ranks(pool: GlooPool) -> None:
    assert max(pool.run(scaled_step_of, ("experts",), True, world_size=3)) < 1e-6


def test_a_grad_scaler_without_any_gradient_raises_as_in_one_process(pool: GlooPool) -> None:
    for outcome in pool.outcomes(scaled_step_of, ("experts",), False, world_size=3):
        assert outcome.failure is not None and "No inf checks were recorded" in outcome.failure.message


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
