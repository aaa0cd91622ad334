"""What a script may vary around a model: masks, positions, checkpointing, tied weights. Virtual ranks equal eager in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import Block, LanguageModel, Output, Sizes
from disagmoe_compile.testing.parity import assert_parity, eager_reference
from disagmoe_compile.testing.virtual import CapturedCall, capture_call, run_captured

BATCH, LENGTH, HIDDEN = 6, 8, 64


def tokens() -> dict[str, Tensor]:
    """Labels of -100 are spread unevenly over samples."""
    ids = torch.randint(3, 120, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample in range(BATCH):
        labels[sample, : 1 + sample % 5] = -100
    return {"input_ids": ids, "labels": labels}


def padding() -> Tensor:
    """[B, S]: up to three tokens of padding in front."""
    return (torch.arange(LENGTH) >= (torch.arange(BATCH) % 4)[:, None]).long()


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def per_sample() -> Tensor:
    """[B, 1, S, S]: causal, without the padding, and no row without a key."""
    seen = causal() & padding().bool()[:, None, None, :]
    return seen | torch.eye(LENGTH, dtype=torch.bool)


def positions() -> Tensor:
    return torch.arange(LENGTH) + torch.arange(BATCH)[:, None]


def embeddings() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "inputs_embeds": torch.randn(BATCH, LENGTH, HIDDEN, generator=generator),
        "labels": tokens()["labels"],
    }


CALLS: Mapping[str, Any] = {
    "mask [B,S]": lambda: tokens() | {"attention_mask": padding()},
    "mask [B,S] bool": lambda: tokens() | {"attention_mask": padding().bool()},
    "mask [B,1,1,S]": lambda: tokens() | {"attention_mask": padding().bool()[:, None, None, :]},
    "mask [B,1,S,S] bool": lambda: tokens() | {"attention_mask": per_sample()},
    "mask [B,1,S,S] float": lambda: tokens() | {"attention_mask": additive(per_sample())},
    "mask [1,1,S,S] bool": lambda: tokens() | {"attention_mask": causal()[None, None]},
    "mask [1,1,S,S] float": lambda: tokens() | {"attention_mask": additive(causal())[None, None]},
    "mask [1,S]": lambda: tokens() | {"attention_mask": torch.ones(1, LENGTH)},
    "mask [1,1,1,S]": lambda: tokens() | {"attention_mask": torch.ones(1, 1, 1, LENGTH).bool()},
    "positions [B,S]": lambda: tokens() | {"position_ids": positions()},
    "positions [1,S]": lambda: tokens() | {"position_ids": torch.arange(LENGTH)[None]},
    "embeddings": embeddings,
    "no cache": lambda: tokens() | {"use_cache": False},
    "hidden states": lambda: tokens() | {"output_hidden_states": True},
}


def assert_ranks_equal_eager(model: nn.Module, batch: Mapping[str, Any]) -> CapturedCall:
    reference = eager_reference(model, **batch)
    call = capture_call(model, batch)
    assert call.partition.batch_coupled == ()
    run = run_captured(call, attention_group_size=2, ffn_group_size=2, n_microbatches=3)
    assert_parity(run.loss, run.gradients, reference)
    return call


def transformers_model(**overrides: Any) -> nn.Module:
    pytest.importorskip("transformers")
    from disagmoe_compile.models import hf

    return hf.build("qwen3_moe", n_layers=1, **overrides)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_way_of_calling_equals_eager(name):
    assert_ranks_equal_eager(transformers_model(), CALLS[name]())


def test_padding_positions_checkpointing_and_tied_embeddings_together_equal_eager():
    model = transformers_model(tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    batch = tokens() | {"attention_mask": padding(), "position_ids": positions()}
    assert_ranks_equal_eager(model, batch)


class Checkpointed(Block):
    use_reentrant = False

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x_BSD, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_equals_eager_and_keeps_the_wish_to_recompute(monkeypatch, use_reentrant):
    monkeypatch.setattr(Checkpointed, "use_reentrant", use_reentrant)
    torch.manual_seed(0)
    model = LanguageModel(Sizes(n_layers=2), GatheredEinsum)
    for block in model.blocks:
        block.__class__ = Checkpointed
    stages = assert_ranks_equal_eager(model, tokens()).partition.programs.attention
    assert any(node.meta.get("recompute") for node in stages[1].module.graph.nodes)


class Masked(nn.Module):
    """Attention under a mask [S,S], [1,1,S,S] or, of padding, [B,S]; then experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = Sizes(n_layers=1)
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.moe = GatheredEinsum(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        x_B1SD = self.embed(input_ids)[:, None]
        if attention_mask.dtype is not torch.bool:
            attention_mask = attention_mask.bool()[:, None, None, :]
        mixed_B1SD = nn.functional.scaled_dot_product_attention(x_B1SD, x_B1SD, x_B1SD, attention_mask)
        logits = self.head(self.moe(mixed_B1SD.flatten(0, 2)))
        return Output(nn.functional.cross_entropy(logits, labels.flatten()), logits)


SQUARE_MASKS = {
    "[S,S]": torch.ones(BATCH, BATCH).tril().bool(),
    "[1,1,S,S]": torch.ones(BATCH, BATCH).tril().bool()[None, None],
    "[B,S]": (torch.arange(BATCH) >= torch.arange(BATCH)[:, None] // 2).long(),
}


@pytest.mark.parametrize("mask", SQUARE_MASKS)
def test_a_mask_with_the_batch_size_for_a_length_is_told_by_its_use(mask):
    ids = tokens()["input_ids"][:, :BATCH]
    batch = {"input_ids": ids, "attention_mask": SQUARE_MASKS[mask], "labels": ids.clone()}
    call = assert_ranks_equal_eager(Masked(), batch)
    found = next(one for one in call.captured.inputs if "attention_mask" in one.name)
    assert found.per_sample == (mask == "[B,S]")


class ShapesAcross(nn.Module):
    """A torch.Size and a product of sizes, read before the experts and used after them; a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = Sizes()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.moes = nn.ModuleList([GatheredEinsum(sizes), GatheredEinsum(sizes)])
        self.scale = torch.tensor([0.5, 2.0]).repeat(sizes.hidden // 2)
        self.head = nn.Linear(sizes.hidden, sizes.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x_BSD = self.embed(input_ids)
        shape, n_tokens = x_BSD.size(), x_BSD.shape[0] * x_BSD.shape[1]
        for moe in self.moes:
            x_BSD = (
                x_BSD + moe(nn.functional.rms_norm(x_BSD, shape[-1:]).flatten(0, 1)).view(shape) * self.scale
            )
        logits = self.head(x_BSD.reshape(n_tokens, -1))
        return Output(nn.functional.cross_entropy(logits, labels.flatten()), logits)


def test_sizes_read_before_the_experts_are_right_after_them():
    assert_ranks_equal_eager(ShapesAcross(), tokens())
