"""Tiny random models of real Hugging Face MoE architectures, found by family name, with no code per family.

A family is what transformers calls its model type: `qwen3_moe`, `gpt_oss`, `mixtral`, `deepseek_v3`, ... For
a model with several parts (`llama4`, `gemma4`) the text part is meant. Sizes are set under common names
(`num_experts`, `top_k`, `hidden_size`), which `ALIASES` maps to whatever the family's config calls them;
everything else keeps the family's own defaults, so that biases, attention sinks, shared experts and router
styles are those of the real model. A family of images and text whose text part is no model of its own is built
whole; fed text alone it is a causal LM.

What an initialisation leaves at zero (biases, the correction of router scores) is random here: a zero would
hide a fault in whatever reads it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_names import ALIASES
from disagmoe_compile.models.hf_configs import (
    config_class_of,
    fields_of,
    named_kinds,
    parts_of,
    text_class,
    text_config,
    transformers_package,
)
from disagmoe_compile.models.hf_families import families, language_model, resolve
from disagmoe_compile.models.hf_sizes import tiny_values

__all__ = ["build", "families", "layer_kinds", "tiny_config"]

_ZERO_INITIAL_STD = 0.02


def build(
    family: str,
    *,
    n_layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> tuple[torch.nn.Module, Any]:
    """A randomly initialised causal LM of `family` in train mode, and its config.

    The caller's random state is left alone. By default 2 layers, hidden 64, 8 experts, top-2, 4 heads of 16,
    vocabulary 256 (one token a byte); a family that allows one top-k alone keeps it. From 3 layers on, a family
    whose real models start with a dense layer does so here. `overrides` are common names (`ALIASES`) or fields
    of the family's config. Raises InputError for an unknown family or override, and where transformers is missing.
    """
    config = tiny_config(family, n_layers=n_layers, **overrides)
    model_class = getattr(transformers_package(), str(language_model(resolve(family))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _randomise_zeros(model, text_config(config))
    return model.to(dtype).train(), config


def tiny_config(family: str, *, n_layers: int = 2, **overrides: Any) -> Any:
    """The config `build` uses."""
    config_class = config_class_of(resolve(family))
    values = tiny_values(config_class, n_layers, _more_kinds(resolve(family)))
    _override(family, config_class, values, overrides)
    return _valid_config(config_class, values, keep_top_k="top_k" in overrides)


def layer_kinds(family: str) -> int:
    """How many kinds of layer the family has: with as many layers, a tiny model has each."""
    kinds = getattr(text_config(tiny_config(family, n_layers=8)), "layer_types", None)
    return len(set(kinds)) if kinds else 1


def _valid_config(config_class: Any, values: Mapping[str, Any], *, keep_top_k: bool = False) -> Any:
    """The config; with the family's own top-k where its validator refuses ours."""
    try:
        return config_class(**values)
    except Exception:
        fixed = _without(values, ALIASES["top_k"])
        if keep_top_k or fixed == values:
            raise
        return config_class(**fixed)


@cache
def _more_kinds(family: str) -> tuple[str, ...]:
    """Kinds of layer beside the one that the bare default config has; released checkpoints mix them.

    Those that the family's code names and that run.
    """
    config_class = config_class_of(family)
    text = text_class(config_class)
    if "layer_types" not in fields_of(text) or len(set(text().layer_types or ())) > 1:
        return ()
    working = [kind for kind in named_kinds(text) if _runs(family, (kind,), use_cache=False)]
    while working and not _runs(family, tuple(working)):
        working.pop()  # runs alone and without a cache only
    return tuple(working)


def _runs(family: str, kinds: tuple[str, ...], **options: Any) -> bool:
    """Whether a tiny model whose layers take these kinds in turn does one forward."""
    config_class = config_class_of(family)
    with torch.random.fork_rng(devices=[]):
        try:
            config = _valid_config(config_class, tiny_values(config_class, 1 + len(kinds), kinds))
            model = getattr(transformers_package(), str(language_model(family)))(config)
            model(input_ids=torch.arange(24).view(2, 12), **options)
        except Exception:  # not a kind of this family's layers
            return False
    return True


def _override(family: str, config_class: Any, values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Sets each override wherever its field is: the config itself, its text part, or any nested config."""
    places = [(values, fields_of(config_class))]
    parts = parts_of(config_class)
    places += [(values[name], fields_of(part)) for name, part in parts.items() if name in values]
    if "text_config" in values:
        places = [place for place in places if place[0] in (values, values["text_config"])]
    for name, value in overrides.items():
        found = False
        for place, known in places:
            targets = [name] if name in known else [n for n in ALIASES.get(name, ()) if n in known]
            place.update(dict.fromkeys(targets, value))
            found = found or bool(targets)
        if not found:
            names = {*ALIASES}.union(*(known for _, known in places))
            near = difflib.get_close_matches(name, sorted(names), n=3)
            raise InputError(
                f"the config of {family} has no field {name!r}"
                + (f"; near names: {', '.join(near)}" if near else f"; common names: {', '.join(ALIASES)}")
            )


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The same arguments without some fields, in nested configs too."""
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in names
    }


def _randomise_zeros(model: torch.nn.Module, config: Any) -> None:
    """Parameters that are all zero, and buffers with a zero for every expert."""
    experts = {getattr(config, name) for name in ALIASES["num_experts"] if getattr(config, name, None)}
    experts |= {count + getattr(config, "zero_expert_num", 0) for count in experts}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=_ZERO_INITIAL_STD)
        for buffer in model.buffers():
            per_expert = buffer.dim() > 0 and buffer.shape[-1] in experts
            if per_expert and buffer.is_floating_point() and not buffer.any():
                buffer.normal_(std=_ZERO_INITIAL_STD)
