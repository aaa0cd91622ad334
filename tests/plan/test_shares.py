"""Shares of experts and of samples: everything once, in order, as even as can be."""

import dataclasses

import pytest

from disagmoe_compile.plan import Topology, validate
from disagmoe_compile.plan.shares import fair_share, samples_of
from disagmoe_compile.testing.plans import example_plan


def test_fair_shares_cover_everything_in_order_and_differ_by_at_most_one():
    for total in range(12):
        for parts in range(1, 6):
            shares = [fair_share(total, parts, index) for index in range(parts)]
            assert [i for share in shares for i in share] == list(range(total))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_every_sample_is_in_one_micro_batch_of_one_member_and_sizes_differ_by_at_most_one():
    for batch in range(1, 20):
        for members in range(1, 5):
            for n in range(1, 6):
                slots = [samples_of(batch, members, n, m, i) for m in range(members) for i in range(n)]
                assert [sample for slot in slots for sample in slot] == list(range(batch))
                assert max(map(len, slots)) - min(map(len, slots)) <= 1


@pytest.mark.parametrize(
    ("batch", "size", "sizes"), [(7, 2, (2, 1)), (4, 1, (1,)), (3, 1, (1,)), (9, 3, (3, 2))]
)
def test_a_plan_whose_batch_does_not_divide_is_valid_and_knows_its_sizes(batch, size, sizes):
    plan = example_plan(Topology(2, 2, 1, 1, 2), n_microbatches=2)
    workload = dataclasses.replace(plan.workload, global_batch_size=batch, microbatch_size=size)
    uneven = dataclasses.replace(plan, workload=workload)
    assert validate(uneven) == []
    assert uneven.microbatch_sizes == sizes
    wrong = dataclasses.replace(workload, microbatch_size=size + 1)
    assert [v.rule for v in validate(dataclasses.replace(plan, workload=wrong))] == ["workload"]
