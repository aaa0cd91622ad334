"""A whole model whose names say nothing: what is an expert must follow from what is computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Output, Sizes


class A(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.a = nn.Linear(d, h)
        self.b = nn.Linear(h, d, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(a)))


class B(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.a = nn.LayerNorm(s.hidden)
        self.b = nn.Linear(s.hidden, 3 * s.hidden)
        self.c = nn.LayerNorm(s.hidden)
        self.d = nn.Linear(s.hidden, s.num_experts)
        self.e = nn.ModuleList(A(s.hidden, s.expert_hidden) for _ in range(s.num_experts))
        self.f = s.top_k

    def forward(self, a: Tensor) -> Tensor:
        b, c, d = self.b(self.a(a)).chunk(3, -1)
        a = a + F.scaled_dot_product_attention(b[:, None], c[:, None], d[:, None], is_causal=True)[:, 0]
        b = self.c(a)
        c = torch.sigmoid(self.d(b))
        d = torch.topk(c, self.f, dim=-1)[1]
        e = F.one_hot(d, c.shape[-1]).sum(2)
        f = c * e
        f = f / f.sum(-1, keepdim=True)
        return a + sum(g(b) * f[..., h, None] for h, g in enumerate(self.e))


class MeaninglessNames(nn.Module):
    """`forward(input_ids, labels)`; everything has batch and length as two dimensions, nothing is flattened."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.a = nn.Embedding(s.vocab, s.hidden)
        self.b = nn.ModuleList(B(s) for _ in range(s.n_layers))
        self.c = nn.Linear(s.hidden, s.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        a = self.a(input_ids)
        for b in self.b:
            a = b(a)
        c = self.c(a)
        if labels is None:
            return Output(None, c)
        return Output(F.cross_entropy(c[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), c)
