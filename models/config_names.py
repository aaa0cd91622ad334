"""Common names of sizes, and what the configs of Hugging Face model families call them. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"),
    "hidden_size": ("hidden_size", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "n_heads": ("num_attention_heads", "n_heads", "swa_num_attention_heads"),
    "n_kv_heads": ("num_key_value_heads", "swa_num_key_value_heads"),
    "head_dim": ("head_dim", "kv_channels", "swa_head_dim"),
    "max_positions": ("max_position_embeddings", "model_max_length", "max_seq_len"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
    ),
    "expert_hidden": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "dense_hidden": (
        "intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size",
        "prefix_dense_intermediate_size",
    ),
    "shared_hidden": (
        "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
}  # fmt: skip
