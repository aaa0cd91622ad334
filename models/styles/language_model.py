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
    """Of one model. `expert_hidden`: width inside an expert."""

    vocab: int = 128
    hidden: int = 32
    heads: int = 4
    n_layers: int = 2
    num_experts: int = 8
    top_k: int = 2
    expert_hidden: int = 48


MakeMoE = Callable[[Sizes], nn.Module]


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x)); the MoE layer sees tokens [T, D]."""

    def __init__(self, sizes: Sizes, make_moe: MakeMoE) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.moe_norm = nn.RMSNorm(sizes.hidden)
        self.moe = make_moe(sizes)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, length, hidden = x_BSD.shape
        q, k, v = self.qkv(self.attention_norm(x_BSD)).view(batch, length, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        tokens_TD = self.moe_norm(x_BSD).reshape(-1, hidden)
        return x_BSD + self.moe(tokens_TD).view(batch, length, hidden)


class LanguageModel(nn.Module):
    """`forward(input_ids, labels)` -> (loss, logits); labels of -100 do not count."""

    def __init__(self, sizes: Sizes, make_moe: MakeMoE) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, make_moe) for _ in range(sizes.n_layers))
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
