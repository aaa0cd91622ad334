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

import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_names import ALIASES

TINY: Mapping[str, int] = {
    "vocab_size": 256, "hidden_size": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16,
    "num_experts": 8, "top_k": 2, "expert_hidden": 32, "dense_hidden": 96, "shared_hidden": 32,
    "shared_experts": 1,
}  # fmt: skip

# Fields with one meaning and one name, shrunk to fit the sizes above where a config has them.
_TINY_FIELDS: Mapping[str, Any] = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 8, "sliding_window_size": 8, "attention_chunk_size": 8, "block_size": 8,
    "n_group": 2, "topk_group": 1, "num_expert_group": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8, "index_kpool": 2,
    "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "hidden_size_per_layer_input": 16,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
    "o_lora_rank": 16, "o_groups": 2, "router_hidden_size": 32,
    "moe_layer_start_index": 0, "interleave_moe_layer_step": 1, "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2, "attn_layer_offset": 1,
    "zero_expert_num": 4, "clip_qkv": 8.0, "out_hidden_size": 64,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "is_moe": True, "enable_moe_block": True,
}  # fmt: skip

# Widths under names of a family's own, by how the name ends: `moe_hidden_size`, `projector_hidden_size`.
_TINY_ENDINGS: Mapping[str, int] = {"_hidden_size": 64, "_lora_rank": 16}
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
_ZERO_INITIAL_STD = 0.02
# Names in vision and audio towers and in blocks of fields, beside those of `ALIASES`.
_NAMES_IN_PARTS: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("depth", "encoder_layers"),
    "n_heads": ("num_heads", "encoder_attention_heads"),
    "n_kv_heads": ("kv_n_heads",),
}
# What released checkpoints' configs carry beside the fields that their class declares.
_UNDECLARED: Mapping[str, Any] = {"rope_theta": 10000.0}


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
    model_class = getattr(_transformers(), str(_language_model(_resolve(family))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _randomise_zeros(model, _text_config(config))
    return model.to(dtype).train(), config


def tiny_config(family: str, *, n_layers: int = 2, **overrides: Any) -> Any:
    """The config `build` uses."""
    config_class = _config_class(_resolve(family))
    values = _tiny_values(config_class, n_layers, _more_kinds(_resolve(family)))
    _override(family, config_class, values, overrides)
    return _valid_config(config_class, values, keep_top_k="top_k" in overrides)


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
    config_class = _config_class(family)
    text = _text_class(config_class)
    if "layer_types" not in _fields(text) or len(set(text().layer_types or ())) > 1:
        return ()
    working = [kind for kind in _named_kinds(text) if _runs(family, (kind,), use_cache=False)]
    while working and not _runs(family, tuple(working)):
        working.pop()  # runs alone and without a cache only
    return tuple(working)


def _runs(family: str, kinds: tuple[str, ...], **options: Any) -> bool:
    """Whether a tiny model whose layers take these kinds in turn does one forward."""
    config_class = _config_class(family)
    with torch.random.fork_rng(devices=[]):
        try:
            config = _valid_config(config_class, _tiny_values(config_class, 1 + len(kinds), kinds))
            model = getattr(_transformers(), str(_language_model(family)))(config)
            model(input_ids=torch.arange(24).view(2, 12), **options)
        except Exception:  # not a kind of this family's layers
            return False
    return True


@cache
def families() -> tuple[str, ...]:
    """Every family of the installed transformers that `build` accepts, sorted. Takes seconds."""
    causal, both = _model_names()
    names = sorted({*causal, *both})
    return tuple(name for name in names if _names_experts(name) and _language_model(name) is not None)


def _names_experts(family: str) -> bool:
    """Whether the text of its config has what `_routes` asks for, or takes fields from another family's: importing the configs
    of all the others would cost more than everything else here."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(inspect.getfile(_transformers())).parent / "models" / model_type_to_module_name(family)
    text = "".join(file.read_text() for file in folder.glob("configuration_*.py"))
    if re.search(r"^class \w+\((?!Pre[Tt]rained)\w+Config\)", text, re.MULTILINE):
        return True
    return all(
        any(re.search(rf"\b{name}\b", text) for name in ALIASES[common])
        for common in ("num_experts", "top_k")
    )


def layer_kinds(family: str) -> int:
    """How many kinds of layer the family has: with as many layers, a tiny model has each."""
    kinds = getattr(_text_config(tiny_config(family, n_layers=8)), "layer_types", None)
    return len(set(kinds)) if kinds else 1


def _tiny_values(config_class: Any, n_layers: int, more_kinds: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of the config, nested configs as dicts."""
    known = _fields(config_class)
    values: dict[str, Any] = {}
    for common, size in {"n_layers": n_layers, **TINY}.items():
        names = (*ALIASES[common], *_NAMES_IN_PARTS.get(common, ()))
        values |= {name: size for name in names if name in known}
    if not any(name in known for name in ALIASES["expert_hidden"]):
        values |= {name: TINY["expert_hidden"] for name in ("intermediate_size",) if name in known}
    for name, value in _TINY_FIELDS.items():
        values |= {field: value for field in (name, f"swa_{name}") if field in known}
    values |= {name: min(1, n_layers // 3) for name in _DENSE_FIRST if name in known}
    if "kv_lora_rank" in known:  # latent attention: no grouped keys, and head_dim is the rotary part
        latent = {"num_key_value_heads": TINY["n_heads"], "head_dim": _TINY_FIELDS["qk_rope_head_dim"]}
        values |= {name: value for name, value in latent.items() if name in known}
    if "num_hidden_layers" in known:
        values |= _layer_lists(config_class, known, n_layers, more_kinds)
    values |= _own_widths(config_class, known, values)
    values |= _sections(config_class, known, values)
    values |= _sliding_layers(config_class, values)
    for name, part in _parts(config_class).items():
        values[name] = _tiny_values(part, n_layers, more_kinds)
        if part is not _text_class(config_class) and not _accepts(part, values[name]):
            values[name] = _accepted(part, values[name])
        if _text_class(config_class) is config_class:  # a block of the text model's own fields
            values[name] |= {field: value for field, value in _UNDECLARED.items() if field not in known}
    return values


def _accepted(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a tower with constraints of its own takes of them, one after another: no text reaches it."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if _accepts(config_class, {**kept, name: value}):
            kept[name] = value
    return kept


def _accepts(config_class: Any, values: Mapping[str, Any]) -> bool:
    try:
        config_class(**values)
    except Exception:  # a validator's
        return False
    return True


def _own_widths(config_class: Any, known: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Wide fields that neither list above names, and a tower's list of one width a stage."""
    found: dict[str, Any] = {}
    default = vars(config_class())
    for name in sorted(set(known) - set(values)):
        value = default.get(name)
        size = next((size for ending, size in _TINY_ENDINGS.items() if name.endswith(ending)), None)
        if size is not None and isinstance(value, int) and value > size:
            found[name] = size
        if name == "hidden_sizes" and isinstance(value, list | tuple):
            found[name] = [width * TINY["hidden_size"] // max(value) for width in value]
    return found


def _sliding_layers(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of latent attention in layers with a window, where the config reads them without declaring them."""
    if 'kwargs.pop(f"swa_{name}"' not in _code(config_class) or "kv_lora_rank" not in values:
        return {}
    latent = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    names = (*latent, "num_attention_heads", "num_key_value_heads")
    whole = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]
    return {"swa_head_dim": whole} | {f"swa_{name}": values[name] for name in names if name in values}


def _sections(config_class: Any, known: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that must fit the sizes or the family: a list of one size a kind, a dimension that is absent, the
    sections of a rotary embedding."""
    found: dict[str, Any] = {}
    default = vars(config_class())
    for name, value in values.items():
        if isinstance(value, int) and isinstance(default.get(name), list):
            found[name] = [value] * len(default[name])
        if name.endswith("_dim") and default.get(name) == 0:
            found[name] = 0
    rope = default.get("rope_parameters") if "rope_parameters" in known else None
    if isinstance(rope, dict) and "mrope_section" in _code(config_class):
        rotary = values.get("qk_rope_head_dim") or TINY["head_dim"] * rope.get("partial_rotary_factor", 1.0)
        literal = re.search(r"mrope_section[^\[\n]*\[(\d+), (\d+), (\d+)\]", _code(config_class))
        sections = rope.get("mrope_section") or (list(literal.groups()) if literal else [0, 1, 1])
        half, odd = int(rotary) // 2, next(i for i in range(3) if sections.count(sections[i]) != 2)
        tiny = [half - 2 * (half // 3) if i == odd else half // 3 for i in range(3)]
        found["rope_parameters"] = {**rope, "mrope_section": tiny}
    return found


@cache
def _parts(config_class: Any) -> Mapping[str, Any]:
    """Nested configs by field: the text part, a vision tower, or a block of fields of their own."""
    if not getattr(config_class, "sub_configs", None):
        return {}
    default = config_class()
    parts = {name: type(getattr(default, name, None)) for name in config_class.sub_configs}
    return {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}


def _text_class(config_class: Any) -> Any:
    return _parts(config_class).get("text_config", config_class)


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


@cache
def _fields(config_class: Any) -> frozenset[str]:
    if not dataclasses.is_dataclass(config_class):
        return frozenset()
    return frozenset(f.name for f in dataclasses.fields(config_class) if not f.name.startswith("_"))


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


def _override(family: str, config_class: Any, values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Sets each override wherever its field is: the config itself, its text part, or any nested config."""
    places = [(values, _fields(config_class))]
    parts = _parts(config_class)
    places += [(values[name], _fields(part)) for name, part in parts.items() if name in values]
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


def _layer_lists(
    config_class: Any, known: Collection[str], n_layers: int, more_kinds: Collection[str]
) -> dict[str, Any]:
    """Lists with an entry a layer: each kind of layer in turn, dense ones only at first."""
    default, values = config_class(), {}
    dense_first = min(1, n_layers // 3)
    if "layer_types" in known:
        kinds = [*(default.layer_types or ()), *more_kinds]
        distinct = list(dict.fromkeys(kinds)) or ["full_attention"]
        values["layer_types"] = [distinct[i % len(distinct)] for i in range(n_layers)]
    if "mlp_layer_types" in known:
        kinds = default.mlp_layer_types
        if not kinds or "sparse" in kinds:
            dense = dense_first if kinds and kinds[0] == "dense" else 0
            values["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (n_layers - dense)
    if "mlp_only_layers" in known:
        values["mlp_only_layers"] = [0] * dense_first if 0 in (default.mlp_only_layers or ()) else []
    return values


def _named_kinds(config_class: Any) -> tuple[str, ...]:
    """Kinds of layer that the family's code names."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    return tuple(kind for kind in ALLOWED_ATTN_LAYER_TYPES if f'"{kind}"' in _code(config_class))


@cache
def _code(config_class: Any) -> str:
    """Source of the family's config and model."""
    config_file = Path(inspect.getfile(config_class))
    modeling = config_file.with_name(config_file.name.replace("configuration_", "modeling_", 1))
    return "".join(file.read_text() for file in (config_file, modeling) if file.exists())


@cache
def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "hf: sources need transformers; install it with: pip install 'transformers>=5,<6' safetensors"
        ) from error
    return transformers


@cache
def _model_names() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(model type -> causal-LM class, model type -> class of images and text), dense architectures included."""
    _transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    causal = {name: _first(found) for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    both = {name: _first(found) for name, found in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}
    # Some causal LMs are registered beside the models of images and text alone.
    causal |= {n: found for n, found in both.items() if n not in causal and found.endswith("ForCausalLM")}
    known = set(CONFIG_MAPPING_NAMES)
    return (
        {name: found for name, found in causal.items() if name in known},
        {
            name: found
            for name, found in both.items()
            if name in known and found.endswith("ForConditionalGeneration")
        },
    )


@cache
def _language_model(family: str) -> str | None:
    """The class that is the language model of an MoE family, None for any other name.

    A causal-LM class where there is one; else the model of images and text, unless the text part is a family itself.
    """
    causal, both = _model_names()
    if family in causal and _has_experts(family):
        return causal[family]
    if family not in both:
        return None
    text = _text_class(_config_class(family))
    if text is _config_class(family) or not _routes(_fields(text)):
        return None
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(family)
    same_folder = [n for n in causal if model_type_to_module_name(n) == folder or n == text.model_type]
    return None if any(_has_experts(name) for name in same_folder) else both[family]


def _first(names: Any) -> str:
    return names if isinstance(names, str) else names[0]


def _config_class(family: str) -> Any:
    _transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


@cache
def _has_experts(family: str) -> bool:
    """Whether the config itself, not a text part of it, says how many experts there are and how many a token has."""
    try:
        config_class = _config_class(family)
    except (ImportError, KeyError):
        return False
    fields = _fields(config_class)
    if "text_config" not in fields and "text_config" not in (
        getattr(config_class, "sub_configs", None) or ()
    ):
        fields = fields.union(*(_fields(part) for part in _parts(config_class).values()))
    return _routes(fields)


def _routes(fields: Collection[str]) -> bool:
    return all(any(name in fields for name in ALIASES[common]) for common in ("num_experts", "top_k"))


def _resolve(family: str) -> str:
    """The model type of a family, a folder or a family whose MoE is in its text part."""
    for name in (family, f"{family}_text"):
        if _language_model(name) is not None:
            return name
    causal, both = _model_names()
    if family in causal:
        raise InputError(f"hf:{family} has no experts: {causal[family]} is not a mixture-of-experts model")
    near = difflib.get_close_matches(family, {*causal, *both}, n=12, cutoff=0.5)
    near = [name for name in near if _language_model(name) is not None][:5]
    raise InputError(
        f"unknown MoE family {family!r} in transformers {_transformers().__version__}; "
        f"near names: {', '.join(near) if near else 'qwen3_moe, gpt_oss, mixtral, olmoe, deepseek_v3'}"
    )
