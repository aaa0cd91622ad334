"""Closed-form costs of the parts of a transformer layer for ONE sequence, in two sets. FLOPs count 2 a multiply-add.

`corrected` (the default) is derived from the matmuls; ours:
    projections  2 S (H qd + 2 H kvd + od H)
                 MLA: 2 S (H q_lora + q_lora qd + H (kv_lora + rope) + kv_lora heads (nope + v) + od H)
    core         2 S ctx heads (qk + v)           4 S ctx qd where all heads are equally wide
    linear core  S Hv (6 C dk + 4 C dv + 6 dk dv) chunk-wise gated delta rule, and 2 S conv channels of its convolution
    router       2 S H E
    experts      6 k S H D, without a gate 4 k S H D; shared experts and dense MLPs the same with their width
    head         2 S H V
    ctx          keys a causal query sees on average: (S + 1) / 2; with a window w < S (w (w + 1) / 2 + (S - w) w) / S; with
                 chunks of c the mean over chunks, each causal
Backward: 2x the matmuls (gradients of inputs and of weights), 2.5x the core (a flash kernel recomputes QK^T: five matmuls for
two), 2x a linear core.

`paper` is what DisagMoE (arXiv 2605.11005) prints for one layer, forward; its projection term counts multiply-adds where its
core term counts FLOPs, and there is no window, router or bias in it:
    attention    S H^2 (2 + 2 / g) + 4 S^2 H      g = heads / kv_heads
    experts      4 k S H D
The paper gives nothing else: there shared experts and dense MLPs (4 S H width), the head (2 S H V) and backward (2x) are ours.

Activation bytes are of the tensors that autograd saves where norms and the attention core are fused, each counted once; a token:
    norm         its input and its output, H each (two norms a layer)
    attention    queries, keys, values, the core's output; with norms of queries and keys their inputs too; 4 bytes a head of
                 log-sum-exp
    MLP          gate, its activation, up, their product: 4 widths; without a gate 2
    routed row   H + 4 D + H: a copy of the token, the MLP, the output that the router weight multiplies
    router       4 bytes an expert of probabilities
    head         final norm, and 4 bytes a vocabulary entry of log-probabilities

Legend: S tokens of a sequence, H hidden size, D width of an expert, E experts, k experts a token, V vocabulary, C tokens of a
chunk of the linear core; qd, kvd, od: widths of all query heads, key (or value) heads and core outputs; dk, dv, Hv: widths of a
key and a value head and the number of value heads of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from disagmoe_compile.errors import InputError
from disagmoe_compile.planner.model_spec import (
    ActiveConvention,
    AttentionSpec,
    Context,
    LayerSpec,
    LinearAttentionSpec,
    ModelSpec,
)

MATMUL_BACKWARD = 2.0
CORE_BACKWARD = 2.5
LINEAR_CORE_BACKWARD = 2.0
LINEAR_CORE_CHUNK = 64
"""Tokens; of the chunk-wise kernels of transformers and flash-linear-attention."""
_FP32_BYTES = 4
_TOKEN_ID_BYTES = 8


class CostSet(StrEnum):
    """`corrected` is derived from the matmuls; `paper` is what DisagMoE (arXiv 2605.11005) prints."""

    CORRECTED = "corrected"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class ComponentCosts:
    """One component of one stage, for ONE sequence. FLOPs count 2 a multiply-add; bytes are of the compute data type.

    `parameters`: elements the stage holds, whatever the batch. `forward_flops`, `backward_flops`: all of them, of which
    `core_forward_flops`, `core_backward_flops` run in the attention core (or a linear layer's recurrence), not in plain matmuls.
    `activation_bytes`: what the forward keeps for its backward; `activation_bytes_recompute`: the same where only the stage's
    inputs are kept and the backward begins with another forward (then add `forward_flops` to the backward);
    `second_forward_bytes`: what that forward makes beside them.
    """

    parameters: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    core_forward_flops: float = 0.0
    core_backward_flops: float = 0.0
    activation_bytes: float = 0.0
    activation_bytes_recompute: float = 0.0
    second_forward_bytes: float = 0.0

    def __add__(self, other: ComponentCosts) -> ComponentCosts:
        return ComponentCosts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence of `seq_length` tokens whose activations take `element_bytes` bytes an element."""

    seq_length: int
    element_bytes: int = 2
    cost_set: CostSet = CostSet.CORRECTED

    def __post_init__(self) -> None:
        for name in ("seq_length", "element_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    def bytes_of(self, elements_per_token: float) -> float:
        return self.seq_length * self.element_bytes * elements_per_token


def attention_block(spec: ModelSpec, layer: LayerSpec, work: SequenceWork) -> ComponentCosts:
    """The layer's first norm and its attention, softmax or linear."""
    if layer.context is Context.LINEAR:
        assert spec.linear is not None
        return _linear_attention(spec, spec.linear, work)
    shape = layer.attention or spec.attention
    parameters = _attention_parameters(shape, spec.hidden) + spec.hidden
    saved_bytes = work.bytes_of(2 * spec.hidden + _attention_saved(shape))
    saved_bytes += work.seq_length * _FP32_BYTES * shape.heads
    if work.cost_set is CostSet.PAPER:
        groups = shape.heads / shape.kv_heads
        projections = work.seq_length * spec.hidden**2 * (2 + 2 / groups)
        core = 4.0 * work.seq_length**2 * spec.hidden
        return _costs(work, parameters, projections, core, saved_bytes)
    projections = 2.0 * work.seq_length * _projection_weights(shape, spec.hidden)
    context = mean_context(work.seq_length, layer.context, window=spec.window, chunk=spec.chunk)
    core = 2.0 * work.seq_length * context * (shape.query_dim + shape.output_dim)
    return _costs(work, parameters, projections, core, saved_bytes)


def dense_block(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """The second norm of a layer without experts, and its MLP."""
    norm = ComponentCosts(spec.hidden, activation_bytes=work.bytes_of(2 * spec.hidden))
    return norm + _mlp(spec, work, spec.dense_hidden)


def router_block(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """The second norm of a layer with experts, and the router. The paper has no router."""
    flops = 0.0 if work.cost_set is CostSet.PAPER else 2.0 * work.seq_length * spec.hidden * spec.num_experts
    parameters = spec.hidden + spec.num_experts * (spec.hidden + spec.router_bias)
    saved = work.bytes_of(2 * spec.hidden) + work.seq_length * _FP32_BYTES * spec.num_experts
    return _costs(work, parameters, flops, 0.0, saved)


def shared_experts(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """All shared experts of a layer together; on recompute they keep the token they are given."""
    if not spec.shared_hidden:
        return ComponentCosts()
    gate = spec.hidden if spec.shared_gate else 0
    costs = _mlp(spec, work, spec.shared_hidden) + ComponentCosts(
        gate, 2.0 * work.seq_length * gate, 2.0 * MATMUL_BACKWARD * work.seq_length * gate
    )
    weighed = work.bytes_of(gate)  # the output that the gate multiplies
    kept = work.bytes_of(spec.hidden)
    return costs + ComponentCosts(activation_bytes=weighed, activation_bytes_recompute=kept)


def routed_experts(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """All experts of a layer, each routed (token, expert) pair computed once, wherever its expert is."""
    matrices = _matrices(spec, work)
    flops = 2.0 * matrices * spec.top_k * work.seq_length * spec.hidden * spec.expert_hidden
    widths = 4 if spec.gated_mlp else 2
    saved = work.bytes_of(spec.top_k * (2 * spec.hidden + widths * spec.expert_hidden))
    kept = work.bytes_of(spec.top_k * spec.hidden) + work.seq_length * _FP32_BYTES * spec.top_k
    parameters = spec.num_experts * _mlp_parameters(spec, spec.expert_hidden, spec.expert_bias)
    return _costs(work, parameters, flops, 0.0, saved, kept)


def embedding(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """A lookup: no FLOPs; its token numbers are kept, 8 bytes each."""
    kept = float(work.seq_length * _TOKEN_ID_BYTES)
    return ComponentCosts(spec.vocab * spec.hidden, activation_bytes=kept, activation_bytes_recompute=kept)


def head(spec: ModelSpec, work: SequenceWork) -> ComponentCosts:
    """Final norm, logits and loss. Tied to the embedding it has no weights of its own."""
    parameters = spec.hidden + (0 if spec.tied_embeddings else spec.vocab * spec.hidden)
    flops = 2.0 * work.seq_length * spec.hidden * spec.vocab
    saved = work.bytes_of(2 * spec.hidden) + work.seq_length * _FP32_BYTES * spec.vocab
    return _costs(work, parameters, flops, 0.0, saved)


def mean_context(
    seq_length: int, context: Context = Context.FULL, *, window: int | None = None, chunk: int | None = None
) -> float:
    """Mean number of keys that a causal query of a sequence sees, itself included."""
    if context is Context.SLIDING and window is not None and window < seq_length:
        return (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length
    if context is Context.CHUNKED and chunk is not None and chunk < seq_length:
        whole, rest = divmod(seq_length, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * seq_length)
    return (seq_length + 1) / 2


def total_parameters(spec: ModelSpec) -> int:
    """All weights, norms and biases; neither buffers nor layers for multi-token prediction."""
    return _parameters(spec, experts=spec.num_experts)


def active_parameters(spec: ModelSpec, convention: ActiveConvention | None = None) -> int:
    """Parameters that one token passes through: `top_k` experts a layer instead of all. By default in the spec's convention."""
    convention = spec.active_convention if convention is None else convention
    table = spec.vocab * spec.hidden
    tables_left_out = {
        ActiveConvention.ALL: 0,
        ActiveConvention.NO_INPUT_EMBEDDING: 0 if spec.tied_embeddings else 1,
        ActiveConvention.NO_EMBEDDINGS: 1 if spec.tied_embeddings else 2,
    }[convention]
    return _parameters(spec, experts=spec.top_k) - tables_left_out * table


def _parameters(spec: ModelSpec, experts: int) -> int:
    work = SequenceWork(1)
    total = embedding(spec, work).parameters + head(spec, work).parameters
    for layer in spec.layers:
        total += attention_block(spec, layer, work).parameters
        if layer.has_experts:
            total += router_block(spec, work).parameters + shared_experts(spec, work).parameters
            total += experts * _mlp_parameters(spec, spec.expert_hidden, spec.expert_bias)
        else:
            total += dense_block(spec, work).parameters
    return total


def _costs(
    work: SequenceWork, parameters: int, matmul: float, core: float, saved: float, kept: float = 0.0
) -> ComponentCosts:
    factors = (MATMUL_BACKWARD, CORE_BACKWARD) if work.cost_set is CostSet.CORRECTED else (2.0, 2.0)
    return ComponentCosts(
        parameters=parameters,
        forward_flops=matmul + core,
        backward_flops=factors[0] * matmul + factors[1] * core,
        core_forward_flops=core,
        core_backward_flops=factors[1] * core,
        activation_bytes=saved,
        activation_bytes_recompute=kept,
    )


def _projection_weights(shape: AttentionSpec, hidden: int) -> int:
    """Elements of the projection matrices, each used once a token."""
    output = shape.output_dim * hidden
    if not shape.is_latent:
        queries = shape.query_dim * (2 if shape.output_gate else 1)
        return hidden * (queries + shape.kv_heads * (shape.head_dim + shape.value_head_dim)) + output
    queries = (
        shape.q_lora_rank * (hidden + shape.query_dim) if shape.q_lora_rank else hidden * shape.query_dim
    )
    latent = hidden * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    expanded = shape.kv_lora_rank * shape.heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return queries + latent + expanded + output


def _attention_parameters(shape: AttentionSpec, hidden: int) -> int:
    parameters = _projection_weights(shape, hidden) + shape.norm_elements
    if shape.qkv_bias:
        parameters += shape.query_dim + shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    if shape.output_bias:
        parameters += hidden
    return parameters + (shape.heads if shape.sinks else 0)


def _attention_saved(shape: AttentionSpec) -> int:
    """Elements a token that autograd keeps between the layer's norm and its output projection."""
    if shape.is_latent:
        latents = 2 * (shape.q_lora_rank + shape.kv_lora_rank)  # input and output of their norms
        return latents + 2 * shape.query_dim + 2 * shape.output_dim  # queries, keys; values, output
    keys, values = shape.kv_heads * shape.head_dim, shape.kv_heads * shape.value_head_dim
    unnormalised = shape.query_dim + keys if shape.norm_elements else 0
    gate = 2 * shape.output_dim if shape.output_gate else 0  # the gate, and the gated output
    return shape.query_dim + keys + values + shape.output_dim + unnormalised + gate


def _linear_attention(spec: ModelSpec, shape: LinearAttentionSpec, work: SequenceWork) -> ComponentCosts:
    """A gated-delta layer. Saved, besides the norm: input and output of the convolution, output gate, core output and its
    normalised copy, and an fp32 state a chunk. The paper has no such layer: both sets count it alike.
    """
    mixed = 2 * shape.key_dim + shape.value_dim  # queries, keys and values pass the convolution together
    weights = spec.hidden * (mixed + shape.value_dim + 2 * shape.value_heads) + shape.value_dim * spec.hidden
    parameters = (
        weights + shape.conv_kernel * mixed + 2 * shape.value_heads + shape.value_head_dim + spec.hidden
    )
    key, value, chunk = shape.key_head_dim, shape.value_head_dim, LINEAR_CORE_CHUNK
    delta_rule = shape.value_heads * (6 * chunk * key + 4 * chunk * value + 6 * key * value)
    core = float(work.seq_length * (delta_rule + 2 * shape.conv_kernel * mixed))
    saved = work.bytes_of(2 * spec.hidden + 2 * mixed + 3 * shape.value_dim)
    saved += work.seq_length / chunk * _FP32_BYTES * shape.value_heads * key * value
    matmul = 2.0 * work.seq_length * weights
    return ComponentCosts(
        parameters=parameters,
        forward_flops=matmul + core,
        backward_flops=MATMUL_BACKWARD * matmul + LINEAR_CORE_BACKWARD * core,
        core_forward_flops=core,
        core_backward_flops=LINEAR_CORE_BACKWARD * core,
        activation_bytes=saved,
    )


def _mlp(spec: ModelSpec, work: SequenceWork, width: int) -> ComponentCosts:
    """A dense MLP without its norm: its input is the norm's output, which is counted there."""
    flops = 2.0 * _matrices(spec, work) * work.seq_length * spec.hidden * width
    saved = work.bytes_of((4 if spec.gated_mlp else 2) * width)
    return _costs(work, _mlp_parameters(spec, width, spec.mlp_bias), flops, 0.0, saved)


def _matrices(spec: ModelSpec, work: SequenceWork) -> int:
    """Matmuls of a MLP; the paper counts two in all of them."""
    return 3 if spec.gated_mlp and work.cost_set is CostSet.CORRECTED else 2


def _mlp_parameters(spec: ModelSpec, width: int, has_bias: bool) -> int:
    inner = 2 if spec.gated_mlp else 1
    return (inner + 1) * spec.hidden * width + (inner * width + spec.hidden if has_bias else 0)
