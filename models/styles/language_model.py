"""A tiny causal language model around any MoE layer: embedding, causal attention, MoE, head, cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model. `expert_hidden`: width inside an expert; `shared_experts`: experts that every token sees, beside the
    routed ones; `dense_layers`: how many of the first layers have an ordinary MLP in place of experts.
    """

    vocab: int = 128
    hidden: int = 32
    heads: int = 4
    n_layers: int = 2
    num_experts: int = 8
    top_k: int = 2
    expert_hidden: int = 48
    shared_experts: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "heads", "n_layers", "num_experts", "top_k", "expert_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.num_experts or self.hidden % self.heads or self.dense_layers > self.n_layers:
            raise ValueError(
                f"top_k {self.top_k} of {self.num_experts} experts, {self.heads} heads of hidden {self.hidden}, "
                f"{self.dense_layers} dense layers of {self.n_layers} do not fit"
            )


MakeMoE = Callable[[Sizes], nn.Module]


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class MLP(nn.Module):
    """A gated MLP: what a dense layer has, or a shared expert."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(tokens_TD)) * self.up(tokens_TD))


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x)); the MoE layer sees tokens [T, D]."""

    def __init__(self, sizes: Sizes, make_moe: MakeMoE, is_dense: bool) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.moe_norm = nn.RMSNorm(sizes.hidden)
        self.moe = MLP(sizes.hidden, sizes.expert_hidden) if is_dense else make_moe(sizes)
        shared = 0 if is_dense else sizes.shared_experts
        self.shared = MLP(sizes.hidden, shared * sizes.expert_hidden) if shared else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, length, hidden = x_BSD.shape
        q, k, v = self.qkv(self.attention_norm(x_BSD)).view(batch, length, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        tokens_TD = self.moe_norm(x_BSD).reshape(-1, hidden)
        mixed_TD = self.moe(tokens_TD)
        if self.shared is not None:
            mixed_TD = mixed_TD + self.shared(tokens_TD)
        return x_BSD + mixed_TD.view(batch, length, hidden)


class LanguageModel(nn.Module):
    """`forward(input_ids, labels)` -> (loss, logits); labels of -100 do not count."""

    def __init__(self, sizes: Sizes, make_moe: MakeMoE) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(
            Block(sizes, make_moe, is_dense=layer < sizes.dense_layers) for layer in range(sizes.n_layers)
        )
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x_BSD = self.embed(input_ids)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits = self.head(self.norm(x_BSD))
        if labels is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return Output(loss, logits)


def expert_weights(*shape: int) -> nn.Parameter:
    """Random weights [..., in, out], scaled by their fan-in."""
    return nn.Parameter(torch.randn(shape) * shape[-2] ** -0.5)
