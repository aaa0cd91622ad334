"""Several documents in one batch: attention that stays inside a document. Right where the batch can be cut, refused where not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from disagmoe_compile.models.styles.gathered_einsum import GatheredEinsum
from disagmoe_compile.models.styles.language_model import Output, Sizes
from disagmoe_compile.testing.parity import assert_parity, eager_reference
from disagmoe_compile.testing.virtual import capture_call, run_captured

PLAN = {"attention_group_size": 2, "ffn_group_size": 2, "n_microbatches": 2}


class Packed(nn.Module):
    """All samples are one row of tokens; `documents_of` says to which document each belongs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = Sizes()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.moe = GatheredEinsum(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor, packing: Tensor) -> Output:
        n_tokens = input_ids.numel()
        mask_TT = self.mask_of(packing, n_tokens)
        x_TD = self.embed(input_ids).flatten(0, 1)
        q, k, v = self.qkv(x_TD)[None].chunk(3, -1)
        x_TD = x_TD + F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT[None])[0]
        logits = self.head(x_TD + self.moe(x_TD))
        return Output(F.cross_entropy(logits, labels.flatten()), logits)

    def mask_of(self, packing: Tensor, n_tokens: int) -> Tensor:
        document_T = self.documents_of(packing, n_tokens)
        is_causal = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()
        return (document_T[:, None] == document_T[None, :]) & is_causal

    def documents_of(self, cu_seqlens: Tensor, n_tokens: int) -> Tensor:
        """`cu_seqlens`, as flash-attn takes it: where each document of the batch begins, and the end."""
        return torch.searchsorted(cu_seqlens, torch.arange(n_tokens), right=True)


class DocumentOfEachToken(Packed):
    def documents_of(self, packing: Tensor, n_tokens: int) -> Tensor:
        """[B, S]: the document of each token."""
        return packing.flatten()


def batch(shape: tuple[int, int], packing: list) -> dict[str, Tensor]:
    ids = torch.randint(3, 120, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone(), "packing": torch.tensor(packing)}


@pytest.mark.parametrize(
    "packing", [[0, 5, 13, 14, 24], [0, 2, 6, 9, 12, 18, 20, 24]], ids=["across", "inside"]
)
def test_boundaries_counted_over_the_whole_batch_are_refused_by_name_and_line(packing):
    with pytest.raises(
        Exception, match=r"test_packed_batches.py:\d+\) mixes .*`L\['packing'\]`.*whole batch"
    ):
        capture_call(Packed(), batch((4, 6), packing))


def test_a_packed_batch_of_one_sample_equals_eager():
    one = batch((1, 24), [0, 5, 13, 24])
    reference = eager_reference(Packed(), **one)
    run = run_captured(capture_call(Packed(), one), **PLAN)
    assert_parity(run.loss, run.gradients, reference)


class Mask(Packed):
    def mask_of(self, packing: Tensor, n_tokens: int) -> Tensor:
        """[T, T]: which tokens see which."""
        return packing


def test_one_sample_beside_a_mask_of_its_positions_equals_eager():
    document_T = torch.tensor([0] * 5 + [1] * 8 + [2] * 11)
    mask_TT = (document_T[:, None] == document_T[None, :]).tril()
    one = batch((1, 24), []) | {"packing": mask_TT}
    reference = eager_reference(Mask(), **one)
    run = run_captured(capture_call(Mask(), one), **PLAN)
    assert_parity(run.loss, run.gradients, reference)


def test_documents_given_token_by_token_equal_eager_where_none_spans_samples():
    one = batch((4, 6), [[0, 0, 1, 1, 1, 1], [2] * 6, [3, 4, 5, 5, 5, 5], [6, 6, 6, 7, 7, 7]])
    reference = eager_reference(DocumentOfEachToken(), **one)
    call = capture_call(DocumentOfEachToken(), one)
    assert any("scaled_dot_product_attention" in line for line in call.partition.batch_coupled)
    run = run_captured(call, **PLAN)
    assert_parity(run.loss, run.gradients, reference)
