"""A copy of its experts' weights gathered for every token, one einsum a projection (small research code)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class GatheredEinsum(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w1 = expert_weights(sizes.num_experts, sizes.hidden, 2 * sizes.expert_hidden)
        self.b1 = nn.Parameter(torch.randn(sizes.num_experts, 2 * sizes.expert_hidden) * 0.1)
        self.w2 = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)
        self.b2 = nn.Parameter(torch.randn(sizes.num_experts, sizes.hidden) * 0.1)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        weights_Tk, ids_Tk = self.router(tokens_TD).topk(self.top_k, dim=-1)
        weights_Tk = weights_Tk.softmax(dim=-1)
        hidden = torch.einsum("td,tkdh->tkh", tokens_TD, self.w1[ids_Tk]) + self.b1[ids_Tk]
        gate, up = hidden.chunk(2, dim=-1)
        rows_TkD = torch.einsum("tkh,tkhd->tkd", F.silu(gate) * up, self.w2[ids_Tk]) + self.b2[ids_Tk]
        return torch.einsum("tkd,tk->td", rows_TkD, weights_Tk)
