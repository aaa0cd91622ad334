"""A Hugging Face config.json as a ModelSpec: plain JSON, read without transformers, field names as in `config_names.ALIASES`.

    config.json ──text part──> sizes ──────────────────────────────> ModelSpec
                          └──> one (context, experts?) a layer ──┘

Of a model with several parts the language model is meant; what its towers cost is not in the spec.

A config does not say everything: `_NOT_IN_CONFIGS` holds what a family's code does whatever its config says. What has no closed
form (state-space layers, indexed attention, ...) is refused by name: such a model is to be traced instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.config_names import ALIASES
from disagmoe_compile.planner.model_spec import (
    AttentionKind,
    AttentionSpec,
    Context,
    LayerSpec,
    LinearAttentionSpec,
    ModelSpec,
)

Config = Mapping[str, Any]

_NOT_IN_CONFIGS: Mapping[str, Config] = {
    "afmoe": {"qk_norm": "a_head", "output_gate": True},
    "beam": {"qk_norm": "a_head", "output_gate": True},
    "gpt_oss": {"expert_bias": True, "router_bias": True, "sinks": True},
    "hunyuan_v1_moe": {"qk_norm": "a_head", "n_shared_experts": 1},
    "llama4_text": {"n_shared_experts": 1},
    "olmoe": {"qk_norm": "all_heads"},
    "qwen2_moe": {"shared_gate": True, "qkv_bias": True},
    "qwen3_moe": {"qk_norm": "a_head"},
    "qwen3_next": {"qk_norm": "a_head", "shared_gate": True, "output_gate": True},
    "qwen3_5_moe_text": {"qk_norm": "a_head", "shared_gate": True, "output_gate": True},
}

_NO_PLAIN_EXPERTS: Mapping[str, str] = {
    "doge": "its experts are single neurons",
    "jetmoe": "its attention has experts too",
}

_BLOCKS = ("attn_config", "ffn_config")

_CONTEXTS: Mapping[str, Context] = {
    "full_attention": Context.FULL,
    "attention": Context.FULL,
    "sliding_attention": Context.SLIDING,
    "chunked_attention": Context.CHUNKED,
    "linear_attention": Context.LINEAR,
}

# Fields of layers that are no softmax or gated-delta attention, or that compute more than attention and an MLP.
_NO_CLOSED_FORM = (
    "mamba_d_state", "ssm_state_size", "index_topk", "index_topk_blocks", "indexer_budget", "zero_expert_num",
    "hidden_size_per_layer_input", "loop_layer_index_start",
)  # fmt: skip


def load_config_file(path: Path) -> ModelSpec:
    """The model of a config.json, named after its file or, if that is called config.json, after its folder.

    Raises InputError naming the file, and the field that is missing or impossible.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read the model file {str(path)!r}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"model file {str(path)!r}: not JSON, {error}") from error
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    try:
        return spec_from_config(document, name=name)
    except InputError as error:
        raise InputError(f"model file {str(path)!r}: {error}") from error


