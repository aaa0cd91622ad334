"""Later traces of a bound model see global shapes, and Dynamo never falls back to running the model on parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import GatheringBackend, batch, make_model, topology, worst_parameter_error
from torch import nn

from disagmoe_compile.errors import DisagMoEError
from disagmoe_compile.runtime.hollow import is_hollow
from disagmoe_compile.runtime.retrace import drop_parameter_guards
from disagmoe_compile.testing.pool import GlooPool

GLOBAL = {"embed.weight": (8, 8), "embed.bias": (8,), "experts": (4, 8, 8), "head.weight": (8, 8)}


class Pair:
    """A compiled model and its eager reference, stepped together."""

    def __init__(self, fail_on_trace: int | None = None) -> None:
        self.model, self.reference = make_model(), make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.eager_optimizer = torch.optim.AdamW(self.reference.parameters(), lr=1e-2)
        self.backend = GatheringBackend(self.model, topology(1, 2), fail_on_trace=fail_on_trace)
        self.compiled = torch.compile(self.model, backend=self.backend, fullgraph=True)
        self.worst = 0.0

    def step(self, x_BD: torch.Tensor) -> None:
        losses = []
        for run, optimizer in ((self.compiled, self.optimizer), (self.reference, self.eager_optimizer)):
            loss = run(x_BD)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients of the part's shape stay for the next trace
            losses.append(loss.item())
        self.worst = max(self.worst, abs(losses[0] - losses[1]) / abs(losses[1]))

    def evaluate(self, x_BD: torch.Tensor) -> None:
        wanted = float(self.reference(x_BD))
        self.worst = max(self.worst, abs(float(self.compiled(x_BD)) - wanted) / abs(wanted))


def all_kinds_of_retraces() -> dict[str, Any]:
    pair = Pair()
    pair.step(batch(0))
    pair.model.eval(), pair.reference.eval()
    with torch.no_grad():
        pair.evaluate(batch(1))
    pair.model.train(), pair.reference.train()
    pair.step(batch(2))
    pair.step(batch(3, size=6))
    pair.step(batch(4, size=7))
    with torch.inference_mode():
        pair.evaluate(batch(5))
    with torch.no_grad():
        pair.evaluate(batch(5))
    pair.step(batch(6))
    assert pair.backend.binding is not None
    return {
        "traced": pair.backend.traced,
        "loss_error": pair.worst,
        "parameter_error": worst_parameter_error(pair.backend.binding, pair.reference),
    }


def test_eval_no_grad_and_new_shapes_are_traced_at_global_shapes_and_stay_exact(pool: GlooPool) -> None:
    for result in pool.run(all_kinds_of_retraces, world_size=3):
        assert len(result["traced"]) >= 4
        assert all(shapes == GLOBAL for shapes in result["traced"])
        assert result["loss_error"] < 1e-6 and result["parameter_error"] < 1e-6


def other_model_between_forward_and_backward() -> float:
    pair = Pair()
    loss, wanted = pair.compiled(batch(0)), pair.reference(batch(0))
    torch.compile(nn.Linear(8, 2), backend="aot_eager")(batch(1)).sum().backward()
    loss.backward(), wanted.backward()
    pair.optimizer.step(), pair.eager_optimizer.step()
    assert pair.backend.binding is not None
    return worst_parameter_error(pair.backend.binding, pair.reference)


def test_another_model_may_compile_between_forward_and_backward(pool: GlooPool) -> None:
    assert max(pool.run(other_model_between_forward_and_backward, world_size=3)) < 1e-6


def fail_while_tracing() -> dict[str, Any]:
    pair = Pair(fail_on_trace=1)
    pair.step(batch(0))
    before = {n: (p.data_ptr(), p.grad is None) for n, p in pair.model.named_parameters()}
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        pair.compiled(batch(1))
    after = {n: (p.data_ptr(), p.grad is None) for n, p in pair.model.named_parameters()}
    hollow = [n for n, p in pair.model.named_parameters() if is_hollow(p)]
    pair.step(batch(2))
    return {"kept": before == after, "hollow": hollow, "loss_error": pair.worst}


def test_a_failed_trace_restores_parts_and_gradients(pool: GlooPool) -> None:
    for result in pool.run(fail_while_tracing, world_size=3):
        assert result["kept"] and result["hollow"] == [] and result["loss_error"] < 1e-6


class Retracing(nn.Module):
    """Reads a list whose length Dynamo guards on: each new length is a new trace."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.lengths: list[int] = []

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BD) + 0.0 * len(self.lengths)


def exceed_the_recompile_limit() -> tuple[int, str]:
    model = make_model()
    wrapper = Retracing(model)
    compiled = torch.compile(wrapper, backend=GatheringBackend(model, topology(1, 1)))
    for calls in range(20):
        wrapper.lengths = [0] * calls
        try:
            compiled(batch(0))
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            return calls, type(error).__name__
    return 20, "ran on parts"


def test_past_the_recompile_limit_a_call_raises_instead_of_running_on_parts(pool: GlooPool) -> None:
    for calls, error in pool.run(exceed_the_recompile_limit, world_size=2):
        assert calls < 20 and error == "FailOnRecompileLimitHit"


def reset_dynamo_between_calls() -> tuple[float, list[dict[str, tuple[int, ...]]]]:
    pair = Pair()
    pair.step(batch(0))
    torch._dynamo.reset()
    pair.step(batch(1))
    pair.step(batch(2))
    return pair.worst, pair.backend.traced


def test_a_reset_of_dynamo_does_not_lose_the_global_shapes(pool: GlooPool) -> None:
    for worst, traced in pool.run(reset_dynamo_between_calls, world_size=3):
        assert worst < 1e-6
        assert traced[-1] == GLOBAL


def test_guards_can_only_be_dropped_while_dynamo_compiles() -> None:
    with pytest.raises(DisagMoEError, match="call it inside the backend"):
        drop_parameter_guards(["L['self']"])


def drop_a_guard_that_is_not_there() -> str:
    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        drop_parameter_guards(["L['self']._parameters['nothing']"])
        return graph

    try:
        torch.compile(make_model(), backend=backend)(batch(0))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error)
    return "no error"


def test_a_missing_guard_is_an_error_not_a_recompilation_at_every_call() -> None:
    message = drop_a_guard_that_is_not_there()
    assert "Dynamo holds no guard for parameter L['self']._parameters['nothing']" in message
    torch._dynamo.reset()
    assert not dist.is_initialized()
