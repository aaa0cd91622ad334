"""A config.json without transformers: the same parameters as transformers builds, and one clear line for what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_file import load_config_file, spec_from_config
from disagmoe_compile.planner.layer_costs import total_parameters
from disagmoe_compile.planner.model_spec import AttentionKind

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def contexts(**changes: Any) -> list[str]:
    return [layer.context.value for layer in spec_from_config({**SMALL, **changes}, name="m").layers]


def experts(**changes: Any) -> tuple[int, ...]:
    return spec_from_config({**SMALL, **changes}, name="m").expert_layers


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "llama4",
        "qwen3_next",
        "qwen2_moe",
        "ernie4_5_moe",
        "glm4_moe",
    ],
)
def test_parameters_are_those_of_the_model_that_transformers_builds(family: str) -> None:
    pytest.importorskip("transformers")
    from disagmoe_compile.models.hf import build

    model, config = build(family, n_layers=4)
    spec = spec_from_config(json.loads(json.dumps(config.to_dict(), default=str)), name=family)
    assert total_parameters(spec) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_experts_per_tok"]
)
def test_a_missing_field_is_named(field: str) -> None:
    config = {name: value for name, value in SMALL.items() if name != field}
    with pytest.raises(InputError, match=f"missing field '{field}'"):
        spec_from_config(config, name="m")


@pytest.mark.parametrize("value", [-64, 0, 1.5, "64", True])
def test_a_negative_or_odd_value_is_named(value: object) -> None:
    with pytest.raises(InputError, match="hidden_size must be a whole number of at least 1, got"):
        spec_from_config({**SMALL, "hidden_size": value}, name="m")


def test_the_file_is_named_in_its_errors(tmp_path: Any) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"model file '.*broken.json': not JSON"):
        load_config_file(path)
    path.write_text(json.dumps({**SMALL, "num_experts": -1}))
    with pytest.raises(
        InputError, match=r"broken.json': num_experts must be a whole number of at least 1, got -1"
    ):
        load_config_file(path)


def test_a_dense_model_is_no_model_here() -> None:
    with pytest.raises(InputError, match="no experts: none of num_experts,"):
        spec_from_config({name: value for name, value in SMALL.items() if name != "num_experts"}, name="m")


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["mamba"] * 4},
        {"index_topk": 16},
        {"model_type": "jetmoe"},
        {"layer_types": ["linear_attention"] * 4},
    ],
)
def test_layers_without_a_closed_form_are_refused_not_guessed(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="trace the model instead"):
        spec_from_config({**SMALL, **change}, name="m")


def test_the_text_part_of_a_model_with_several_parts_is_meant() -> None:
    nested = spec_from_config({"text_config": SMALL, "tie_word_embeddings": True}, name="m")
    assert nested.hidden == 64 and nested.tied_embeddings
    deeper = {"vision_config": {"hidden_size": 8}, "thinker_config": {"text_config": SMALL}}
    assert spec_from_config(deeper, name="m").hidden == 64


def test_blocks_of_fields_are_opened() -> None:
    block = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 48}
    whole = {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 99,
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": block,
    }
    spec = spec_from_config(whole, name="m")
    assert (spec.num_experts, spec.top_k, spec.expert_hidden, spec.attention.kv_heads) == (4, 2, 48, 2)


def test_kinds_of_attention() -> None:
    assert spec_from_config(SMALL, name="m").attention.kind is AttentionKind.GQA
    assert spec_from_config({**SMALL, "num_key_value_heads": 4}, name="m").attention.kind is AttentionKind.MHA
    latent = spec_from_config({**SMALL, **LATENT}, name="m").attention
    assert latent.is_latent and latent.q_lora_rank == 0 and latent.query_dim == 96


def test_what_queries_see_layer_by_layer() -> None:
    assert contexts() == ["full"] * 4
    assert contexts(sliding_window=8) == ["sliding"] * 4
    assert contexts(sliding_window=8, use_sliding_window=False) == ["full"] * 4
    assert contexts(sliding_window=8, sliding_window_pattern=2) == ["sliding", "full"] * 2
    assert contexts(attention_chunk_size=8) == ["chunked"] * 3 + ["full"]
    assert contexts(attention_chunk_size=8, no_rope_layers=[1, 0, 1, 0]) == ["chunked", "full"] * 2
    assert (
        contexts(sliding_window=8, layer_types=["full_attention", "sliding_attention"] * 2)
        == ["full", "sliding"] * 2
    )


def test_which_layers_have_experts() -> None:
    assert experts() == (0, 1, 2, 3)
    assert experts(first_k_dense_replace=1) == (1, 2, 3)
    assert experts(first_k_dense_replace=1, moe_layer_freq=2) == (2,)
    assert experts(moe_layer_freq=[0, 1, 1, 0]) == (1, 2)
    assert experts(decoder_sparse_step=2) == (1, 3)
    assert experts(mlp_only_layers=[0, 3]) == (1, 2)
    assert experts(interleave_moe_layer_step=2) == (1, 3)
    assert experts(moe_layers=[2]) == (2,)
    assert experts(moe_layer_start_index=1, moe_layer_end_index=2) == (1, 2)
    assert experts(mlp_layer_types=["dense", "sparse", "sparse", "dense"]) == (1, 2)


def test_a_list_that_is_too_short_is_named() -> None:
    with pytest.raises(InputError, match="layer_types has no entry for layer 1"):
        contexts(layer_types=["full_attention"])


def test_shared_experts_as_a_number_or_as_a_width() -> None:
    assert spec_from_config({**SMALL, "n_shared_experts": 2}, name="m").shared_hidden == 64
    assert spec_from_config({**SMALL, "shared_expert_intermediate_size": 48}, name="m").shared_hidden == 48


def test_layers_with_their_own_attention_sizes() -> None:
    spec = spec_from_config(
        {**SMALL, "sliding_window": 8, "sliding_window_pattern": 2, "swa_num_key_value_heads": 4}, name="m"
    )
    own = [layer.attention for layer in spec.layers]
    assert own[0] is not None and own[0].kv_heads == 4 and own[1] is None
    per_layer = spec_from_config({**SMALL, "per_layer_config": {"02": {"num_attention_heads": 8}}}, name="m")
    assert [layer.attention.heads if layer.attention else None for layer in per_layer.layers] == [
        None,
        None,
        8,
        None,
    ]


def test_a_plain_mlp_has_two_matrices() -> None:
    assert not spec_from_config({**SMALL, "hidden_act": "relu2"}, name="m").gated_mlp
