from __future__ import annotations

from typing import Any

import pytest
from specs import EVERY_KIND, spec

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.model_spec import (
    AttentionKind,
    AttentionSpec,
    Context,
    LinearAttentionSpec,
    layer_pattern,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"expert_hidden": 1.5}, "expert_hidden must be a whole number of at least 1, got 1.5"),
        ({"vocab": True}, "vocab must be a whole number"),
        ({"top_k": 9}, "top_k 9 is more than the 8 experts"),
        ({"window": 0}, "window"),
        ({"shared_hidden": -1}, "shared_hidden must be a whole number of at least 0, got -1"),
        ({"layers": ()}, "none of the 0 layers has experts"),
        ({"layers": layer_pattern(2, first_dense=1)}, "dense_hidden is missing"),
        ({"layers": layer_pattern(2, contexts=[Context.SLIDING])}, "window is missing"),
        ({"layers": layer_pattern(2, contexts=[Context.CHUNKED])}, "chunk is missing"),
        ({"layers": layer_pattern(2, contexts=[Context.LINEAR])}, "sizes of linear attention"),
    ],
)
def test_an_impossible_model_is_refused_naming_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        spec(**change)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kind": AttentionKind.GQA, "heads": 5, "kv_heads": 2, "head_dim": 8}, "5 heads cannot share 2"),
        ({"kind": AttentionKind.GQA, "heads": 4, "kv_heads": 2}, "head_dim must be"),
        ({"kind": AttentionKind.MLA, "heads": 4, "kv_heads": 4, "head_dim": 8}, "kv_lora_rank must be"),
    ],
)
def test_impossible_attention_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AttentionSpec(**sizes)


def test_linear_value_heads_share_key_heads_evenly() -> None:
    with pytest.raises(InputError, match="3 value heads cannot share 2"):
        LinearAttentionSpec(key_heads=2, value_heads=3, key_head_dim=8, value_head_dim=8, conv_kernel=4)


def test_patterns_place_experts_and_contexts() -> None:
    assert EVERY_KIND["dense_first"].expert_layers == (1, 2)
    assert EVERY_KIND["alternate"].expert_layers == (1, 3)
    contexts = [layer.context for layer in layer_pattern(4, contexts=(Context.SLIDING, Context.FULL))]
    assert contexts == ["sliding", "full", "sliding", "full"]


def test_widths_of_attention() -> None:
    latent = EVERY_KIND["mla"].attention
    assert (latent.query_dim, latent.output_dim) == (4 * 24, 4 * 12)
    assert EVERY_KIND["gqa"].attention.query_dim == 96 != EVERY_KIND["gqa"].hidden
