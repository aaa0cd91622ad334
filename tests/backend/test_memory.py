"""A model that is larger than the memory of a rank trains, and a rank uses its share: counted, and resident."""

from __future__ import annotations

import pytest
import torch
from memory_ranks import MIB, on_meta, train_under_a_limit

N_FFN = 7
# 1344 MiB of experts and few other parameters
SIZES = {
    "n_layers": 4,
    "hidden_size": 512,
    "expert_hidden": 2048,
    "num_experts": 28,
}
OPTIONS = {
    "attention_group_size": 1, "ffn_group_size": N_FFN, "n_microbatches": 2, "stage_compiler": "eager", "timeout_s": 120,
}  # fmt: skip


@pytest.mark.slow
def test_a_rank_uses_its_share_of_a_model_that_exceeds_its_memory(pool):
    shapes = {name: parameter.numel() * 4 for name, parameter in on_meta(SIZES).named_parameters()}
    experts = sum(nbytes for name, nbytes in shapes.items() if ".experts." in name)
    dense = sum(shapes.values()) - experts
    share = experts // N_FFN
    # gradients and momenta too; beside them stacks of threads (8 MiB each), and a module at its initialisation (336 MiB, first)
    limit = 3 * share + 350 * MIB
    assert sum(shapes.values()) > limit, "parameters alone do not fit"
    found = pool.run(
        train_under_a_limit, SIZES, OPTIONS, limit, world_size=1 + N_FFN, process_group=False, timeout_s=500
    )
    for rank, memory in enumerate(found):
        owned = dense if rank == 0 else share
        assert "can't allocate memory" in memory.refused
        assert memory.losses == found[0].losses and torch.tensor(memory.losses).isfinite().all()
        for counted in (memory.parameters, memory.gradients, memory.optimizer):
            assert owned <= counted <= 1.05 * owned
        if (
            rank > 0
        ):  # the attention rank's share is a few MiB: less than what the interpreter takes meanwhile
            assert 3 * owned <= memory.resident <= 1.05 * 3 * owned
