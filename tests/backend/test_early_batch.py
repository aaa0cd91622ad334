"""The batch is marked before the first trace: the backend sees it symbolic at once; calls of other backends are left alone."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.capture import capture
from disagmoe_compile.early_batch import MarkBeforeTracing, is_marked, mark_batch


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_inputs_that_share_the_batch_size_are_marked_wherever_they_lie():
    ids, mask, positions, lengths = torch.ones(8, 16), torch.ones(8, 1, 16), torch.ones(1, 16), torch.ones(8)
    mark_batch({"args": (ids,), "kwargs": {"mask": mask, "positions": positions, "lengths": lengths}})
    assert [is_marked(t) for t in (ids, mask, positions, lengths)] == [True, True, False, True]


@pytest.mark.parametrize(
    "shapes", [((8, 16), (4, 8)), ((1, 16), (1, 4)), ((8,), (8,))], ids=["two sizes", "one sample", "vectors"]
)
def test_nothing_is_marked_where_the_arguments_leave_a_doubt(shapes):
    tensors = [torch.ones(shape) for shape in shapes]
    mark_batch(tensors)
    assert not any(map(is_marked, tensors))


def test_a_vector_as_long_as_the_sequence_is_not_taken_for_the_batch():
    ids, positions = torch.ones(8, 8), torch.ones(8)
    mark_batch([ids, positions])
    assert (is_marked(ids), is_marked(positions)) == (True, False)
    # [8, 8] may be a mask of lengths: the trace may fix its size
    assert not hasattr(ids, "_dynamo_dynamic_indices")


def traces_of(model: torch.nn.Module, applies: bool) -> int:
    """How often Dynamo ran the model's forward until a backend got a symbolic batch."""
    traces = 0

    def backend(graph_module, example_inputs):
        nonlocal traces
        traces += 1
        assert capture(graph_module, example_inputs).batch_symbol is not None
        return graph_module

    MarkBeforeTracing(backend, applies=lambda: applies).register()
    torch.compile(model, backend=backend)(torch.ones(4, 3))
    return traces


def test_one_trace_is_enough():
    assert traces_of(torch.nn.Linear(3, 2), applies=True) == 1


def test_without_the_mark_the_backend_still_gets_a_symbolic_batch():
    assert traces_of(torch.nn.Linear(3, 2), applies=False) == 2


def test_calls_of_other_backends_are_left_alone():
    MarkBeforeTracing(lambda graph_module, example_inputs: graph_module, applies=lambda: True).register()
    x = torch.ones(4, 3)
    torch.compile(torch.nn.Linear(3, 2), backend="eager")(x)
    assert not is_marked(x)
