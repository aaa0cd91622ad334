"""Models by name: public MoE architectures with their published figures and sources (`data/moe_configs.json`), or a config.json.

No torch and no transformers: `disagmoe models` and `disagmoe plan` run where neither is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_file import load_config_file
from disagmoe_compile.planner.model_spec import (
    ActiveConvention,
    AttentionKind,
    AttentionSpec,
    Context,
    LinearAttentionSpec,
    ModelSpec,
    layer_pattern,
)


@cache
def catalogue() -> Mapping[str, ModelSpec]:
    """The known models by name, in the order of the file."""
    text = resources.files("disagmoe_compile.models").joinpath("data/moe_configs.json").read_text("utf-8")
    specs = (_spec(entry) for entry in json.loads(text)["models"])
    return {spec.name: spec for spec in specs}


def find_model(name_or_path: str) -> ModelSpec:
    """By name, by a beginning of it that only one has (case does not matter), or from a Hugging Face config.json.

    Raises InputError where it is neither, naming the known models.
    """
    known = catalogue()
    wanted = name_or_path.strip().lower()
    exact = [spec for key, spec in known.items() if key.lower() == wanted]
    if exact:
        return exact[0]
    path = Path(name_or_path)
    if path.suffix == ".json" or path.exists():
        return load_config_file(path)
    matches = [spec for key, spec in known.items() if wanted and key.lower().startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    what = f"fits {', '.join(spec.name for spec in matches)}" if matches else "is not in the catalogue"
    raise InputError(
        f"model {name_or_path!r} {what}; known: {', '.join(known)}; or give a Hugging Face config.json"
    )


def _spec(entry: Mapping[str, Any]) -> ModelSpec:
    """One entry of the file, whose names are those of the vendors' configs."""
    return ModelSpec(
        name=entry["name"],
        hidden=entry["hidden_size"],
        vocab=entry["vocab_size"],
        attention=_attention(entry),
        layers=layer_pattern(
            entry["num_layers"],
            contexts=[Context(kind) for kind in entry.get("layer_contexts", ["full"])],
            first_dense=entry["first_dense_layers"],
            moe_step=entry.get("interleave_moe_layer_step", 1),
        ),
        num_experts=entry["num_experts"],
        top_k=entry["top_k"],
        expert_hidden=entry["expert_ffn_dim"],
        shared_hidden=entry["num_shared_experts"] * entry["expert_ffn_dim"],
        shared_gate=entry.get("shared_expert_gate", False),
        dense_hidden=entry["dense_ffn_dim"] or 0,
        window=entry["sliding_window"],
        chunk=entry.get("attention_chunk_size"),
        linear=_linear_attention(entry),
        gated_mlp=entry["gated_mlp"],
        expert_bias=entry.get("expert_bias", False),
        router_bias=entry.get("router_bias", False),
        tied_embeddings=entry["tie_embeddings"],
        published_total=entry["published_total_B"] * 1e9,
        published_active=entry["published_active_B"] * 1e9,
        active_convention=ActiveConvention(entry["active_convention"]),
        sources=tuple(entry["sources"]),
        notes=entry["notes"],
    )


def _attention(entry: Mapping[str, Any]) -> AttentionSpec:
    heads, kv_heads = entry["num_heads"], entry["num_kv_heads"]
    if entry["attention"] == AttentionKind.MLA:
        return AttentionSpec(
            AttentionKind.MLA,
            heads,
            kv_heads,
            q_lora_rank=entry["q_lora_rank"],
            kv_lora_rank=entry["kv_lora_rank"],
            qk_nope_head_dim=entry["qk_nope_head_dim"],
            qk_rope_head_dim=entry["qk_rope_head_dim"],
            v_head_dim=entry["v_head_dim"],
            norm_elements=entry["q_lora_rank"] + entry["kv_lora_rank"],
        )
    head_dim = entry["head_dim"]
    norms = {None: 0, "a_head": 2 * head_dim, "all_heads": (heads + kv_heads) * head_dim}
    has_bias = entry.get("attention_bias", False)
    return AttentionSpec(
        AttentionKind(entry["attention"]),
        heads,
        kv_heads,
        head_dim,
        qkv_bias=has_bias,
        output_bias=has_bias,
        output_gate=entry.get("attention_output_gate", False),
        sinks=entry.get("attention_sinks", False),
        norm_elements=norms[entry.get("qk_norm")],
    )


def _linear_attention(entry: Mapping[str, Any]) -> LinearAttentionSpec | None:
    if "linear_num_key_heads" not in entry:
        return None
    return LinearAttentionSpec(
        key_heads=entry["linear_num_key_heads"],
        value_heads=entry["linear_num_value_heads"],
        key_head_dim=entry["linear_key_head_dim"],
        value_head_dim=entry["linear_value_head_dim"],
        conv_kernel=entry["linear_conv_kernel_dim"],
    )
