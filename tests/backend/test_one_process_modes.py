"""`torch.compile(model, backend="disagmoe")` in one process: every mode that a script switches to equals eager."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from disagmoe_compile.models import styles

MODES = {
    "train": (True, nullcontext),
    "evaluation": (False, nullcontext),
    "no_grad": (True, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
    "autocast": (True, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}


@pytest.fixture(scope="module")
def models():
    torch._dynamo.reset()
    model, twin = (styles.build("gathered_einsum", n_layers=1, seed=3) for _ in range(2))
    yield torch.compile(model, backend="disagmoe", options={"stage_compiler": "eager"}), twin
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(4, 8), (6, 6)])
@pytest.mark.parametrize("mode", MODES)
def test_loss_outputs_and_gradients_are_those_of_eager(models, mode, shape):
    trains, context = MODES[mode]
    ids = torch.randint(3, 120, shape, generator=torch.Generator().manual_seed(1))
    found = []
    for model in models:
        model.train(trains)
        model.zero_grad()
        with context():
            output = model(ids, ids.clone())
        if output.loss.requires_grad:
            output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((output.loss, output.logits, gradients))
    torch.testing.assert_close(*found)
    assert bool(found[0][2]) == (mode not in ("no_grad", "inference_mode"))
