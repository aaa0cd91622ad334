"""Capture: symbolic batch, classified placeholders, and clear refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from disagmoe_compile.capture import capture, qualified_name, root_module
from disagmoe_compile.errors import CaptureError
from disagmoe_compile.graph_breaks import check_graph_break
from disagmoe_compile.passes.program import InputKind, bind
from disagmoe_compile.testing.graphs import capture_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x, shift):
        y = self.inner(x) * self.scale + shift
        return y.view(x.shape[0], -1).mean()


def test_batch_is_symbolic_and_others_are_constants():
    captured, args = capture_model(Model(), {"x": torch.randn(4, 3, 6), "shift": torch.randn(1, 5)})
    x = next(i for i in captured.inputs if i.name == "L['x']" or i.name.endswith("['x']"))
    shift = next(i for i in captured.inputs if i.name.endswith("['shift']"))
    assert x.shape == (captured.batch_symbol, 3, 6) and x.per_sample
    assert shift.shape == (1, 5) and not shift.per_sample
    assert bind(x.shape, captured.sizes(args)) == (4, 3, 6)


def test_inputs_whose_batches_never_meet_share_one_symbol():
    def apart(x, y):
        return x.square().sum() + y.square().sum()

    captured, _ = capture_model(apart, {"x": torch.randn(4, 3), "y": torch.randn(4, 5)})
    tensors = [i for i in captured.inputs if i.kind is InputKind.INPUT]
    assert [i.per_sample for i in tensors] == [True, True]
    assert {i.shape[0] for i in tensors} == {captured.batch_symbol}


def test_tensor_passed_before_does_not_keep_its_companions_fixed():
    def together(x, y):
        return (x * y).sum()

    x = torch.randn(4, 3)
    capture_model(together, {"x": x, "y": torch.randn(4, 3)})
    captured, _ = capture_model(lambda x, y: x.sum() + y.sum(), {"x": x, "y": torch.randn(4, 3)})
    tensors = [i for i in captured.inputs if i.kind is InputKind.INPUT]
    assert [i.per_sample for i in tensors] == [True, True]


def test_graph_runs_at_another_batch_size():
    captured, args = capture_model(Model(), {"x": torch.randn(4, 3, 6), "shift": torch.randn(1, 5)})
    half = [
        a.narrow(0, 0, 2) if i.per_sample else 2 if i.kind is InputKind.SYMBOL else a
        for i, a in zip(captured.inputs, args)
    ]
    model = captured.graph_module(*half)[0]
    assert model.dim() == 0


def test_state_has_the_names_of_the_module():
    captured, _ = capture_model(Model(), {"x": torch.randn(4, 3, 6), "shift": torch.randn(1, 5)})
    kinds = {i.name: i.kind for i in captured.inputs}
    assert kinds["inner.weight"] is kinds["inner.bias"] is InputKind.PARAMETER
    assert kinds["scale"] is InputKind.BUFFER
    assert captured.training and not captured.autocast.enabled


def test_one_sample_stays_as_it_is():
    captured, args = capture_model(Model(), {"x": torch.randn(1, 3, 6), "shift": torch.randn(1, 5)})
    assert captured.batch_symbol is None
    assert captured.sizes(args) == {}


def test_sizes_refuse_arguments_that_disagree():
    def pair(x, y):
        return (x * y).sum()

    captured, args = capture_model(pair, {"x": torch.randn(4, 3), "y": torch.randn(4, 3)})
    broken = [torch.randn(5, 3) if i.name.endswith("['y']") else a for i, a in zip(captured.inputs, args)]
    with pytest.raises(ValueError, match="has size 5 where another argument has 4"):
        captured.sizes(broken)


def test_fixed_batch_is_refused_at_its_line():
    def fixed(x):
        return F.relu(x).view(4 * 3).sum()

    with pytest.raises(Exception, match=r"fixes its batch size to 4.*test_capture.py:\d+"):
        capture_model(fixed, {"x": torch.randn(4, 3)})


def test_root_module_is_the_users_model():
    found = []

    def backend(graph_module, example_inputs):
        found.append(root_module())
        return graph_module

    model = Model()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(4, 3, 6), torch.randn(1, 5))
    assert found == [model]


def test_parameters_keep_their_names_where_forward_sets_an_attribute():
    class Noted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x):
            self.seen = self.inner(x)
            return self.outer(self.seen * self.scale)

    captured, _ = capture_model(Noted(), {"x": torch.randn(4, 3)})
    names = {one.name: one.kind for one in captured.inputs if one.kind in ("parameter", "buffer")}
    assert names == {
        "inner.weight": "parameter", "inner.bias": "parameter", "outer.weight": "parameter",
        "outer.bias": "parameter", "scale": "buffer",
    }  # fmt: skip


def test_graph_break_is_refused_at_its_line():
    seen = []

    def backend(graph_module, example_inputs):
        try:
            check_graph_break(graph_module)
        except CaptureError as error:
            seen.append(str(error))
        return graph_module

    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch._dynamo.reset()
    torch.compile(broken, backend=backend)(torch.randn(4, 3))
    assert len(seen) == 1 and "test_capture.py:" in seen[0]


def test_loop_over_hit_experts_names_the_config_call():
    pytest.importorskip("transformers")
    from disagmoe_compile.models import hf

    model, _ = hf.build("qwen3_moe", n_layers=1)
    model.set_experts_implementation("eager")

    def backend(graph_module, example_inputs):
        check_graph_break(graph_module)
        return graph_module

    torch._dynamo.reset()
    ids = torch.randint(3, 100, (2, 8))
    with pytest.raises(BackendCompilerFailed, match=r'model\.set_experts_implementation\("grouped_mm"\)'):
        torch.compile(model, backend=backend)(input_ids=ids, labels=ids)


def test_names_come_from_sources():
    assert qualified_name("L['self']._modules['a']._modules['0']._parameters['w']") == "a.0.w"
    assert capture.__doc__ is not None
