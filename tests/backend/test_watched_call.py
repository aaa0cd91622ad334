"""Data-dependent loops over experts: one line that names the source line and the change; never silently eager on every rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.backend import watched_call
from disagmoe_compile.errors import CaptureError, InputError
from disagmoe_compile.inspect.explain import explain
from disagmoe_compile.models import styles
from disagmoe_compile.models.styles.language_model import LanguageModel, Sizes

SIZES = Sizes(n_layers=1, num_experts=2, top_k=1)
IDS = torch.arange(3, 35).view(4, 8)


class Experts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_experts, self.top_k = sizes.num_experts, sizes.top_k
        self.gate = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(sizes.hidden, sizes.hidden) for _ in range(sizes.num_experts))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.gate(x_TD).softmax(-1), self.top_k)


class HitExperts(Experts):
    def forward(self, x_TD: Tensor) -> Tensor:
        weights, ids = self.route(x_TD)
        out = torch.zeros_like(x_TD)
        hit_E = F.one_hot(ids, self.num_experts).sum((0, 1)).nonzero()
        for expert in hit_E:  # HitExperts
            tokens, slots = torch.where(ids == expert)
            out.index_add_(0, tokens, self.experts[expert](x_TD[tokens]) * weights[tokens, slots, None])
        return out


class IfAny(Experts):
    def forward(self, x_TD: Tensor) -> Tensor:
        weights, ids = self.route(x_TD)
        out = torch.zeros_like(x_TD)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if mask.any():  # IfAny
                tokens, slots = torch.where(mask)
                out.index_add_(0, tokens, expert(x_TD[tokens]) * weights[tokens, slots, None])
        return out


class SplitByList(Experts):
    def forward(self, x_TD: Tensor) -> Tensor:
        weights, ids = self.route(x_TD)
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts)
        rows = x_TD[order // self.top_k].split(counts.tolist())  # SplitByList
        done = torch.cat([expert(part) for expert, part in zip(self.experts, rows)])
        return torch.zeros_like(x_TD).index_add_(
            0, order // self.top_k, done * weights.flatten()[order, None]
        )


LOOPS = {
    HitExperts: "loop over all experts, `for e in range(num_experts)`",
    IfAny: "remove the `if`",
    SplitByList: "torch._grouped_mm",
}


def line_of(loop: type[nn.Module]) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, text in enumerate(lines, 1) if text.endswith(f'# {loop.__name__}'))}"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_call, "several_ranks", lambda: True)


def refusal(model: nn.Module, fullgraph: bool) -> str:
    compiled = torch.compile(
        model, backend="disagmoe", fullgraph=fullgraph, options={"stage_compiler": "eager"}
    )
    with pytest.raises(CaptureError) as caught:
        compiled(IDS)
    return str(caught.value)


@pytest.mark.parametrize("loop", LOOPS)
def test_as_one_graph_the_error_names_the_line_and_the_change(loop):
    message = refusal(LanguageModel(SIZES, loop), fullgraph=True)
    assert f"at {line_of(loop)}: " in message and LOOPS[loop] in message and "\n" not in message


@pytest.mark.parametrize("loop", LOOPS)
def test_several_ranks_refuse_a_break_without_being_asked_for_one_graph(several_ranks, loop):
    message = refusal(LanguageModel(SIZES, loop), fullgraph=False)
    assert f"at {line_of(loop)}: " in message and LOOPS[loop] in message and "\n" not in message


@pytest.mark.parametrize("loop", LOOPS)
def test_inspection_names_the_line_and_the_change(loop):
    (found,) = explain(LanguageModel(SIZES, loop), IDS).graph_breaks
    assert found.where == line_of(loop) and LOOPS[loop] in found.reason


def test_one_process_runs_a_broken_graph_in_parts(fresh_dynamo):
    model = LanguageModel(SIZES, IfAny)
    compiled = torch.compile(model, backend="disagmoe", options={"stage_compiler": "eager"})
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)


def test_dumps_of_a_broken_graph_are_refused_at_its_line(fresh_dynamo, tmp_path):
    options = {"stage_compiler": "eager", "trace_dir": str(tmp_path)}
    compiled = torch.compile(LanguageModel(SIZES, IfAny), backend="disagmoe", options=options)
    with pytest.raises(CaptureError, match=line_of(IfAny)) as caught:
        compiled(IDS)
    assert "\n" not in str(caught.value)


def test_a_call_that_dynamo_runs_without_the_backend_is_an_error_on_several_ranks(several_ranks):
    model = styles.build("sorted_grouped_mm", n_layers=1)
    compiled = torch.compile(model, backend="disagmoe")
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match="without asking"):
        compiled(IDS)


class Counting(nn.Module):
    """Traced again for every length of its list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = styles.build("sorted_grouped_mm", n_layers=1)
        self.steps: list[int] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids).logits + len(self.steps)


def test_past_torchs_limit_of_traces_the_error_says_what_to_do(fresh_dynamo):
    model = Counting()
    compiled = torch.compile(model, backend="disagmoe", options={"stage_compiler": "eager"})
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled(IDS)
        model.steps.append(1)
        with pytest.raises(
            InputError, match=r"traced this code 1 times.*torch\._dynamo\.reset\(\)"
        ) as caught:
            compiled(IDS)
    assert "\n" not in str(caught.value)


def test_other_backends_are_left_alone(several_ranks):
    model = LanguageModel(SIZES, IfAny)
    torch.compile(model, backend="disagmoe")
    torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, model(IDS).logits)


class SetsUpLate(nn.Module):
    """As transformers does for `output_router_logits=True`: something is made under a lock at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.lock, self.is_ready = threading.Lock(), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            with self.lock:  # SetsUpLate
                self.is_ready = True
        return self.layer(x)


def test_a_model_that_sets_itself_up_at_its_first_call_asks_for_that_call(several_ranks):
    compiled = torch.compile(SetsUpLate(), backend="disagmoe")
    with pytest.raises(CaptureError, match="make that call before the compiled one") as caught:
        compiled(torch.ones(2, 4))
    assert line_of(SetsUpLate) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_microbatchs": 2}, "unknown option 'n_microbatchs': did you mean n_microbatches"),
        ({"timeout_s": -1}, "timeout_s must be a positive number"),
    ],
)
def test_bad_options_are_refused_where_torch_compile_is_called(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=message):
        torch.compile(model, backend="disagmoe", options=options)
    with pytest.raises(InputError, match=message):
        model.compile(backend="disagmoe", options=options)
    torch.compile(model, backend="eager", options={"n_microbatchs": 2})  # another backend's are its own
