"""Costs of a traced model, counted on its stages' graphs: the same ModelCosts that closed forms give a catalogue entry.

    stage program ──fake tensors──> forward under FLOP counter and saved-tensor hooks ──> backward under FLOP counter

Whatever the model computes is counted, so there is no shape that needs a formula. What differs from the closed forms:

    what a mask tensor hides is counted (`costs.py`), and attention written out as matmuls counts as matmuls, not as a core
    shared experts are part of the attention stage they are computed in
    saved bytes are those of the graph's own operations; a stage compiler that recomputes pointwise ones keeps less

FLOPs count 2 a multiply-add, bytes are as computed; all are of ONE sample, whose tokens are the sequence. Stages of equal graphs
and inputs, as most layers are, are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from disagmoe_compile.passes.program import (
    AttentionProgram,
    ExpertsProgram,
    InputKind,
    ModelPrograms,
    StageInput,
    bind,
)
from disagmoe_compile.passes.stage_flops import (
    Sizes,
    core_flops,
    example,
    fake_tensors,
    flop_counter,
    tokens_of,
)
from disagmoe_compile.planner.step_costs import ComponentCosts, CostSet, ModelCosts

_STATE = (InputKind.PARAMETER, InputKind.BUFFER)
_ACTIVATIONS = (InputKind.COMBINED, InputKind.CARRIED)


def traced_costs(programs: ModelPrograms, sizes: Sizes, *, name: str = "traced model") -> ModelCosts:
    """Counted for a call of `sizes`, shared out over its samples. Without a loss there is no backward to count."""
    # torch's counter hooks into tensors that require grad, which those of inference mode cannot let it do.
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        return _traced_costs(programs, sizes, name)


def _traced_costs(programs: ModelPrograms, sizes: Sizes, name: str) -> ModelCosts:
    counter = _Counter(sizes, programs)
    attention = [counter.attention(program) for program in programs.attention]
    before = programs.attention[: programs.n_boundaries]
    experts = [counter.experts(e, tokens_of(a, sizes)) for a, e in zip(before, programs.experts)]
    fewest = min(e.num_experts for e in programs.experts)
    return ModelCosts(
        name=name,
        seq_length=max(1, tokens_of(before[0], sizes) // counter.samples),
        cost_set=CostSet.CORRECTED,
        element_bytes=programs.experts[0].token_dtype.itemsize,
        attention=tuple(attention[:-1]),
        experts=tuple(experts),
        shared=(ComponentCosts(),) * len(experts),
        head=attention[-1],
        token_bytes=max(e.in_features * e.token_dtype.itemsize for e in programs.experts),
        residual_bytes_per_token=max(_carried_bytes(a, sizes) // tokens_of(a, sizes) for a in before),
        num_experts=fewest,
        top_k=min(fewest, max(e.top_k for e in programs.experts)),
        tied_embeddings=programs.tied_head,
    )


class _Counter:
    """Counts stages of one call; remembers what equal ones cost, and which parameters an earlier stage holds."""

    def __init__(self, sizes: Sizes, programs: ModelPrograms) -> None:
        self._sizes = sizes
        self.samples = 1 if programs.batch_symbol is None else sizes[programs.batch_symbol]
        self._trains = programs.trains
        self._known: dict[Hashable, ComponentCosts] = {}
        self._held: set[int] = set()

    def attention(self, program: AttentionProgram) -> ComponentCosts:
        signature = tuple(
            (one.kind, bind(one.shape, self._sizes), one.dtype, one.requires_grad) for one in program.inputs
        )
        costs = self._remembered(program.module, signature, lambda: self._run_attention(program))
        own = {one.position: one for one in program.inputs if one.kind is InputKind.PARAMETER}
        new = [one for position, one in own.items() if position not in self._held]
        self._held |= set(own)
        return replace(costs, parameters=sum(_numel(one, self._sizes) for one in new))

    def experts(self, program: ExpertsProgram, n_tokens: int) -> ComponentCosts:
        shapes = tuple((bind(p.shape, {}), p.dtype, p.requires_grad) for p in program.params)
        signature = (
            n_tokens,
            program.top_k,
            program.in_features,
            program.token_dtype,
            program.weight_dtype,
            shapes,
        )
        costs = self._remembered(program.function, signature, lambda: self._run_experts(program, n_tokens))
        return replace(costs, parameters=sum(math.prod(shape) for shape, _, _ in shapes))

    def _remembered(
        self, module: fx.GraphModule, signature: Hashable, count: Callable[[], ComponentCosts]
    ) -> ComponentCosts:
        key = (_structure(module), signature)
        if key not in self._known:
            with fake_tensors(module):
                self._known[key] = count()
        return self._known[key]

    def _run_attention(self, program: AttentionProgram) -> ComponentCosts:
        inputs = [_leaf(example(one, self._sizes), one, self._trains) for one in program.inputs]
        state = [value for one, value in zip(program.inputs, inputs) if one.kind in _STATE]
        kept = [value for one, value in zip(program.inputs, inputs) if _is_kept(one)]
        return _count(program.module, inputs, state, kept, 0, self.samples)

    def _run_experts(self, program: ExpertsProgram, n_tokens: int) -> ComponentCosts:
        """Every routed pair passes through one expert, whichever it is."""
        pairs, trains = n_tokens * program.top_k, self._trains
        rows_PD = torch.empty(pairs, program.in_features, dtype=program.token_dtype, requires_grad=trains)
        weight_P = torch.empty(pairs, dtype=program.weight_dtype, requires_grad=trains)
        params = [
            torch.empty(bind(p.shape, {})[1:], dtype=p.dtype, requires_grad=trains and p.requires_grad)
            for p in program.params
        ]
        experts_P = pairs * torch.int64.itemsize  # whose row it is
        kept = [rows_PD, weight_P]
        return _count(program.function, [*kept, *params], params, kept, experts_P, self.samples)


def _structure(module: fx.GraphModule) -> Hashable:
    """Equal for graphs that do the same, whatever their nodes are called; of a graph with attributes only its own."""
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    if any(node.op in ("get_attr", "call_module") for node in numbers):
        return id(module)
    lines = []
    for node in numbers:
        target = node.target if node.op == "call_function" else node.op
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda one: f"%{numbers[one]}")
        lines.append((target, repr(arguments)))
    return tuple(lines)


def _count(
    function: Callable[..., object],
    inputs: Sequence[object],
    state: Sequence[object],
    kept: Sequence[object],
    kept_bytes: int,
    samples: int,
) -> ComponentCosts:
    """Runs forward and backward on fake tensors. `state`: parameters and buffers, which are no activations. `kept`: inputs that
    recompute keeps, with `kept_bytes` more.
    """
    saved: dict[int, int] = {}
    own = {tensor.untyped_storage()._cdata for tensor in state if isinstance(tensor, torch.Tensor)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if storage._cdata not in own and not free_unbacked_symbols(
            nbytes
        ):  # what only data tells cannot be counted
            saved[storage._cdata] = nbytes
        return tensor

    with flop_counter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = function(*inputs)
    results = outputs if isinstance(outputs, tuple | list) else (outputs,)
    differentiable = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]
    with flop_counter() as backward:
        if differentiable and wanted:
            seeds = [torch.empty_like(result) for result in differentiable]
            torch.autograd.grad(differentiable, wanted, seeds, allow_unused=True)
    held = sum(saved.values())
    inputs_kept = {t.untyped_storage()._cdata: t.nbytes for t in kept if isinstance(t, torch.Tensor)}
    kept_bytes += sum(inputs_kept.values())
    shared = sum(nbytes for storage, nbytes in saved.items() if storage in inputs_kept)
    return ComponentCosts(
        forward_flops=forward.get_total_flops() / samples,
        backward_flops=backward.get_total_flops() / samples,
        core_forward_flops=core_flops(forward) / samples,
        core_backward_flops=core_flops(backward) / samples,
        activation_bytes=held / samples,
        activation_bytes_recompute=min(kept_bytes, held) / samples,
        second_forward_bytes=(held - shared) / samples,
    )


def _leaf(value: torch.Tensor | int, one: StageInput, trains: bool) -> torch.Tensor | int:
    if isinstance(value, torch.Tensor) and trains and (one.requires_grad or one.kind in _ACTIVATIONS):
        return value.requires_grad_(value.is_floating_point())
    return value


def _is_kept(one: StageInput) -> bool:
    """Whether recompute keeps it for one micro-batch: what comes from other stages, and this micro-batch's share of the call."""
    return one.kind in _ACTIVATIONS or (one.kind is InputKind.INPUT and one.per_sample)


def _numel(one: StageInput, sizes: Sizes) -> int:
    return math.prod(bind(one.shape, sizes))


def _carried_bytes(program: AttentionProgram, sizes: Sizes) -> int:
    carried = [program.outputs[position] for position in program.carried]
    return sum(math.prod(bind(output.shape, sizes)) * output.dtype.itemsize for output in carried)
