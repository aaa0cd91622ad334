"""From names on disk to names of a transformers model, by transformers' own rules.

transformers 5 renames tensors while loading and stacks experts (`experts.0.gate_proj.weight` ... -> `experts.gate_up_proj`).
The rules and the operations that they name are taken from there; here they are only matched, and run on parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from disagmoe_compile.errors import InputError
from disagmoe_compile.runtime.loading.checkpoint_files import CheckpointFiles, Entry
from disagmoe_compile.runtime.loading.recipes import Converted, Recipe, Stored

_OLD_BUFFER = r"rotary_emb\.inv_freq"  # once saved with every layer; transformers computes it


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a model of transformers, without importing it."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(module).__mro__
    )


def recipes_of(model: nn.Module, files: CheckpointFiles) -> tuple[dict[str, Recipe], list[str]]:
    """Recipes by the model's names, and the names on disk that lead nowhere and that the family does not ignore either."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state = model.state_dict()
    recipes: dict[str, Recipe] = {}
    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unused = []
    for key in sorted(files.entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unused.append(key)
        elif pattern is None:
            entry = files.entries[key]
            recipes[name] = Stored(key, entry.shape, entry.dtype)
        else:
            collected.setdefault(name, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(key)
    for name, (rule, sources) in collected.items():
        recipes.update(_converted(model, name, rule, sources, files))
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), _OLD_BUFFER]
    return recipes, [key for key in unused if not any(re.search(p, key) for p in patterns)]


def _converted(
    model: nn.Module, name: str, rule: Any, sources: Mapping[str, list[str]], files: CheckpointFiles
) -> dict[str, Recipe]:
    """One recipe for each parameter that the rule makes of these tensors; tried on tensors without data first."""
    ordered = {pattern: tuple(keys) for pattern, keys in sources.items()}
    lengths = {len(keys) for keys in ordered.values()}
    keys = [key for some in ordered.values() for key in some]
    is_whole = set(ordered) == set(rule.source_patterns) and len(lengths) == 1
    try:
        tried = _run(
            model, name, rule, {p: [_meta(files.entries[k]) for k in ks] for p, ks in ordered.items()}
        )
    except Exception as error:  # whatever the operations raise for tensors that do not fit together
        raise InputError(
            f"{name} cannot be made of {keys[0]} ... {keys[-1]} in {files.path}: {error or type(error).__name__}"
        ) from error
    if not is_whole:
        counts = ", ".join(f"{len(ordered.get(p, ()))} of {p}" for p in rule.source_patterns)
        raise InputError(
            f"{name} is made of as many tensors of each kind, but {files.path} has {counts}: fetch it again"
        )

    def convert_to(target: str, tensors: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
        return _run(model, name, rule, tensors)[target]

    is_stack = _stacks(rule.operations)
    types = {files.entries[key].dtype for key in keys}
    return {
        target: Converted(
            ordered,
            lambda tensors, target=target: convert_to(target, tensors),  # type: ignore[misc]
            is_stack=is_stack,
            shape=tuple(value.shape),
            dtype=value.dtype if None not in types else None,
        )
        for target, value in tried.items()
    }


def _run(
    model: nn.Module, name: str, rule: Any, tensors: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    one = deepcopy(rule)
    for pattern, values in tensors.items():
        for value in values:
            one.add_tensor(name, name, pattern, lambda value=value: value)
    made = one.convert(name, model=model, config=model.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def _meta(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype or torch.uint8, device="meta")


def _stacks(operations: Iterable[Any]) -> bool:
    """Whether the operations stack tensors as rows of dimension 0 and leave that dimension alone afterwards."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = operations
    if not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    dims = [
        (op.dim,)
        if isinstance(op, Concatenate)
        else (op.dim0, op.dim1)
        if isinstance(op, Transpose)
        else (0,)
        for op in others
    ]
    return all(dim > 0 for some in dims for dim in some)
