"""Equal stages compile once: structural keys, and the stages compiled so far in this process.

A key is a hash of everything the compiled code depends on: the code of the program's graph (canonical node names make equal
layers' code equal), constants inside it, shapes, dtypes, which inputs need gradients, the compiler, and the autocast state. It
is the same in every process, so that one rank can compile each class of stages before the others look for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor, fx

from disagmoe_compile.passes.aot.compilers import fx_graph_cache_hits
from disagmoe_compile.passes.program import AttentionProgram, ExpertsProgram, InputKind, bind
from disagmoe_compile.runtime.stages import CompiledStage

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state(device: str) -> AutocastState:
    """(device type, enabled, dtype) of the CPU and of the stage's device, as they are now."""
    kinds = dict.fromkeys(["cpu", torch.device(device).type])
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def _autocast_key(device: str) -> AutocastState:
    """Like `autocast_state`, with the dtypes that have no effect left out."""
    return tuple(state for state in autocast_state(device) if state[1])


def _graph_text(module: fx.GraphModule) -> list[str]:
    """Code of a graph and of the graphs inside it, and a digest of each constant tensor."""
    parts = []
    for name, child in module.named_modules():
        parts.append(f"{name}:{child.code if isinstance(child, fx.GraphModule) else repr(child)}")
    constants = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None) if "." not in str(node.target) else None
        if isinstance(value, Tensor):
            constants[str(node.target)] = value
    for name, tensor in sorted(constants.items()):
        content = tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.numel() else tensor
        digest = hashlib.sha256(bytes(content.reshape(-1).tolist())).hexdigest()
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{digest}")
    return parts


def _key(kind: str, parts: Sequence[object]) -> str:
    environment = (torch.__version__, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    text = "\n".join(str(part) for part in (*environment, *parts))
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def attention_key(
    program: AttentionProgram,
    sizes: Mapping[sympy.Symbol, int],
    *,
    compiler: str,
    training: bool,
    device: str = "cpu",
    split_weight_gradient: bool = True,
) -> str:
    """Equal for attention stages that compile to the same code. Includes the autocast state at the call."""
    inputs = [
        (
            item.kind is InputKind.PARAMETER,
            item.kind is InputKind.SYMBOL,
            bind(item.shape, sizes),
            item.dtype,
            item.requires_grad and training,
        )
        for item in program.inputs
    ]
    options = (compiler, training, device, split_weight_gradient, _autocast_key(device))
    return _key("attention", [*_graph_text(program.module), inputs, options])


def experts_key(
    program: ExpertsProgram,
    n_local_experts: int,
    *,
    compiler: str,
    training: bool,
    device: str = "cpu",
    split_weight_gradient: bool = True,
    lowering: str = "auto",
) -> str:
    """Equal for expert stages that compile to the same code. Autocast does not matter: experts are traced with it off."""
    params = [(bind(p.shape[1:], {}), p.dtype, p.requires_grad and training) for p in program.params]
    types = (program.token_dtype, program.weight_dtype, program.out_dtype)
    sizes = (n_local_experts, program.in_features, program.out_features)
    options = (compiler, training, device, split_weight_gradient, lowering)
    return _key("experts", [*_graph_text(program.function), params, types, sizes, options])


@dataclass(slots=True)
class CompileStats:
    """Stages compiled, stages that reused one, and graphs that Inductor found in its disk cache."""

    compiled: int = 0
    reused: int = 0
    fx_graph_cache_hits: int = 0


@dataclass(slots=True)
class StageCache:
    """Compiled stages by key."""

    stats: CompileStats = field(default_factory=CompileStats)
    _stages: dict[str, CompiledStage] = field(default_factory=dict)

    def get(self, key: str, build: Callable[[], CompiledStage]) -> CompiledStage:
        if key in self._stages:
            self.stats.reused += 1
            return self._stages[key]
        hits = fx_graph_cache_hits()
        stage = self._stages[key] = build()
        self.stats.compiled += 1
        self.stats.fx_graph_cache_hits += fx_graph_cache_hits() - hits
        return stage


PROCESS_CACHE = StageCache()
"""Shared by all models of the process: recompiles for another model of the same shape are free too."""
