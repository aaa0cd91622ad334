"""Each expert on the rows of its own tokens, found with `torch.where` and added back with `index_add_` (Mixtral's first code).

The parameters are stacked; the chosen weights are normalised, and a shared expert runs beside the routed ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes


class WhereLoop(nn.Module):
    """`weights_before`: the routing weight multiplies the expert's input instead of its output."""

    def __init__(self, sizes: Sizes, *, weights_before: bool = False) -> None:
        super().__init__()
        self.sizes, self.weights_before = sizes, weights_before
        experts, hidden, inner = sizes.num_experts, sizes.hidden, sizes.expert_hidden
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)
        self.shared = nn.Sequential(nn.Linear(hidden, inner), nn.SiLU(), nn.Linear(inner, hidden))

    def forward(self, tokens_TD: Tensor) -> Tensor:
        weights_Tk, ids_Tk = self.router(tokens_TD).float().softmax(-1).topk(self.sizes.top_k, dim=-1)
        weights_Tk = (weights_Tk / weights_Tk.sum(-1, keepdim=True)).to(tokens_TD.dtype)
        out_TD = self.shared(tokens_TD)
        for expert in range(self.sizes.num_experts):
            token_P, slot_P = torch.where(ids_Tk == expert)
            rows_PD, weight_P1 = tokens_TD[token_P], weights_Tk[token_P, slot_P, None]
            if self.weights_before:
                rows_PD = rows_PD * weight_P1
            gate, up = F.linear(rows_PD, self.gate_up[expert]).chunk(2, dim=-1)
            rows_PD = F.linear(F.silu(gate) * up, self.down[expert])
            if not self.weights_before:
                rows_PD = rows_PD * weight_P1
            out_TD.index_add_(0, token_P, rows_PD.to(out_TD.dtype))
        return out_TD
