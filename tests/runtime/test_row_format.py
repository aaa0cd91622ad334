"""Rows on the wire: what comes back, in which type, and what a short type does to small and large values."""

from __future__ import annotations

import pytest
import torch

from disagmoe_compile.plan.exchange import RowExchange
from disagmoe_compile.runtime.row_format import RowFormat


def there_and_back(rows: torch.Tensor, payload: str | None) -> torch.Tensor:
    form = RowFormat.of(rows.shape[1], rows.dtype, RowExchange(payload_dtype=payload))
    sent = form.encode(rows)
    assert [(tuple(t.shape), t.dtype) for t in sent] == list(form.specs(len(rows)))
    back = form.decode(sent)
    assert back.dtype == rows.dtype
    return back


@pytest.mark.parametrize("payload", [None, "float32"])
def test_rows_that_need_no_shorter_type_come_back_bit_for_bit(payload):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(3, 4).to(dtype)
        assert torch.equal(there_and_back(rows, payload), rows)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1.0, 1e5, 1e30])
@pytest.mark.parametrize(("payload", "precision"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_values_of_any_size_keep_the_precision_of_the_type(payload, precision, magnitude):
    rows = magnitude * (1 + torch.rand(5, 7, generator=torch.Generator().manual_seed(0)))
    back = there_and_back(rows, payload)
    assert ((back - rows).abs() <= precision * rows).all()
    assert not torch.equal(back, rows)


@pytest.mark.parametrize("payload", ["bfloat16", "float16"])
def test_infinity_and_nan_arrive_as_such(payload):
    rows = torch.tensor([[1.0, float("inf")], [float("nan"), -2.0]])
    back = there_and_back(rows, payload)
    assert torch.equal(back.isinf(), rows.isinf()) and torch.equal(back.isnan(), rows.isnan())
    assert (back[0, 0], back[1, 1]) == (1.0, -2.0)


@pytest.mark.parametrize("payload", [None, "bfloat16", "float16"])
def test_no_rows_and_rows_of_zeros_travel(payload):
    assert there_and_back(torch.zeros(0, 4), payload).shape == (0, 4)
    assert torch.equal(there_and_back(torch.zeros(2, 4), payload), torch.zeros(2, 4))


def test_an_unknown_type_or_deduplication_is_refused():
    with pytest.raises(
        ValueError, match="payload_dtype must be one of bfloat16, float16, float32, got 'int8'"
    ):
        RowExchange(payload_dtype="int8")
    with pytest.raises(ValueError, match="dedup must be one of none, rank, got 'node'"):
        RowExchange(dedup="node")