def spec_from_config(document: object, *, name: str) -> ModelSpec:
    """From the parsed JSON of a config.json. Raises InputError."""
    config = _text_part(document)
    expert_hidden = _size(config, "expert_hidden", "intermediate_size", "ffn_hidden_size")
    layers = _layers(config)
    main = _attention(config)
    return ModelSpec(
        name=name,
        hidden=_size(config, "hidden_size"),
        vocab=_size(config, "vocab_size"),
        attention=main,
        layers=tuple(
            LayerSpec(context, has_experts, _own_attention(config, index, context, main))
            for index, (context, has_experts) in enumerate(layers)
        ),
        num_experts=_size(config, "num_experts"),
        top_k=_size(config, "top_k"),
        expert_hidden=expert_hidden,
        shared_hidden=_shared_hidden(config, expert_hidden),
        shared_gate=bool(config.get("shared_gate")),
        dense_hidden=_dense_hidden(config),
        window=_size(config, "sliding_window", "sliding_window_size", default=0) or None,
        chunk=_size(config, "attention_chunk_size", default=0) or None,
        linear=_linear_attention(config, layers),
        gated_mlp="relu2" not in (config.get("hidden_act"), config.get("mlp_hidden_act")),
        expert_bias=bool(config.get("expert_bias")),
        router_bias=bool(config.get("router_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        sources=("its config.json",),
    )


def _text_part(document: object) -> Config:
    """The part that has experts, its blocks of fields opened (DBRX), with what its family's code adds."""
    if not isinstance(document, dict):
        raise InputError(f"expected a JSON object with the fields of a config, got {type(document).__name__}")
    found = _part_with_experts(document)
    if found is None:
        raise InputError(
            f"no experts: none of {', '.join(ALIASES['num_experts'])} is set; this is no mixture-of-experts model"
        )
    config = {"tie_word_embeddings": document.get("tie_word_embeddings"), **found}
    family = str(config.get("model_type"))
    if family in _NO_PLAIN_EXPERTS:
        raise InputError(
            f"{family}: {_NO_PLAIN_EXPERTS[family]}, which has no closed form here; trace the model instead"
        )
    for field in _NO_CLOSED_FORM:
        if config.get(field):
            raise InputError(f"layers with {field!r} have no closed form here; trace the model instead")
    return {**_NOT_IN_CONFIGS.get(family, {}), **config}


def _part_with_experts(config: Config) -> dict[str, Any] | None:
    """The config or, of a model with several parts, that of the language model, which may lie deeper."""
    blocks = [block for name in _BLOCKS if isinstance(block := config.get(name), dict)]
    opened = {name: value for fields in (config, *blocks) for name, value in fields.items()}
    if any(opened.get(alias) for alias in ALIASES["num_experts"]):
        return opened
    inner = (_part_with_experts(part) for part in config.values() if isinstance(part, dict))
    return next((part for part in inner if part is not None), None)


def _size(config: Config, common: str, *more: str, default: int | None = None) -> int:
    """The first of a common name's fields, and of `more`, that the config has: a whole number of at least 1, of at least 0 where
    that is the default. Raises InputError naming the field, or all of its names where none is there and there is no default.
    """
    names = (*ALIASES.get(common, (common,)), *more)
    least = 0 if default == 0 else 1
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        return value
    if default is None:
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise InputError(f"missing field {names[0]!r}{others}")
    return default


def _shared_hidden(config: Config, expert_hidden: int) -> int:
    """Width of a layer's shared experts together: given as a width, or as a number of experts."""
    width = _size(config, "shared_hidden", default=0)
    return width or _size(config, "shared_experts", default=0) * expert_hidden


def _dense_hidden(config: Config) -> int:
    special = ("dense_intermediate_size", "prefix_dense_intermediate_size", "intermediate_size_mlp")
    return next((_size(config, n) for n in special if config.get(n)), 0) or _size(
        config, "dense_hidden", default=0
    )


def _attention(config: Config) -> AttentionSpec:
    heads = _size(config, "n_heads")
    has_bias = bool(config.get("attention_bias"))
    if config.get("kv_lora_rank"):
        q_lora, kv_lora = _size(config, "q_lora_rank", default=0), _size(config, "kv_lora_rank")
        return AttentionSpec(
            AttentionKind.MLA,
            heads,
            heads,
            q_lora_rank=q_lora,
            kv_lora_rank=kv_lora,
            qk_nope_head_dim=_size(config, "qk_nope_head_dim"),
            qk_rope_head_dim=_size(config, "qk_rope_head_dim", default=0),
            v_head_dim=_size(config, "v_head_dim"),
            norm_elements=q_lora + kv_lora,
        )
    kv_heads = _size(config, "n_kv_heads", "kv_n_heads", default=heads)
    head_dim = _size(config, "head_dim", default=0) or _size(config, "hidden_size") // heads
    uses_norm = config.get("qk_norm") or ("a_head" if config.get("use_qk_norm") else None)
    norm_heads = {"a_head": 2, "all_heads": heads + kv_heads}.get(str(uses_norm), 0)
    return AttentionSpec(
        AttentionKind.MHA if kv_heads == heads else AttentionKind.GQA,
        heads,
        kv_heads,
        head_dim,
        v_head_dim=_size(config, "v_head_dim", default=0),
        qkv_bias=has_bias or bool(config.get("qkv_bias")),
        output_bias=has_bias,
        output_gate=bool(config.get("output_gate")),
        sinks=bool(config.get("sinks")),
        norm_elements=norm_heads * head_dim,
    )


def _own_attention(config: Config, index: int, context: Context, main: AttentionSpec) -> AttentionSpec | None:
    """Attention of one layer where its sizes are its own: in a table by layer, or in fields for layers with a window."""
    own: dict[str, Any] = {}
    if context is Context.SLIDING:
        own |= {name.removeprefix("swa_"): value for name, value in config.items() if name.startswith("swa_")}
    heads = config.get("num_attention_heads_per_layer")
    if isinstance(heads, Sequence):
        own["num_attention_heads"] = heads[index]
    tables = config.get("per_layer_config")
    if isinstance(tables, Mapping):
        own |= next((table for layer, table in tables.items() if int(layer) == index), {})
    shape = _attention({**config, **own}) if own else main
    return None if shape == main else shape


def _linear_attention(config: Config, layers: Sequence[tuple[Context, bool]]) -> LinearAttentionSpec | None:
    if all(context is not Context.LINEAR for context, _ in layers):
        return None
    if "linear_num_key_heads" not in config:
        raise InputError(
            "only gated-delta linear attention (linear_num_key_heads, ...) has a closed form; trace the model instead"
        )
    return LinearAttentionSpec(
        key_heads=_size(config, "linear_num_key_heads"),
        value_heads=_size(config, "linear_num_value_heads"),
        key_head_dim=_size(config, "linear_key_head_dim"),
        value_head_dim=_size(config, "linear_value_head_dim"),
        conv_kernel=_size(config, "linear_conv_kernel_dim"),
    )


def _layers(config: Config) -> list[tuple[Context, bool]]:
    """What every layer's queries see, and whether it has experts."""
    n_layers = _size(config, "n_layers")
    contexts = [_context(config, index) for index in range(n_layers)]
    return list(zip(contexts, (_has_experts(config, index) for index in range(n_layers))))


def _context(config: Config, index: int) -> Context:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        kind = _entry("layer_types", kinds, index)
        if kind not in _CONTEXTS:
            raise InputError(
                f"layer_types[{index}] is {kind!r}, which has no closed form here; trace the model instead"
            )
        return _CONTEXTS[kind]
    if config.get("full_attention_interval"):
        is_full = (index + 1) % _size(config, "full_attention_interval") == 0
        return Context.FULL if is_full else Context.LINEAR
    if config.get("attention_chunk_size"):
        uses_rope = config.get("no_rope_layers")
        interval = _size(config, "no_rope_layer_interval", default=4)
        chunked = _entry("no_rope_layers", uses_rope, index) if uses_rope else (index + 1) % interval
        return Context.CHUNKED if chunked else Context.FULL
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        pattern = _size(config, "sliding_window_pattern", default=0)
        first = _size(config, "max_window_layers", default=0) if "use_sliding_window" in config else 0
        is_full = index < first or (pattern > 0 and (index + 1) % pattern == 0)
        return Context.FULL if is_full else Context.SLIDING
    return Context.FULL


def _has_experts(config: Config, index: int) -> bool:
    """Whether layer `index` has experts: a list by layer, or a first layer and a step."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and kinds:
        return _entry("mlp_layer_types", kinds, index) != "dense"
    if isinstance(config.get("moe_layers"), list) and config["moe_layers"]:
        return index in config["moe_layers"]
    if index in (config.get("mlp_only_layers") or ()):
        return False
    first = _size(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
    last = config.get("moe_layer_end_index")
    if index < first or (isinstance(last, int) and 0 <= last < index):
        return False
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(_entry("moe_layer_freq", frequency, index))
    if index % _size(config, "moe_layer_freq", default=1):
        return False
    step = _size(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return (index + 1) % step == 0


def _entry(name: str, values: Any, index: int) -> Any:
    if not isinstance(values, list) or index >= len(values):
        raise InputError(f"{name} has no entry for layer {index}")
    return values[index]
