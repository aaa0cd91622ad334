"""Every expert takes its best tokens (expert choice routing), summed back with `index_add`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class ExpertChoice(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.top_k, self.num_experts = sizes.top_k, sizes.num_experts
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w1 = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.w2 = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        capacity = tokens_TD.shape[0] * self.top_k // self.num_experts
        scores_TE = self.router(tokens_TD).softmax(-1)
        weights_EC, ids_EC = scores_TE.t().topk(capacity, dim=-1)
        rows_ECD = tokens_TD[ids_EC]
        out_ECD = torch.bmm(F.gelu(torch.bmm(rows_ECD, self.w1)), self.w2)
        out_ECD = out_ECD * weights_EC.unsqueeze(-1)
        return torch.zeros_like(tokens_TD).index_add(0, ids_EC.flatten(), out_ECD.flatten(0, 1))
