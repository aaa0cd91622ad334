"""Buffers of messages are used again, and let go when other sizes are needed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe_compile.runtime.buffers import Buffers, size_class


@given(st.integers(1, 2**40))
def test_a_class_holds_the_message_and_at_most_an_eighth_more(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size and (size == 4096 or size <= nbytes * 9 / 8 + 1)
    assert size_class(size) == size


def test_what_was_given_back_is_taken_again():
    buffers = Buffers(torch.device("cpu"))
    one, two = buffers.take(5000), buffers.take(5000)
    assert one.data_ptr() != two.data_ptr() and one.numel() >= 5000
    buffers.give(one)
    assert buffers.take(5001).data_ptr() == one.data_ptr()
    assert buffers.allocated == 2


def test_lent_memory_comes_back_when_the_last_tensor_of_it_is_gone():
    buffers = Buffers(torch.device("cpu"))
    weight = torch.ones(4, requires_grad=True)
    lent = buffers.lend(5000)
    where = lent.data_ptr()
    kept = lent[16:32].view(torch.float32).fill_(2.0)
    product = weight * kept  # autograd keeps it for the backward
    del lent, kept
    assert buffers.take(5000).data_ptr() != where
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0))
    del product
    assert buffers.take(5000).data_ptr() == where


def test_sizes_that_a_step_has_no_use_for_are_let_go_after_it():
    buffers = Buffers(torch.device("cpu"))
    for buffer in [buffers.take(5000), buffers.take(5000), buffers.take(50_000)]:
        buffers.give(buffer)
    buffers.begin_step()
    buffers.give(buffers.take(5000))
    buffers.begin_step()
    buffers.take(5000)
    assert buffers.allocated == 3  # one of this size is still there
    buffers.take(50_000)
    buffers.take(5000)
    assert buffers.allocated == 5
