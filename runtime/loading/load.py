"""`load_safetensors` and `init_weights`: values for a model that no rank holds whole.

Both are called on every rank, after the model is built (on the meta device, or anywhere) and before its first call. What can be
wrong with a checkpoint is found at once, on headers alone; values are read at the first call, each rank its own. In one process
they are read at once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from disagmoe_compile.errors import InputError, UnsupportedModelError
from disagmoe_compile.runtime import retrace
from disagmoe_compile.runtime.binding import holder_of
from disagmoe_compile.runtime.loading.checkpoint_files import CheckpointFiles, Reader, open_checkpoint
from disagmoe_compile.runtime.loading.hf_names import is_pretrained, recipes_of
from disagmoe_compile.runtime.loading.module_init import Init, InitialValues, initialise_buffers
from disagmoe_compile.runtime.loading.recipes import CheckpointValues, Recipe, Stored, check_recipe
from disagmoe_compile.runtime.pending import Values, fill, withhold
from disagmoe_compile.runtime.process_group import several_ranks

_NAMES_SHOWN = 3


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, init: Init | None = None) -> None:
    """Takes the model's parameters and buffers from safetensors files: each rank reads its own parameters and experts, no more.

    `path`: a local folder as Hugging Face has it, or one file, that every rank can read. Names are the model's; for a model of
    transformers also those that `from_pretrained` takes, experts one by one included. Floats are cast to the model's type.
    Buffers that no file holds (`inv_freq`) are computed by the module's own initialisation, or by `init(module)`.

    Raises InputError for tensors that are missing, left over, damaged or of another shape, UnsupportedModelError for buffers
    that nothing initialises.
    """
    module = _checked(model)
    files = open_checkpoint(Path(path))
    found, unused = recipes_of(module, files) if is_pretrained(module) else _by_name(module, files)
    named: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    recipes = {names[0]: tuple(found[n] for n in names if n in found) for names in named.values()}
    held = {
        name: buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name in found or _is_persistent(module, name)
    }
    _refuse(
        files,
        "has no tensor for",
        [*(n for n, some in recipes.items() if not some), *(n for n in held if n not in found)],
    )
    _refuse(files, "holds what the model has no place for:", unused)
    for name, parameter in module.named_parameters():
        for recipe in recipes[name]:
            check_recipe(name, recipe, parameter, files.path)
    for name, buffer in held.items():
        check_recipe(name, found[name], buffer, files.path)
    initialise_buffers(module, init)
    reader = Reader(files.entries)
    for name in held:
        owner, _, last = name.rpartition(".")
        target = module.get_submodule(owner)._buffers[last]
        assert target is not None
        target.copy_(found[name].read(reader, None))
    _take_from(module, CheckpointValues(files, recipes))


def init_weights(model: nn.Module, *, init: Init | None = None) -> None:
    """Initialises parameters and buffers as the model would itself, each rank keeping its own: module by module, so that no rank
    holds more than its share and one module.

    `init(module)` writes the parameters and buffers of one module; without it a model of transformers does so by its
    `_init_weights`, any other by `reset_parameters()` of its modules. Values are those that `model.apply(init)` would give the
    whole model in the same state of torch's generator, which stays as it is; every rank must be in that state
    (`torch.manual_seed`).

    Raises UnsupportedModelError naming a module that cannot initialise itself; of parameters at the first call.
    """
    module = _checked(model)
    initialise_buffers(module, init)
    _take_from(module, InitialValues(weakref.ref(module), init, torch.get_rng_state()))


def _checked(model: nn.Module) -> nn.Module:
    module: nn.Module = getattr(model, "_orig_mod", model)
    bound = next((name for name, p in module.named_parameters() if holder_of(p) is not None), None)
    if bound is not None:
        raise InputError(
            f"parameter {bound} is spread over ranks already: call this before the first call of the compiled model; afterwards "
            "model.load_state_dict takes what torch.distributed.checkpoint loads"
        )
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UnsupportedModelError(
                    f"{attribute} of {name or 'the model'} is on the meta device and no parameter or buffer, so that nothing "
                    "says what its values are: register it as a buffer"
                )
    return module


def _take_from(module: nn.Module, values: Values) -> None:
    withhold(module, values)
    if several_ranks():
        retrace.present_global_shapes()
    else:
        fill(module)


def _by_name(module: nn.Module, files: CheckpointFiles) -> tuple[dict[str, Recipe], list[str]]:
    names = set(module.state_dict()) | {name for name, _ in module.named_parameters(remove_duplicate=False)}
    recipes: Mapping[str, Recipe] = {
        key: Stored(key, entry.shape, entry.dtype) for key, entry in files.entries.items() if key in names
    }
    return dict(recipes), [key for key in files.entries if key not in names]


def _is_persistent(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last not in module.get_submodule(owner)._non_persistent_buffers_set


def _refuse(files: CheckpointFiles, what: str, names: Iterable[str]) -> None:
    """Raises InputError if there are any."""
    all_of_them = list(names)
    if all_of_them:
        shown = ", ".join(all_of_them[:_NAMES_SHOWN])
        more = f" and {len(all_of_them) - _NAMES_SHOWN} more" if len(all_of_them) > _NAMES_SHOWN else ""
        raise InputError(
            f"{files.path} {what} {shown}{more}: is it the checkpoint of this model, and complete?"
        )
