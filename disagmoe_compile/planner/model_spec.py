"""What a mixture-of-experts transformer is to the planner: sizes, layer by layer, and who published them.

    ModelSpec
      attention   AttentionSpec         softmax attention: plain, grouped, or latent (MLA)
      linear      LinearAttentionSpec   gated-delta layers of a hybrid, where it has any
      layers      LayerSpec, ...        one a layer: what its queries see, and experts or a dense MLP

The kinds of a layer's context: `full` (causal over the sequence), `sliding` (the last `window` tokens), `chunked` (its own chunk
of `chunk` tokens), `linear` (a recurrent state; the layer is of `linear`).

No torch here: `disagmoe plan` and `disagmoe models` run without it. Counts are numbers of elements, lengths numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from disagmoe_compile.errors import InputError


class AttentionKind(StrEnum):
    """`mha`: a key-value head a query head; `gqa`: query heads share them; `mla`: keys and values from one latent vector."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


class Context(StrEnum):
    """Which earlier tokens a layer's queries see."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LINEAR = "linear"


class ActiveConvention(StrEnum):
    """What a vendor's "activated parameters" leave out: nothing, the input embedding (a lookup), or that and the head."""

    ALL = "all"
    NO_INPUT_EMBEDDING = "no_input_embedding"
    NO_EMBEDDINGS = "no_embeddings"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention of a layer, in elements.

    `head_dim` is of queries, keys and values alike (`v_head_dim`, if given, of values), but for MLA: its query and key heads are
    `qk_nope_head_dim + qk_rope_head_dim` wide, its value heads `v_head_dim`, keys and values come from `kv_lora_rank` elements
    a token, and queries from `q_lora_rank` (0: straight from the hidden state). `output_gate`: a gate as wide as the queries,
    from the query projection (Qwen3-Next). `norm_elements`: weights of the norms of queries, keys and latents in one layer.
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    sinks: bool = False
    norm_elements: int = 0

    def __post_init__(self) -> None:
        needed: tuple[str, ...] = ("heads", "kv_heads")
        if self.kind is AttentionKind.MLA:
            needed += ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        else:
            needed += ("head_dim",)
        _require_positive(self, needed)
        _require_not_negative(self, ("q_lora_rank", "qk_rope_head_dim", "v_head_dim", "norm_elements"))
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")

    @property
    def is_latent(self) -> bool:
        return self.kind is AttentionKind.MLA

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_latent else self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def query_dim(self) -> int:
        """Width of all query heads of a token, which need not be the hidden size (Qwen3, GPT-OSS, GLM)."""
        return self.heads * self.qk_head_dim

    @property
    def output_dim(self) -> int:
        """Width of the attention core's output, before the output projection."""
        return self.heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class LinearAttentionSpec:
    """A gated-delta layer (Qwen3-Next): `key_heads` queries and keys, `value_heads` values, a short convolution before both."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        _require_positive(self, ("key_heads", "value_heads", "key_head_dim", "value_head_dim", "conv_kernel"))
        if self.value_heads % self.key_heads:
            raise InputError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One transformer layer: `has_experts`, or a dense MLP of `ModelSpec.dense_hidden`; `attention` where it differs from the
    model's (MiMo, Gemma 4: other heads in layers with a window).
    """

    context: Context = Context.FULL
    has_experts: bool = True
    attention: AttentionSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model in elements and tokens; raises InputError naming the field that is missing or impossible.

    `shared_hidden` is the width of all shared experts of a layer together (0: none), `shared_gate` one more row that weighs them
    (Qwen). `gated_mlp`: three matrices a MLP, otherwise two. `expert_bias`, `router_bias`, `mlp_bias` (dense and shared MLPs)
    add biases. `published_*` are the vendor's rounded headline figures in parameters, and `active_convention` says what the
    active one leaves out.
    """

    name: str
    hidden: int
    vocab: int
    attention: AttentionSpec
    layers: tuple[LayerSpec, ...]
    num_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int = 0
    shared_gate: bool = False
    dense_hidden: int = 0
    window: int | None = None
    chunk: int | None = None
    linear: LinearAttentionSpec | None = None
    gated_mlp: bool = True
    expert_bias: bool = False
    router_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    published_total: float | None = None
    published_active: float | None = None
    active_convention: ActiveConvention = ActiveConvention.ALL
    sources: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        _require_positive(self, ("hidden", "vocab", "num_experts", "top_k", "expert_hidden"))
        _require_not_negative(self, ("shared_hidden", "dense_hidden"))
        for name, context in (("window", Context.SLIDING), ("chunk", Context.CHUNKED)):
            value = getattr(self, name)
            if value is not None:
                _require_positive(self, (name,))
            elif self._has(context):
                raise InputError(f"{name} is missing, and {context} attention layers need it")
        if self.linear is None and self._has(Context.LINEAR):
            raise InputError("linear attention layers need the sizes of linear attention")
        if self.top_k > self.num_experts:
            raise InputError(f"top_k {self.top_k} is more than the {self.num_experts} experts")
        if not self.expert_layers:
            raise InputError(f"none of the {self.n_layers} layers has experts")
        if not self.dense_hidden and len(self.expert_layers) < self.n_layers:
            raise InputError("dense_hidden is missing, and layers without experts need it")

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts: the boundaries between attention and expert stages, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_experts)

    def _has(self, context: Context) -> bool:
        return any(layer.context is context for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; enumerations by their value."""
        return asdict(self)


def spec_from_dict(document: Mapping[str, Any]) -> ModelSpec:
    """The spec whose `to_dict`, perhaps as JSON, `document` is. Raises InputError where it is none."""
    try:
        linear = document["linear"]
        layers = [
            LayerSpec(Context(one["context"]), one["has_experts"], _attention_from_dict(one["attention"]))
            for one in document["layers"]
        ]
        attention = _attention_from_dict(document["attention"])
        assert attention is not None
        known = {
            **document,
            "attention": attention,
            "layers": tuple(layers),
            "linear": None if linear is None else LinearAttentionSpec(**linear),
            "active_convention": ActiveConvention(document["active_convention"]),
            "sources": tuple(document["sources"]),
        }
        return ModelSpec(**known)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise InputError(f"not a description of a model: {type(error).__name__} {error}") from None


def _attention_from_dict(document: Mapping[str, Any] | None) -> AttentionSpec | None:
    if document is None:
        return None
    return AttentionSpec(**{**document, "kind": AttentionKind(document["kind"])})


def layer_pattern(
    n_layers: int,
    *,
    contexts: Iterable[Context] = (Context.FULL,),
    first_dense: int = 0,
    moe_step: int = 1,
) -> tuple[LayerSpec, ...]:
    """`contexts` over and over; experts in every `moe_step`-th layer (the last of each step) from `first_dense` on."""
    cycle = tuple(contexts)
    return tuple(
        LayerSpec(cycle[i % len(cycle)], has_experts=i >= first_dense and (i + 1) % moe_step == 0)
        for i in range(n_layers)
    )


def _require_positive(spec: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")


def _require_not_negative(spec: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name} must be a whole number of at least 0, got {value!r}")
