"""Every expert on every token with einsums, the unrouted ones weighted with zero (small research code, JAX habits)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights


class DenseEinsum(nn.Module):
    """`scores`: how the unrouted ones become zero: "scatter", "one_hot" or "mask"."""

    def __init__(self, sizes: Sizes, scores: str = "one_hot") -> None:
        super().__init__()
        self.top_k, self.num_experts, self.scores = sizes.top_k, sizes.num_experts, scores
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.w1 = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.b1 = nn.Parameter(torch.randn(sizes.num_experts, sizes.expert_hidden) * 0.1)
        self.w2 = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        scores_TE = self.routing_scores(self.router(tokens_TD))
        hidden_TEH = F.silu(torch.einsum("td,edh->teh", tokens_TD, self.w1) + self.b1)
        if self.scores == "one_hot":
            return torch.einsum("teh,ehd,te->td", hidden_TEH, self.w2, scores_TE)
        out_TED = torch.einsum("teh,ehd->ted", hidden_TEH, self.w2)
        return (out_TED * scores_TE.unsqueeze(-1)).sum(dim=1)

    def routing_scores(self, logits_TE: Tensor) -> Tensor:
        values_Tk, ids_Tk = logits_TE.topk(self.top_k, dim=-1)
        if self.scores == "scatter":
            return torch.zeros_like(logits_TE).scatter(1, ids_Tk, values_Tk.softmax(-1))
        mask_TkE = F.one_hot(ids_Tk, self.num_experts)
        if self.scores == "one_hot":
            return (values_Tk.softmax(-1).unsqueeze(-1) * mask_TkE).sum(1)
        return logits_TE.masked_fill(mask_TkE.sum(1) == 0, float("-inf")).softmax(-1)
