"""One message per peer, whatever is in it; what is received is what was sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from disagmoe_compile.runtime.messages import Expected, Message, Tags, receive, receive_headers, send
from disagmoe_compile.runtime.transport.loopback import LoopbackTransport, Mailbox

PLAN = SimpleNamespace(
    transfers=[SimpleNamespace(name="dispatch.0")], workload=SimpleNamespace(n_microbatches=2)
)
TENSORS = (
    torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    torch.tensor([True, False, True]),
    torch.tensor([[2**40, 3]]),
    torch.empty(0, 3),
    torch.tensor([1.5, 2.5]),
)


@pytest.fixture
def ends() -> tuple[LoopbackTransport, LoopbackTransport, Mailbox]:
    mailbox = Mailbox()
    return LoopbackTransport(mailbox, 0), LoopbackTransport(mailbox, 1), mailbox


def expected(tensors) -> list[Expected]:
    return [Expected(0, tuple((tuple(t.shape), t.dtype) for t in tensors))]


@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:1], TENSORS[3:4], (), TENSORS[::-1]])
def test_tensors_of_all_types_arrive_in_at_most_one_message(ends, tensors):
    sender, receiver, mailbox = ends
    tags = Tags(PLAN)  # type: ignore[arg-type]
    sending = send(sender, tags, "dispatch.0", 1, [Message(1, tensors)])
    assert len(mailbox.messages) == any(t.numel() for t in tensors)
    receiving = receive(receiver, tags, "dispatch.0", 1, expected(tensors))
    (message,) = receiving.wait()
    assert len(message.tensors) == len(tensors)
    for sent, got in zip(tensors, message.tensors):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    assert sending.nbytes == receiving.nbytes == nbytes
    assert not mailbox.messages


def test_a_header_travels_apart_and_buffers_are_used_again(ends):
    sender, receiver, mailbox = ends
    tags = Tags(PLAN)  # type: ignore[arg-type]
    for _ in range(3):
        sending = send(sender, tags, "dispatch.0", 0, [Message(1, TENSORS, header=torch.tensor([2, 3]))])
        assert len(mailbox.messages) == 2
        headers = receive_headers(receiver, tags, "dispatch.0", 0, [Expected(0, (((2,), torch.int64),))])
        assert headers.wait()[0].tensors[0].tolist() == [2, 3]
        payload = receive(receiver, tags, "dispatch.0", 0, expected(TENSORS))
        payload.wait()
        for done in (sending, headers, payload):
            done.release()
    assert (sender.buffers.allocated, receiver.buffers.allocated) == (1, 2)
