"""One trace serves every batch size and sequence length, also where the two are equal in some call."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.capture import capture
from disagmoe_compile.models import styles

SHAPES = [(8, 16), (4, 20), (6, 6), (2, 7), (16, 16), (12, 5)]


def traces_over(shapes: list[tuple[int, int]], dynamic: bool | None) -> int:
    """Graphs that capture() accepted over these calls; each has one batch symbol, which no other dimension shares."""
    model, n_graphs = styles.build("sorted_grouped_mm", n_layers=1), 0

    def backend(graph_module, example_inputs):
        nonlocal n_graphs
        captured = capture(graph_module, example_inputs)
        n_graphs += 1
        shared = [i for i in captured.inputs if i.per_sample]
        assert len(shared) == 2 and all(captured.batch_symbol not in i.shape[1:] for i in shared)
        return graph_module

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch, length in shapes:
        ids = torch.randint(3, 100, (batch, length))
        assert torch.allclose(compiled(ids, ids.clone()).loss, model(ids, ids).loss)
    return n_graphs


def test_the_second_length_is_the_last_that_is_traced():
    assert traces_over(SHAPES, dynamic=None) == 2


@pytest.mark.parametrize("first", [(8, 8), (8, 16)])
def test_a_batch_as_large_as_the_sequence_is_long_stays_apart_from_it(first):
    assert traces_over([first, *SHAPES], dynamic=True) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_mask_of_lengths_is_no_batch_where_the_two_are_equal(dynamic):
    """Whether equal at first, later or always; one of padding stays with its samples."""
    seen = []

    def backend(graph_module, example_inputs):
        seen.append({i.name.split("'")[1]: i for i in capture(graph_module, example_inputs).inputs})
        return graph_module

    def scores(x_BSD, mask_SS, padding_BS):
        return ((x_BSD @ x_BSD.mT) * mask_SS * padding_BS[:, None]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(scores, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch, length in [(6, 6), (4, 8), (8, 8), (3, 5)]:
        arguments = torch.randn(batch, length, 4), torch.ones(length, length), torch.ones(batch, length)
        assert torch.allclose(compiled(*arguments), scores(*arguments), atol=1e-4)
    assert len(seen) <= 2
    for inputs in seen:
        assert [inputs[name].per_sample for name in ("x_BSD", "mask_SS", "padding_BS")] == [True, False, True]
