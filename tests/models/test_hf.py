"""Tiny models: found by name, right sizes, the real architecture, clear errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from disagmoe_compile.errors import InputError
from disagmoe_compile.models import hf
from disagmoe_compile.models.hf_configs import transformers_package
from disagmoe_compile.models.hf_families import model_names

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3", "llama4"])
def test_a_family_builds_tiny_and_takes_a_step(family: str) -> None:
    model, config = hf.build(family)
    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert config.num_hidden_layers == 2
    assert sum(p.numel() for p in model.parameters()) < 400_000
    assert all(p.grad is not None for n, p in model.named_parameters() if "bias" not in n)


def test_the_default_sizes_reach_every_name_a_family_uses() -> None:
    deepseek = hf.tiny_config("deepseek_v3")
    assert (deepseek.n_routed_experts, deepseek.num_experts_per_tok, deepseek.hidden_size) == (8, 2, 64)
    mixtral = hf.tiny_config("mixtral")
    assert (mixtral.num_local_experts, mixtral.intermediate_size) == (8, 32)


def test_the_architecture_keeps_what_makes_it_special() -> None:
    model, config = hf.build("gpt_oss")
    names = {name for name, _ in model.named_parameters()}
    assert any("sinks" in name for name in names)
    assert any("experts" in name and "bias" in name for name in names)
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_two_layers_are_both_moe_and_three_start_with_a_dense_one() -> None:
    def sparse_layers(n_layers: int) -> list[bool]:
        model, _ = hf.build("deepseek_v3", n_layers=n_layers)
        return [
            any("experts" in name for name, _ in layer.named_parameters()) for layer in model.model.layers
        ]

    assert sparse_layers(2) == [True, True]
    assert sparse_layers(3) == [False, True, True]


def test_common_and_native_names_override_sizes() -> None:
    config = hf.tiny_config("mixtral", num_experts=4, top_k=1, tie_word_embeddings=True)
    assert (config.num_local_experts, config.num_experts_per_tok, config.tie_word_embeddings) == (4, 1, True)


def test_equal_seeds_give_equal_weights_and_leave_the_callers_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, _ = hf.build("qwen3_moe", seed=1)
    assert torch.equal(torch.rand(1), expected)
    second, _ = hf.build("qwen3_moe", seed=1)
    other, _ = hf.build("qwen3_moe", seed=2)
    weight = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(first.get_parameter(weight), second.get_parameter(weight))
    assert not torch.equal(first.get_parameter(weight), other.get_parameter(weight))


def test_dtype_is_applied() -> None:
    model, _ = hf.build("qwen3_moe", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_unknown_family_lists_near_names() -> None:
    with pytest.raises(InputError, match="qwen3_moe"):
        hf.build("qwen3moe")


def test_a_dense_family_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="hf:llama has no experts"):
        hf.build("llama")


def test_an_unknown_override_lists_near_names() -> None:
    with pytest.raises(InputError, match=r"no field 'num_expert'.*num_experts"):
        hf.build("qwen3_moe", num_expert=4)


def test_missing_transformers_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    transformers_package.cache_clear()
    model_names.cache_clear()
    try:
        with pytest.raises(InputError, match=r"pip install .*transformers"):
            hf.build("qwen3_moe")
    finally:
        transformers_package.cache_clear()
        model_names.cache_clear()


def test_what_an_initialisation_leaves_at_zero_is_random() -> None:
    model, _ = hf.build("deepseek_v3")
    assert all(value.any() for value in [*model.parameters(), *model.buffers()])


def test_a_family_that_allows_one_top_k_keeps_it() -> None:
    assert hf.tiny_config("zaya").num_experts_per_tok == 1


def test_kinds_of_layer_that_a_bare_config_lacks_are_built_too() -> None:
    assert set(hf.tiny_config("lfm2_moe").layer_types) == {"full_attention", "conv"}
    assert hf.layer_kinds("lara_mini") == 3


def test_a_family_of_images_and_text_is_built_whole() -> None:
    model, config = hf.build("qwen3_vl_moe", num_experts=4)
    assert config.text_config.num_experts == 4
    assert any("experts" in name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_no_family_with_experts_is_missed() -> None:
    """Every folder of transformers whose code defines experts and a causal LM has a family."""
    import transformers.models
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folders = {model_type_to_module_name(family) for family in hf.families()}
    root = Path(transformers.models.__file__).parent
    texts = {file.parent.name: file.read_text() for file in root.glob("*/modeling_*.py")}
    defining = {
        folder
        for folder, text in texts.items()
        if re.search(r"^class \w*Experts\(", text, re.M) and "ForCausalLM(" in text
    }
    assert len(defining) >= 50
    assert defining <= folders


@pytest.mark.slow
def test_every_family_of_the_installed_transformers_builds() -> None:
    ids = torch.randint(3, 256, (1, 16))
    broken = {}
    for family in hf.families():
        try:
            model, _ = hf.build(family)
            if not torch.isfinite(model(input_ids=ids, labels=ids).loss):
                broken[family] = "loss is not finite"
        except Exception as error:
            broken[family] = f"{type(error).__name__}: {error}"
    assert not broken
    assert len(hf.families()) >= 55
