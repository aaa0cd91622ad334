"""Tiny sizes for the config of any family: the common ones under whatever names it has, and what must fit them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from disagmoe_compile.models.config_names import ALIASES
from disagmoe_compile.models.hf_configs import code_of, fields_of, parts_of, text_class

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
# Names in vision and audio towers and in blocks of fields, beside those of `ALIASES`.
_NAMES_IN_PARTS: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("depth", "encoder_layers"),
    "n_heads": ("num_heads", "encoder_attention_heads"),
    "n_kv_heads": ("kv_n_heads",),
}
# What released checkpoints' configs carry beside the fields that their class declares.
_UNDECLARED: Mapping[str, Any] = {"rope_theta": 10000.0}


def tiny_values(config_class: Any, n_layers: int, more_kinds: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of the config, nested configs as dicts."""
    known = fields_of(config_class)
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
    for name, part in parts_of(config_class).items():
        values[name] = tiny_values(part, n_layers, more_kinds)
        if part is not text_class(config_class) and not _accepts(part, values[name]):
            values[name] = _accepted(part, values[name])
        if text_class(config_class) is config_class:  # a block of the text model's own fields
            values[name] |= {field: value for field, value in _UNDECLARED.items() if field not in known}
    return values


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
    if 'kwargs.pop(f"swa_{name}"' not in code_of(config_class) or "kv_lora_rank" not in values:
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
    if isinstance(rope, dict) and "mrope_section" in code_of(config_class):
        rotary = values.get("qk_rope_head_dim") or TINY["head_dim"] * rope.get("partial_rotary_factor", 1.0)
        literal = re.search(r"mrope_section[^\[\n]*\[(\d+), (\d+), (\d+)\]", code_of(config_class))
        sections = rope.get("mrope_section") or (list(literal.groups()) if literal else [0, 1, 1])
        half, odd = int(rotary) // 2, next(i for i in range(3) if sections.count(sections[i]) != 2)
        tiny = [half - 2 * (half // 3) if i == odd else half // 3 for i in range(3)]
        found["rope_parameters"] = {**rope, "mrope_section": tiny}
    return found


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
