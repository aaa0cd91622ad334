"""A copy of an expert's weights for every pair, multiplied with `bmm`; weights at the input (Hugging Face's `batched_mm`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class BatchedMM(nn.Module):
    def __init__(self, sizes: Sizes, weights_at_input: bool = False) -> None:
        super().__init__()
        self.top_k, self.weights_at_input = sizes.top_k, weights_at_input
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.up = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.up_bias = nn.Parameter(torch.randn(sizes.num_experts, sizes.expert_hidden) * 0.1)
        self.down = nn.Parameter(
            torch.randn(sizes.num_experts, sizes.hidden, sizes.expert_hidden) * sizes.expert_hidden**-0.5
        )

    def forward(self, tokens_TD: Tensor) -> Tensor:
        n_tokens, hidden = tokens_TD.shape
        weights_Tk, ids_Tk = self.router(tokens_TD).softmax(-1).topk(self.top_k, dim=-1)
        ids_P, weights_P1 = ids_Tk.reshape(-1), weights_Tk.reshape(-1, 1)
        rows_PD = tokens_TD.repeat_interleave(self.top_k, dim=0)
        if self.weights_at_input:
            rows_PD = rows_PD * weights_P1
        hidden_PH = torch.bmm(rows_PD.unsqueeze(1), self.up[ids_P]).squeeze(1) + self.up_bias[ids_P]
        out_PD = torch.bmm(self.down[ids_P], F.gelu(hidden_PH).unsqueeze(-1)).squeeze(-1)
        if not self.weights_at_input:
            out_PD = out_PD * weights_P1
        return out_PD.view(n_tokens, self.top_k, hidden).sum(dim=1)
