"""What each rank of a world runs whose experts have parameters of their own: a training loop, and what it left where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import disagmoe_compile
from disagmoe_compile.models import styles

EXPERTS, IDLE, STEPS = 5, 4, 2
OPTIONS = {
    "attention_group_size": 1,
    "ffn_group_size": 2,
    "n_microbatches": 2,
    "stage_compiler": "eager",
    "timeout_s": 60,
}


@dataclass
class Report:
    """Gradients are those of the last step, before clipping scaled them."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    held: list[str]
    state_shapes: dict[str, tuple[int, ...]]
    local_numels: dict[str, int]
    optimizer_bytes: int
    parameter_bytes: int


def make_model() -> nn.Module:
    """Of the experts of each layer one never gets a token."""
    model = styles.build("module_list_plain", num_experts=EXPERTS, hidden=16, expert_hidden=12, vocab=32)
    with torch.no_grad():
        for block in model.blocks:
            block.moe.gate.bias[IDLE] = -1e3
    return model


def make_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    ids = torch.randint(3, 32, (4, 6), generator=generator)
    labels = ids.clone()
    for sample in range(4):
        labels[sample, : sample + 1] = -100
    return {"input_ids": ids, "labels": labels}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(folder: str) -> Report:
    model = make_model()
    optimizer = make_optimizer(model)
    compiled = torch.compile(model, backend="disagmoe", options=OPTIONS)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        loss = compiled(**make_batch(step)).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(disagmoe_compile.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=folder)
    held = {n: p for n, p in model.named_parameters() if p.numel()}
    moments = [v for entry in optimizer.state.values() for v in entry.values() if v.dim()]
    return Report(
        losses=losses,
        norms=norms,
        gradients=gradients,
        parameters={n: p.detach().clone() for n, p in held.items()},
        held=list(held),
        state_shapes={n: tuple(v.shape) for n, v in state.items() if isinstance(v, DTensor)},
        local_numels={n: v.to_local().numel() for n, v in state.items() if isinstance(v, DTensor)},
        optimizer_bytes=sum(v.untyped_storage().nbytes() for v in moments),
        parameter_bytes=sum(p.untyped_storage().nbytes() for p in model.parameters()),
    )
