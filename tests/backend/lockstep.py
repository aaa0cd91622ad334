"""A script that does more than a plain loop, in lockstep with eager on every rank. Returns what differed, by name of the step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ranks import Case, batch, make_model, optimizer_of
from torch import nn

from disagmoe_compile.runtime.binding import holder_of
from disagmoe_compile.runtime.clip import clip_grad_norm_
from disagmoe_compile.testing import relative_error


class Lockstep:
    """A compiled model and its eager twin, which a script takes through the same steps."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.twin = make(), make()
        self.optimizer, self.twin_optimizer = make_optimizer(self.model), make_optimizer(self.twin)
        self.compiled = torch.compile(self.model, backend="disagmoe", options=dict(options))
        self.errors: dict[str, float] = {}

    @property
    def sides(self) -> tuple[tuple[Callable[..., Any], nn.Module], tuple[Callable[..., Any], nn.Module]]:
        """What to call and whose parameters: ours, then the twin's."""
        return (self.compiled, self.model), (self.twin, self.twin)

    def part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor | None:
        holder = holder_of(parameter)
        assert holder is not None
        if not holder.bound.is_owned:
            return None
        rows = holder.bound.placement.ranges[holder.bound.rank]
        return whole if rows is None else whole[slice(*rows)]

    def note(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.errors[name] = max(self.errors.get(name, 0.0), relative_error(ours, theirs))

    def compare_gradients(self, name: str) -> None:
        for parameter, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            expected = None if twin.grad is None else self.part(parameter, twin.grad)
            assert (parameter.grad is None) == (expected is None)
            if parameter.grad is not None and expected is not None:
                self.note(name, parameter.grad, expected)

    def compare_parameters(self, name: str) -> None:
        for parameter, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            expected = self.part(parameter, twin.detach())
            if expected is not None:
                self.note(name, parameter.detach(), expected)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, name: str, **batch: torch.Tensor) -> None:
        loss, twin = self.compiled(**batch).loss, self.twin(**batch).loss
        loss.backward()
        twin.backward()
        self.note(name, loss, twin)
        self.compare_gradients(name)
        self.step()


def sized_batch(seed: int, batch_size: int = 8, seq_length: int = 16) -> dict[str, torch.Tensor]:
    return batch(Case(batch_size=batch_size, seq_length=seq_length), seed)


def run_lockstep(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    both = Lockstep(lambda: make_model(case), optimizer_of, case.compile_options)
    both.train("first step", **sized_batch(0))

    both.model.eval(), both.twin.eval()
    with torch.inference_mode():
        both.note("evaluation", both.compiled(**sized_batch(1)).loss, both.twin(**sized_batch(1)).loss)
    with torch.no_grad():
        ids = sized_batch(2)["input_ids"]
        both.note("logits", both.compiled(input_ids=ids).logits, both.twin(input_ids=ids).logits)
    both.model.train(), both.twin.train()
    both.train("training after evaluation", **sized_batch(3))

    both.train("smaller batch", **sized_batch(4, batch_size=4))
    both.train("longer sequences", **sized_batch(5, batch_size=4, seq_length=24))
    both.train("first shape again", **sized_batch(6))

    for model in (both.compiled, both.twin):
        (model(**sized_batch(7)).loss * 0.5 + 3 * model(**sized_batch(8)).loss).backward()
    both.compare_gradients("sum of two scaled losses")
    norm = clip_grad_norm_(both.model.parameters(), 0.1)
    both.note("norm", norm, torch.nn.utils.clip_grad_norm_(both.twin.parameters(), 0.1))
    both.compare_gradients("clipped gradients")
    both.step()
    both.train("after clipping", **sized_batch(9))

    state = both.model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    expected_shapes = {name: tuple(value.shape) for name, value in both.twin.state_dict().items()}
    random_state = torch.get_rng_state()
    return {
        "errors": both.errors,
        "shapes": shapes,
        "expected_shapes": expected_shapes,
        "random_state": random_state,
    }


def outcomes_of_bad_calls(case: Case) -> dict[str, str]:
    """Messages of what must be refused, on this rank."""
    rank = torch.distributed.get_rank()
    messages: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = "no error"

    torch.manual_seed(0)
    model = make_model(case)
    optimizer = optimizer_of(model)
    compiled = torch.compile(model, backend="disagmoe", options=case.compile_options)
    compiled(**batch(case, 0)).loss.backward()
    attempt(
        "own clipping", lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3), optimizer.step())
    )
    output = compiled(**batch(case, 1))
    attempt("touching logits", lambda: output.logits.sum())
    attempt("twice backward", lambda: (output.loss.backward(retain_graph=True), output.loss.backward()))
    attempt("other batches", lambda: compiled(**batch(case, 100 + rank)))
    attempt("eager call", lambda: model(**batch(case, 2)))
    attempt("eager call of a copy", lambda: copy.deepcopy(model)(**batch(case, 2)))
    attempt(
        "compiled copy",
        lambda: torch.compile(copy.deepcopy(model), backend="disagmoe", options=case.compile_options)(
            **batch(case, 2)
        ),
    )
    attempt("pickled", lambda: torch.save(model, io.BytesIO()))
    loss = compiled(**batch(case, 2)).loss
    if rank != 1:
        loss.backward()
    attempt("step after a skipped backward", optimizer.step)
    attempt("call after a skipped backward", lambda: compiled(**batch(case, 3)))
    attempt("converted", lambda: (model.half(), compiled(**batch(case, 2))))
    torch._dynamo.reset()
    wrapped = torch.nn.parallel.DistributedDataParallel(make_model(case))
    attempt(
        "DistributedDataParallel",
        lambda: torch.compile(wrapped, backend="disagmoe", options=case.compile_options)(**batch(case, 0)),
    )
    torch._dynamo.reset()
    attempt(
        "no MoE region",
        lambda: torch.compile(torch.nn.Linear(4, 4), backend="disagmoe", options=case.compile_options)(
            torch.ones(4, 4)
        ),
    )
    attempt(
        "world size",
        lambda: torch.compile(
            make_model(case),
            backend="disagmoe",
            options={"attention_group_size": 7, "stage_compiler": "eager"},
        )(**batch(case, 0)),
    )

    def graph_break(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    class Breaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return graph_break(self.layer(x))

    attempt(
        "graph break",
        lambda: torch.compile(Breaks(), backend="disagmoe", options=case.compile_options)(torch.ones(4, 4)),
    )
    loop = make_model(Case(model={"n_layers": 1}))
    loop.set_experts_implementation("eager")
    attempt(
        "loop over hit experts",
        lambda: torch.compile(loop, backend="disagmoe", options=case.compile_options)(**batch(case, 0)),
    )
    return messages
