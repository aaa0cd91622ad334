"""Private generators: reproducible, independent, and without a trace in the user's generators."""

from __future__ import annotations

import itertools

import torch

from disagmoe_compile.runtime.rng import derive_seed, draw_call_seed, private_rng

CPU = torch.device("cpu")


def test_a_private_generator_repeats_its_numbers_and_restores_the_global_one() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with private_rng(7, CPU):
        first = torch.nn.functional.dropout(torch.ones(64))
    with private_rng(7, CPU):
        second = torch.nn.functional.dropout(torch.ones(64))
    with private_rng(8, CPU):
        third = torch.nn.functional.dropout(torch.ones(64))
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert torch.equal(torch.rand(3), wanted)


def test_the_global_generator_is_restored_after_an_error() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    try:
        with private_rng(7, CPU):
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.rand(3), wanted)


def test_call_seeds_follow_the_user_s_seed_and_differ_between_calls() -> None:
    torch.manual_seed(3)
    first = [draw_call_seed(), draw_call_seed()]
    torch.manual_seed(3)
    assert [draw_call_seed(), draw_call_seed()] == first
    assert first[0] != first[1]


def test_seeds_of_all_stages_micro_batches_and_slices_differ_and_fit_torch() -> None:
    seeds = [derive_seed(5, *key) for key in itertools.product(range(6), range(6), range(4))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(5, 1, 11, 1) != derive_seed(5, 11, 1, 1)
