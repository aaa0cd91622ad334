"""Tiny random models of real Hugging Face MoE architectures, found by family name, with no code per family.

A family is what transformers calls its model type: `qwen3_moe`, `gpt_oss`, `mixtral`, `deepseek_v3`, ... For
a model with several parts (`llama4`, `gemma4`) the text part is meant. Sizes are set under common names
(`num_experts`, `top_k`, `hidden_size`), which `ALIASES` maps to whatever the family's config calls them;
everything else keeps the family's own defaults, so that biases, attention sinks, shared experts and router
styles are those of the real model.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
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
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8,
    "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "hidden_size_per_layer_input": 16,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
    "o_lora_rank": 16, "o_groups": 2, "router_hidden_size": 32,
    "moe_layer_start_index": 0, "interleave_moe_layer_step": 1, "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "is_moe": True, "enable_moe_block": True,
}  # fmt: skip

_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")


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
    vocabulary 256 (one token a byte). From 3 layers on, a family whose real models start with a dense layer
    does so here. `overrides` are common names (`ALIASES`) or fields of the family's config. Raises InputError
    for an unknown family or override, and where transformers is missing.
    """
    config = tiny_config(family, n_layers=n_layers, **overrides)
    transformers = _transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _causal_models()[_resolve(family)])(config)
    return model.to(dtype).train(), config


def tiny_config(family: str, *, n_layers: int = 2, **overrides: Any) -> Any:
    """The config `build` uses."""
    config_class = _config_class(_resolve(family))
    fields = {f.name for f in dataclasses.fields(config_class)}
    known = {name for name in fields if not name.startswith("_")}
    values: dict[str, Any] = {}
    for common, size in {"n_layers": n_layers, **TINY}.items():
        values |= {name: size for name in ALIASES[common] if name in known}
    if not any(name in known for name in ALIASES["expert_hidden"]):
        values["intermediate_size"] = TINY["expert_hidden"]
    values |= {name: value for name, value in _TINY_FIELDS.items() if name in known}
    values |= {name: min(1, n_layers // 3) for name in _DENSE_FIRST if name in known}
    if "kv_lora_rank" in known:  # latent attention: no grouped keys, and head_dim is the rotary part
        latent = {"num_key_value_heads": TINY["n_heads"], "head_dim": _TINY_FIELDS["qk_rope_head_dim"]}
        values |= {name: value for name, value in latent.items() if name in known}
    values |= _layer_lists(config_class, known, n_layers)
    values |= _named(family, known, overrides)
    return config_class(**values)


@cache
def families() -> tuple[str, ...]:
    """Every family of the installed transformers that `build` accepts, sorted. Takes seconds."""
    return tuple(sorted(name for name in _causal_models() if _has_experts(name)))


def _named(family: str, known: set[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        targets = [name] if name in known else [n for n in ALIASES.get(name, ()) if n in known]
        if not targets:
            near = difflib.get_close_matches(name, sorted(known | set(ALIASES)), n=3)
            raise InputError(
                f"the config of {family} has no field {name!r}"
                + (f"; near names: {', '.join(near)}" if near else f"; common names: {', '.join(ALIASES)}")
            )
        values |= dict.fromkeys(targets, value)
    return values


def _layer_lists(config_class: Any, known: set[str], n_layers: int) -> dict[str, Any]:
    """Lists with an entry a layer: each kind of the real model's layers in turn, dense ones only at first."""
    default, values = config_class(), {}
    if "layer_types" in known:
        kinds = default.layer_types or ["full_attention"]
        distinct = list(dict.fromkeys(kinds))
        if distinct == ["linear_attention"]:
            distinct.append("full_attention")  # released checkpoints mix them; the bare default does not
        values["layer_types"] = [distinct[i % len(distinct)] for i in range(n_layers)]
    mlp_kinds = getattr(default, "mlp_layer_types", None)
    if "mlp_layer_types" in known and mlp_kinds and "sparse" in mlp_kinds:
        dense = min(1, n_layers // 3) if mlp_kinds[0] == "dense" else 0
        values["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (n_layers - dense)
    return values


@cache
def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            'hf: sources need transformers; install it with: pip install "disagmoe-compile[hf]"'
        ) from error
    return transformers


@cache
def _causal_models() -> Mapping[str, str]:
    """Family -> name of its causal-LM class, for every architecture (dense ones included)."""
    _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return {family: name if isinstance(name, str) else name[0] for family, name in names.items()}


def _config_class(family: str) -> Any:
    _transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def _has_experts(family: str) -> bool:
    try:
        fields = {f.name for f in dataclasses.fields(_config_class(family))}
    except (ImportError, KeyError, TypeError):
        return False
    return any(name in fields for name in ALIASES["num_experts"]) and any(
        name in fields for name in ALIASES["top_k"]
    )


def _resolve(family: str) -> str:
    """The key of `_causal_models` for a family, a folder or a family whose MoE is in its text part."""
    models = _causal_models()
    for name in (family, f"{family}_text"):
        if name in models and _has_experts(name):
            return name
    if family in models:
        raise InputError(f"hf:{family} has no experts: {models[family]} is not a mixture-of-experts model")
    near = [
        name for name in difflib.get_close_matches(family, models, n=12, cutoff=0.5) if _has_experts(name)
    ]
    raise InputError(
        f"unknown MoE family {family!r} in transformers {_transformers().__version__}; "
        f"near names: {', '.join(near[:5]) if near else 'qwen3_moe, gpt_oss, mixtral, olmoe, deepseek_v3'}"
    )
