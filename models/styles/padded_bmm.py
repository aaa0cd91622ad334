"""Rows copied into a zero buffer [E, C, D] at (expert, position), multiplied with `bmm`, and read back from there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class PaddedBMM(nn.Module):
    """`capacity` pairs an expert, the rest dropped; None: as many slots as tokens, so that nothing is."""

    def __init__(self, sizes: Sizes, capacity: int | None = None) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.capacity = sizes.top_k, sizes.num_experts, capacity
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w_gate = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.w_up = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.w_down = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        n_tokens, hidden = tokens_TD.shape
        capacity = n_tokens if self.capacity is None else self.capacity
        weights_Tk, ids_Tk = self.router(tokens_TD).softmax(-1).topk(self.top_k, dim=-1)
        ids_P = ids_Tk.flatten()
        mask_PE = F.one_hot(ids_P, self.num_experts)
        position_P = (mask_PE.cumsum(0) - mask_PE).gather(1, ids_P.unsqueeze(1)).squeeze(1)
        kept_P = position_P < capacity
        slot_P = position_P.clamp(max=capacity)  # dropped pairs share one slot more, which nobody reads
        buffer_ECD = tokens_TD.new_zeros(self.num_experts, capacity + 1, hidden)
        buffer_ECD[ids_P, slot_P] = tokens_TD.repeat_interleave(self.top_k, dim=0)
        rows_ECD = buffer_ECD[:, :capacity]
        hidden_ECH = F.silu(torch.bmm(rows_ECD, self.w_gate)) * torch.bmm(rows_ECD, self.w_up)
        out_ECD = torch.bmm(hidden_ECH, self.w_down)
        out_PD = out_ECD[ids_P, position_P.clamp(max=capacity - 1)]
        weights_P = weights_Tk.flatten() * kept_P
        return (out_PD * weights_P.unsqueeze(-1)).view(n_tokens, self.top_k, hidden).sum(1)
