"""One-hot dispatch and combine masks [T, E, C] with a capacity, everything an einsum (GShard, Switch, DeepSpeed)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes, expert_weights
from disagmoe_compile.models.styles.module_list import plain_mlp


class GShard(nn.Module):
    """Experts keep at most `capacity` pairs: a number, or None for `capacity_factor` times an even share."""

    def __init__(self, sizes: Sizes, capacity: int | None = None, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.top_k, self.num_experts = sizes.top_k, sizes.num_experts
        self.capacity, self.capacity_factor = capacity, capacity_factor
        self.router = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.make_experts(sizes)

    def make_experts(self, sizes: Sizes) -> None:
        self.w_in = expert_weights(sizes.num_experts, sizes.hidden, sizes.expert_hidden)
        self.b_in = nn.Parameter(torch.randn(sizes.num_experts, sizes.expert_hidden) * 0.1)
        self.w_out = expert_weights(sizes.num_experts, sizes.expert_hidden, sizes.hidden)
        self.b_out = nn.Parameter(torch.randn(sizes.num_experts, sizes.hidden) * 0.1)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        capacity = self.capacity
        if capacity is None:
            even_share = self.top_k * tokens_TD.shape[0] / self.num_experts
            capacity = math.ceil(self.capacity_factor * even_share)
        combine_TEC = self.combine_mask(tokens_TD, capacity)
        dispatch_TEC = (combine_TEC != 0).to(tokens_TD.dtype)
        slots_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, tokens_TD)
        return torch.einsum("tec,ecd->td", combine_TEC, self.run_experts(slots_ECD))

    def run_experts(self, slots_ECD: Tensor) -> Tensor:
        hidden_ECH = torch.einsum("ecd,edh->ech", slots_ECD, self.w_in) + self.b_in.unsqueeze(1)
        return torch.einsum("ech,ehd->ecd", F.gelu(hidden_ECH), self.w_out) + self.b_out.unsqueeze(1)

    def combine_mask(self, tokens_TD: Tensor, capacity: int) -> Tensor:
        weights_Tk, ids_Tk = self.router(tokens_TD).softmax(-1).topk(self.top_k, dim=-1)
        mask_TkE = F.one_hot(ids_Tk, self.num_experts)
        # First choices of all tokens come before second choices.
        by_choice = mask_TkE.transpose(0, 1).reshape(-1, self.num_experts)
        position = (by_choice.cumsum(0) - 1).view(self.top_k, -1, self.num_experts).transpose(0, 1)
        position_Tk = (position * mask_TkE).sum(-1)
        kept_Tk = position_Tk < capacity
        weights_Tk = weights_Tk * kept_Tk
        slot_TkC = F.one_hot(position_Tk * kept_Tk, capacity).to(tokens_TD.dtype)
        return torch.einsum("tk,tke,tkc->tec", weights_Tk, mask_TkE.to(tokens_TD.dtype), slot_TkC)


class GShardModuleList(GShard):
    """Experts are modules of their own, each called with its slots (fairscale, DeepSpeed)."""

    def make_experts(self, sizes: Sizes) -> None:
        self.experts = nn.ModuleList(
            plain_mlp(sizes.hidden, sizes.expert_hidden) for _ in range(sizes.num_experts)
        )

    def run_experts(self, slots_ECD: Tensor) -> Tensor:
        slots_1ECD = slots_ECD.unsqueeze(0)
        pieces = slots_1ECD.chunk(self.num_experts, dim=1)
        return torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces)], dim=1).squeeze(0)
