"""Hand-written MoE layers, one style a file, each inside the same tiny language model.

What people write when they do not use a library's experts: `build("sorted_grouped_mm")` is a model, and on the command line
`style:sorted_grouped_mm` names one. The differences between the files are the point: keep each as its authors would write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from disagmoe_compile.errors import InputError
from disagmoe_compile.models.styles.batched_mm import BatchedMM
from disagmoe_compile.models.styles.dense_einsum import DenseEinsum
from disagmoe_compile.models.styles.expert_choice import ExpertChoice
from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.gshard import GShard, GShardModuleList
from disagmoe_compile.models.styles.language_model import LanguageModel, MakeMoE, Sizes
from disagmoe_compile.models.styles.masked_loop import MaskedLoop
from disagmoe_compile.models.styles.meaningless_names import MeaninglessNames
from disagmoe_compile.models.styles.module_list import ModuleListMoE, PlainModuleListMoE
from disagmoe_compile.models.styles.padded_bmm import PaddedBMM
from disagmoe_compile.models.styles.sorted_grouped_mm import SortedGroupedMM
from disagmoe_compile.models.styles.where_loop import WhereLoop

STYLES: Mapping[str, MakeMoE] = {
    "batched_mm": BatchedMM,
    "batched_mm_weights_at_input": partial(BatchedMM, weights_at_input=True),
    "dense_einsum": DenseEinsum,
    "dense_scatter": partial(DenseEinsum, scores="scatter"),
    "dense_softmax_of_mask": partial(DenseEinsum, scores="mask"),
    "expert_choice": ExpertChoice,
    "gathered_einsum": GatheredEinsum,
    "gshard": GShard,
    "gshard_fixed_capacity": partial(GShard, capacity=6),
    "gshard_module_list": GShardModuleList,
    "masked_loop": MaskedLoop,
    "module_list": ModuleListMoE,
    "module_list_plain": PlainModuleListMoE,
    "padded_bmm": PaddedBMM,
    "padded_bmm_fixed_capacity": partial(PaddedBMM, capacity=6),
    "sorted_grouped_mm": SortedGroupedMM,
    "sorted_bincount": partial(SortedGroupedMM, count_with="bincount", weights_at_input=True),
    "weights_before": partial(WhereLoop, weights_before=True),
    "where_loop": WhereLoop,
}
WHOLE_MODELS: Mapping[str, Callable[[Sizes], nn.Module]] = {"meaningless_names": MeaninglessNames}


def build(style: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A randomly initialised language model of a style, in train mode; `sizes` as in `Sizes`.

    The caller's random state is left alone. Raises InputError for an unknown style.
    """
    if style not in STYLES and style not in WHOLE_MODELS:
        raise InputError(f"unknown style {style!r}; known: {', '.join([*STYLES, *WHOLE_MODELS])}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if style in WHOLE_MODELS:
            model: nn.Module = WHOLE_MODELS[style](Sizes(**sizes))
        else:
            model = LanguageModel(Sizes(**sizes), STYLES[style])
    return model.to(dtype).train()
