"""Pairs sorted by expert, multiplied with `grouped_mm` in bfloat16, summed back with `scatter_add` (torchtitan).

Rows of each expert are counted with `histc`, or with `bincount`; weights multiply the rows before the experts, or after.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class SortedGroupedMM(nn.Module):
    def __init__(self, sizes: Sizes, count_with: str = "histc", weights_at_input: bool = False) -> None:
        super().__init__()
        self.sizes, self.count_with, self.weights_at_input = sizes, count_with, weights_at_input
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w1 = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.w2 = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)
        self.w3 = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        top_k, num_experts = self.sizes.top_k, self.sizes.num_experts
        weights_Tk, ids_Tk = self.router(tokens_TD).float().softmax(-1).topk(top_k, dim=-1)
        ids_P = ids_Tk.flatten()
        order_P = torch.argsort(ids_P, stable=True)
        if self.count_with == "histc":
            counts_E = torch.histc(ids_P.float(), bins=num_experts, min=0, max=num_experts - 1)
        else:
            counts_E = torch.bincount(ids_P, minlength=num_experts)
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        weights_P1 = weights_Tk.flatten()[order_P].unsqueeze(-1)
        rows_PD = tokens_TD[order_P // top_k]
        if self.weights_at_input:
            rows_PD = (rows_PD.float() * weights_P1).type_as(tokens_TD)
        rows_PD = rows_PD.bfloat16()
        hidden = F.silu(F.grouped_mm(rows_PD, self.w1.bfloat16(), offs=offsets_E))
        hidden = hidden * F.grouped_mm(rows_PD, self.w3.bfloat16(), offs=offsets_E)
        rows_PD = F.grouped_mm(hidden, self.w2.bfloat16(), offs=offsets_E).type_as(tokens_TD)
        if not self.weights_at_input:
            rows_PD = (rows_PD * weights_P1).type_as(tokens_TD)
        index_PD = (order_P // top_k).unsqueeze(-1).expand_as(rows_PD)
        return torch.zeros_like(tokens_TD).scatter_add(0, index_PD, rows_PD)
