"""Small models for the planner's tests, one a kind of layer."""

from __future__ import annotations

from typing import Any

from disagmoe_compile.planner.model_spec import (
    AttentionKind,
    AttentionSpec,
    Context,
    LinearAttentionSpec,
    ModelSpec,
    layer_pattern,
)

GQA = AttentionSpec(AttentionKind.GQA, heads=6, kv_heads=2, head_dim=16)
MLA = AttentionSpec(
    AttentionKind.MLA,
    heads=4,
    kv_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
LINEAR = LinearAttentionSpec(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=16, conv_kernel=4)


def spec(*, n_layers: int = 2, pattern: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    """Two layers of grouped-query attention with 8 gated experts, top-2; `pattern` are arguments of `layer_pattern`."""
    values: dict[str, Any] = {
        "name": "small",
        "hidden": 48,
        "vocab": 100,
        "attention": GQA,
        "layers": layer_pattern(n_layers, **(pattern or {})),
        "num_experts": 8,
        "top_k": 2,
        "expert_hidden": 32,
    }
    return ModelSpec(**{**values, **changes})


EVERY_KIND = {
    "gqa": spec(),
    "mla": spec(attention=MLA),
    "mla_without_q_lora": spec(
        attention=AttentionSpec(
            AttentionKind.MLA, heads=4, kv_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, v_head_dim=12
        )
    ),
    "sliding": spec(pattern={"contexts": (Context.SLIDING, Context.FULL)}, window=8),
    "chunked": spec(pattern={"contexts": (Context.CHUNKED,)}, chunk=8),
    "shared": spec(shared_hidden=64, shared_gate=True),
    "dense_first": spec(n_layers=3, pattern={"first_dense": 1}, dense_hidden=96),
    "alternate": spec(n_layers=4, pattern={"moe_step": 2}, dense_hidden=96),
    "dense_last": spec(n_layers=3, pattern={"moe_step": 2}, dense_hidden=96),
    "plain_mlp": spec(gated_mlp=False, shared_hidden=16, expert_bias=True),
    "hybrid": spec(pattern={"contexts": (Context.LINEAR, Context.FULL)}, linear=LINEAR),
    "tied": spec(tied_embeddings=True),
}
