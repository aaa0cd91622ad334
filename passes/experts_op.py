"""The canonical MoE node: `experts(tokens_TD, token_P, expert_P, weight_P, *params, function=...,
num_experts=...)`.

Whatever style a model is written in, its expert region becomes this one call over routed pairs:

    out[t] = sum over pairs p with token_P[p] == t and 0 <= expert_P[p] < E of
             function(tokens[t], weight_P[p], *(param[expert_P[p]] for param in params))

`function(rows_PD, weight_P, *params)` is the per-expert function: rows never interact. Pairs of no expert
(dropped tokens) add nothing. What runs here is the reference, a loop over experts; stages are compiled from
`function`.

Legend: T tokens, P routed pairs, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def experts(
    tokens_TD: torch.Tensor,
    token_P: torch.Tensor,
    expert_P: torch.Tensor,
    weight_P: torch.Tensor,
    *params: torch.Tensor,
    function: Callable[..., torch.Tensor],
    num_experts: int,
) -> torch.Tensor:
    """Reference of the canonical node; returns [T, D_out]. Differentiable in tokens, weights and parameters,
    zero rows included.

    Autocast is off inside: the grouped matmuls that regions are made of are not on its list, a plain matmul
    is.
    """
    index_of_expert = [(expert_P == e).nonzero().squeeze(1) for e in range(num_experts)]
    with torch.autocast(tokens_TD.device.type, enabled=False):
        rows = [
            function(tokens_TD[token_P[index]], weight_P[index], *(param[e] for param in params))
            for e, index in enumerate(index_of_expert)
        ]
    order = torch.cat(index_of_expert)
    pairs = torch.cat(rows)
    # Sum a token's pairs in pair order, in fp32 where the rows are narrower, as `view(T, k, D).sum(1)` does.
    wide = pairs.double() if pairs.dtype == torch.float64 else pairs.float()
    ascending = torch.argsort(order)
    total = wide.new_zeros(tokens_TD.shape[0], pairs.shape[1])
    return total.index_add(0, token_P[order][ascending], wide[ascending]).to(pairs.dtype)
