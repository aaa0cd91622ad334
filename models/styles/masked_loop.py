"""Every expert on every token, one after another, under dense scores that are zero outside the top-k (nanoMoE-like)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class MaskedLoop(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w1 = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.w2 = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        logits_TE = self.router(tokens_TD)
        weights_Tk, ids_Tk = logits_TE.topk(self.sizes.top_k, dim=-1)
        scores_TE = torch.full_like(logits_TE, float("-inf")).scatter(1, ids_Tk, weights_Tk).softmax(-1)
        out_TD = torch.zeros_like(tokens_TD)
        for expert in range(self.sizes.num_experts):
            rows_TD = F.relu(tokens_TD @ self.w1[expert]) @ self.w2[expert]
            out_TD += rows_TD * scores_TE[:, expert : expert + 1]
        return out_TD
