"""Small models and batches for tests of passes, and hypothesis strategies over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from disagmoe_compile.models.styles import STYLES, build
from disagmoe_compile.models.styles.language_model import LanguageModel

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

VOCAB = 128


def build_model(
    style: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> LanguageModel:
    """A tiny language model whose MoE layers are written in `style` (`models/styles`); `sizes` as in its `Sizes`."""
    return build(style, seed=seed, dtype=dtype, **sizes)


def language_batch(batch_size: int = 4, length: int = 16, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens [B, S] and labels, with labels of -100 spread unevenly over the samples."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    labels = ids.clone()
    for sample in range(batch_size):
        labels[sample, : min(3 * sample + 1, length - 2)] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, slots=True)
class DrawnModel:
    """How a random model is made; prints as the call that makes it again."""

    style: str
    seed: int
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...]

    def build(self) -> LanguageModel:
        return build_model(self.style, seed=self.seed, dtype=self.dtype, **dict(self.sizes))

    @property
    def num_experts(self) -> int:
        return dict(self.sizes)["num_experts"]

    @property
    def n_moe_layers(self) -> int:
        sizes = dict(self.sizes)
        return sizes["n_layers"] - sizes["dense_layers"]

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={value}" for name, value in self.sizes)
        return f"build_model({self.style!r}, seed={self.seed}, dtype={self.dtype}{sizes})"


def moe_models(
    styles: tuple[str, ...] = tuple(STYLES), dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> SearchStrategy[DrawnModel]:
    """Random small MoE models: depth, number of experts, top-k, style, shared experts, dense first layers, dtype."""
    from hypothesis import strategies as st

    @st.composite
    def models(draw: st.DrawFn) -> DrawnModel:
        n_layers = draw(st.integers(1, 3))
        num_experts = draw(st.integers(2, 9))
        sizes = {
            "n_layers": n_layers,
            "num_experts": num_experts,
            "top_k": draw(st.integers(1, min(3, num_experts))),
            "shared_experts": draw(st.integers(0, 2)),
            "dense_layers": draw(st.integers(0, n_layers - 1)),
        }
        return DrawnModel(
            draw(st.sampled_from(styles)),
            draw(st.integers(0, 99)),
            draw(st.sampled_from(dtypes)),
            tuple(sizes.items()),
        )

    return models()
