"""A pair that is not routed adds nothing only if an expert's row is zero wherever its weight is: tried on random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from disagmoe_compile.passes.metadata import value
from disagmoe_compile.passes.regions import NoMatch, ParamNodes


def require_zero(
    exit_node: fx.Node,
    function: fx.GraphModule,
    tokens: fx.Node,
    weight_dtype: torch.dtype | None,
    params: Sequence[ParamNodes],
) -> None:
    """Raises NoMatch where a weight of zero does not give a row of zeros. Random parameters would show any bias."""
    generator = torch.Generator().manual_seed(0)
    own = [value(p[0]) if isinstance(p, tuple) else value(p)[0] for p in params]
    slices = [torch.randn([int(n) for n in one.shape], generator=generator).to(one.dtype) for one in own]
    rows = torch.randn(3, int(value(tokens).shape[-1]), generator=generator).to(value(tokens).dtype)
    if function(rows, torch.zeros(3, dtype=weight_dtype), *slices).count_nonzero():
        raise NoMatch(exit_node, "experts return more than zero for tokens that were not routed to them")
