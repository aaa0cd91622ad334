"""Ranks compare what they must hold in common; a difference raises on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from disagmoe_compile.runtime.agreement import agree, batch_digest, broadcast_text, gather_numbers
from disagmoe_compile.testing.pool import GlooPool


def compare(values: list[str]) -> None:
    compared = {"the seed": "7", "the batch": values[dist.get_rank()]}
    agree("a call", compared, dist.group.WORLD, "pass the same global batch to every rank")


def test_equal_values_pass(pool: GlooPool) -> None:
    pool.run(compare, ["a", "a", "a"], world_size=3)


@pytest.mark.parametrize(
    ("values", "ranks"), [(["a", "b", "a"], "rank 1 differs"), (["b", "a", "a"], r"ranks [1, 2] differ")]
)
def test_a_difference_raises_on_every_rank_and_names_who_differs(
    pool: GlooPool, values: list[str], ranks: str
) -> None:
    for outcome in pool.outcomes(compare, values, world_size=3):
        assert outcome.failure is not None and outcome.failure.kind == "DivergenceError"
        assert (
            outcome.failure.message
            == f"{ranks} from rank 0 in the batch: pass the same global batch to every rank"
        )


def meet_at(places: list[str]) -> None:
    place = places[dist.get_rank()]
    if place == "a step":
        gather_numbers(place, (1.0, 2.0), dist.group.WORLD)
    else:
        agree(place, {"the batch": "a"}, dist.group.WORLD)


def test_ranks_at_different_places_of_the_script_are_told_where_the_others_are(pool: GlooPool) -> None:
    for outcome in pool.outcomes(meet_at, ["a call", "a step", "a call"], world_size=3):
        assert outcome.failure is not None and outcome.failure.kind == "DivergenceError"
        assert outcome.failure.message.startswith("rank 1 is at a step where rank 0 is at a call: ")


def numbers_of_all() -> list[list[float]]:
    return gather_numbers("a step", (dist.get_rank(), float("nan")), dist.group.WORLD).nan_to_num(-1).tolist()


def test_numbers_of_all_ranks_come_in_rank_order(pool: GlooPool) -> None:
    assert pool.run(numbers_of_all, world_size=3) == [[[0, -1], [1, -1], [2, -1]]] * 3


def share_text(text: str | None) -> str:
    return broadcast_text(text if dist.get_rank() == 0 else None, dist.group.WORLD)


@pytest.mark.parametrize("text", ["", "plan: 3F1 → 3SEND[combine.1]1", "x" * 100_000])
def test_rank_0_s_text_reaches_all(pool: GlooPool, text: str) -> None:
    assert pool.run(share_text, text, world_size=3) == [text] * 3


def test_where_rank_0_has_no_text_all_raise_instead_of_waiting(pool: GlooPool) -> None:
    outcomes = pool.outcomes(share_text, None, world_size=2)
    assert all(o.failure is not None and o.failure.kind == "DivergenceError" for o in outcomes)


def test_the_digest_sees_bytes_shape_dtype_and_order() -> None:
    ids = torch.arange(6)
    changed = ids.clone()
    changed[5] += 1
    digests = [
        batch_digest(values)
        for values in (
            [ids], [changed], [ids.view(2, 3)], [ids.int()], [ids, ids], [ids, None], [None, ids], [ids, 0.5],
            [torch.tensor(1.0)], [torch.empty(0)], [],
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)


def test_equal_batches_have_equal_digests_whatever_their_strides() -> None:
    ids = torch.arange(6).view(2, 3)
    assert batch_digest([ids]) == batch_digest([ids.t().contiguous().t()])
    assert batch_digest([torch.ones(3, dtype=torch.bfloat16)]) == batch_digest(
        [torch.ones(3, dtype=torch.bfloat16)]
    )
