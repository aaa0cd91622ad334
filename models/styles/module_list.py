"""Experts that are modules of their own in a `ModuleList`, each with its own parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.language_model import Sizes


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))


def plain_mlp(hidden: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Dropout(0.0), nn.Linear(inner, hidden))


class ModuleListMoE(nn.Module):
    """The Hugging Face loop over a one-hot mask, slots first; experts are never called without rows of their own."""

    def __init__(self, sizes: Sizes, make_expert: Callable[[int, int], nn.Module] = GatedMLP) -> None:
        super().__init__()
        self.top_k, self.num_experts = sizes.top_k, sizes.num_experts
        self.gate = nn.Linear(sizes.hidden, sizes.num_experts, bias=False)
        self.experts = nn.ModuleList(
            make_expert(sizes.hidden, sizes.expert_hidden) for _ in range(sizes.num_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        routing_weights = F.softmax(self.gate(hidden_states), dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx, expert in enumerate(self.experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
            current_hidden_states = expert(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states


class PlainModuleListMoE(nn.Module):
    """Biases, and every expert on every token under a mask of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.gate = nn.Linear(sizes.hidden, sizes.num_experts)
        self.experts = nn.ModuleList(
            plain_mlp(sizes.hidden, sizes.expert_hidden) for _ in range(sizes.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x), self.top_k)
        weights = F.softmax(weights, dim=-1)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = (weights * (chosen == i)).sum(dim=-1, keepdim=True)
            results += weight * expert(x)
        return results
