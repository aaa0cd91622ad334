"""Runs the programs of a model by hand, in order, in one process: the meaning that every executor must
reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from disagmoe_compile.passes.captured import CapturedGraph
from disagmoe_compile.passes.experts_op import experts
from disagmoe_compile.passes.program import ExpertsProgram, InputKind, ModelPrograms, StageInput, bind


def run_programs(
    captured: CapturedGraph, programs: ModelPrograms, args: Sequence[Any], n_microbatches: int
) -> tuple[torch.Tensor, list[Mapping[int, torch.Tensor]]]:
    """(loss over all micro-batches, model outputs of each micro-batch by flat index)."""
    assert programs.loss is not None
    whole = captured.sizes(args)
    denominators = programs.loss.denominators(*(args[i.position] for i in programs.loss.inputs))
    loss: torch.Tensor | float = 0.0
    outputs = []
    for index in range(n_microbatches):
        sizes = dict(whole)
        if programs.batch_symbol is not None:
            sizes[programs.batch_symbol] = whole[programs.batch_symbol] // n_microbatches
        numerators, found = _microbatch(programs, args, sizes, index)
        outputs.append(found)
        for numerator, denominator, coefficient in zip(numerators, denominators, programs.loss.coefficients):
            loss = loss + coefficient * numerator / denominator
    assert isinstance(loss, torch.Tensor)
    return loss.to(programs.loss.dtype), outputs


def _microbatch(
    programs: ModelPrograms, args: Sequence[Any], sizes: Mapping[sympy.Symbol, int], index: int
) -> tuple[list[torch.Tensor], Mapping[int, torch.Tensor]]:
    found: dict[int, torch.Tensor] = {}
    combined: torch.Tensor | None = None
    carried: list[torch.Tensor] = []
    for program in programs.attention:
        inputs = [_input(i, args, sizes, index, combined, carried) for i in program.inputs]
        results = program.module(*inputs)
        check_outputs(program.outputs, results, sizes, inputs)
        found.update({flat: results[position] for flat, position in program.model_outputs.items()})
        carried = [results[position] for position in program.carried]
        if program.dispatch is None:
            return [results[position] for position in program.loss_numerators], found
        d = program.dispatch
        dispatched = [results[p] for p in (d.tokens, d.token_ids, d.expert_ids, d.weights)]
        combined = run_experts(programs.experts[program.boundary], dispatched, args)
    raise AssertionError("the last attention program is the head")


def run_experts(
    program: ExpertsProgram, dispatched: Sequence[torch.Tensor], args: Sequence[Any]
) -> torch.Tensor:
    params = [
        torch.stack([args[one.position] for one in param.inputs])
        if param.is_separate
        else args[param.inputs[0].position].view(param.shape)
        for param in program.params
    ]
    return experts(*dispatched, *params, function=program.function, num_experts=program.num_experts)


def _input(
    stage_input: StageInput,
    args: Sequence[Any],
    sizes: Mapping[sympy.Symbol, int],
    index: int,
    combined: torch.Tensor | None,
    carried: Sequence[torch.Tensor],
) -> Any:
    if stage_input.kind is InputKind.COMBINED:
        return combined
    if stage_input.kind is InputKind.CARRIED:
        return carried[stage_input.position]
    if stage_input.kind is InputKind.SYMBOL:
        return bind(stage_input.shape, sizes)[0]
    arg = args[stage_input.position]
    if stage_input.per_sample:
        size = bind(stage_input.shape, sizes)[0]
        return arg.narrow(0, index * size, size)
    return arg


def check_outputs(
    declared: Sequence[Any], results: Sequence[Any], sizes: Mapping[sympy.Symbol, int], inputs: Sequence[Any]
) -> None:
    """Every output has its declared shape and dtype, is contiguous, and shares no storage with an input or
    another output."""
    storages = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor) and x.numel()}
    for spec, result in zip(declared, results, strict=True):
        assert tuple(result.shape) == bind(spec.shape, sizes), (spec, result.shape)
        assert result.dtype == spec.dtype and result.requires_grad == spec.requires_grad, (
            spec,
            result.dtype,
            result.requires_grad,
        )
        assert result.is_contiguous(), spec
        if result.numel():
            assert result.untyped_storage().data_ptr() not in storages, f"{spec.name} shares its storage"
            storages.add(result.untyped_storage().data_ptr())
