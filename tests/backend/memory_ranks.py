"""What a rank of a memory test runs: a model from the meta device under a limit of memory, and what it then uses."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import disagmoe_compile as dm
from disagmoe_compile.models.hf import build, tiny_config

MIB = 2**20
_M_MMAP_THRESHOLD = -3  # malloc.h


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes. `resident`: growth of its anonymous resident memory from before the model to after two steps."""

    parameters: int
    gradients: int
    optimizer: int
    resident: int
    refused: str
    losses: list[float]


def memory_of(kind: str) -> int:
    """`RssAnon` or `VmData` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == kind:
            return int(value.split()[0]) * 1024
    raise KeyError(kind)


@contextmanager
def limited_to(more_bytes: int) -> Iterator[None]:
    """The process may not allocate more than this beyond what it has now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_of("VmData") + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def on_meta(sizes: dict[str, int]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", **sizes)).train()


def train(model: torch.nn.Module, options: dict[str, Any], steps: int) -> tuple[Any, list[float]]:
    """SGD with momentum: its state is as large as the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    compiled = torch.compile(model, backend="disagmoe", options=options)
    dm.init_weights(compiled)
    losses = []
    for step in range(steps):
        ids = torch.randint(3, 250, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


def train_under_a_limit(sizes: dict[str, int], options: dict[str, Any], limit: int) -> Memory:
    # what a first compilation and a first message load stays in the process, whatever the model
    train(on_meta({"n_layers": sizes["n_layers"]}), options, steps=2)
    torch._dynamo.reset()
    gc.collect()
    # glibc keeps freed blocks of up to 32 MiB for later, unless it is told to map each by itself and give it back
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    torch.manual_seed(0)
    before = memory_of("RssAnon")
    with limited_to(limit):
        refused = ""
        try:
            build("qwen3_moe", **sizes)
        except RuntimeError as error:
            refused = str(error)
        gc.collect()
        model = on_meta(sizes)
        optimizer, losses = train(model, options, steps=2)
    gc.collect()
    resident = memory_of("RssAnon") - before
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return Memory(
        parameters=sum(p.untyped_storage().nbytes() for p in model.parameters()),
        gradients=sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None),
        optimizer=sum(m.untyped_storage().nbytes() for m in moments if isinstance(m, torch.Tensor)),
        resident=resident,
        refused=refused,
        losses=losses,
    )
