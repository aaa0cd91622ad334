"""Accumulation of gradients: exact, and never into a tensor that somebody else still reads."""

from __future__ import annotations

import torch

from disagmoe_compile.runtime.attention_worker import AttentionWorker
from disagmoe_compile.runtime.stages import Boundary, SizedStages
from disagmoe_compile.runtime.transport.loopback import LoopbackTransport, Mailbox
from disagmoe_compile.runtime.worker import StepInputs
from disagmoe_compile.testing.plans import example_plan


def worker() -> AttentionWorker:
    plan = example_plan()
    boundary = Boundary(4, 4, 4, 8, 8, torch.float32, torch.float32, torch.float32, ())
    one = AttentionWorker(
        plan,
        0,
        {plan.workload.microbatch_size: SizedStages({}, [boundary] * plan.topology.n_boundaries)},
        LoopbackTransport(Mailbox(), 0),
        torch.device("cpu"),
    )
    one.begin(StepInputs((), {}, 0, trains=True))
    return one


def test_gradients_of_all_microbatches_are_summed():
    one = worker()
    for value in (1.0, 2.0, 4.0):
        one.add_gradient("w", torch.full((3,), value))
    assert one.gradients["w"].tolist() == [7.0] * 3


def test_what_a_stage_returned_is_never_written_to():
    one = worker()
    tangent = torch.ones(3)  # a stage may return its tangent itself, as the gradient of an added bias
    one.add_gradient("w", tangent)
    one.add_gradient("w", tangent)
    one.add_gradient("w", tangent)
    assert tangent.tolist() == [1.0] * 3
    assert one.gradients["w"].tolist() == [3.0] * 3


def test_a_step_keeps_nothing_once_it_has_ended():
    one = worker()
    one.add_gradient("w", torch.ones(3))
    one.end()
    assert one.gradients == {}
    assert one.step.arguments == ()
