"""What moves at a boundary, how large it is, and what fixes its size."""

import pytest

from disagmoe_compile.plan import ActionKind, BoundarySizes, TensorSpec, Topology, build_transfers
from disagmoe_compile.plan.transfers import Routes

SIZES = BoundarySizes(
    tokens=10,
    top_k=2,
    in_features=16,
    out_features=12,
    token_dtype="bfloat16",
    weight_dtype="float32",
    out_dtype="bfloat16",
    num_experts=8,
    carried=(TensorSpec("hidden", (10, 16), "float32"), TensorSpec("ids", (10,), "int64")),
    carried_requires_grad=(True, False),
)
LOCAL, CROSSING = Topology(2, 2, 1, 1, 2), Topology(2, 2, 2, 2, 2)


def names(topology, **options):
    return [
        t.name
        for t in build_transfers(topology, [SIZES] * topology.n_boundaries, {0: {"float32": 7}}, **options)
    ]


def test_a_boundary_has_two_transfers_each_way():
    expected = ["dispatch.0", "combine.0", "combine_bwd.0", "dispatch_bwd.0"]
    assert names(LOCAL)[:4] == expected


def test_the_residual_moves_only_between_groups():
    assert not [n for n in names(LOCAL) if n.startswith("residual")]
    assert [n for n in names(CROSSING) if n.startswith("residual")] == [
        "residual.0", "residual_bwd.0", "residual.1", "residual_bwd.1",
    ]  # fmt: skip


def test_without_training_nothing_moves_backward():
    assert names(LOCAL, training=False) == ["dispatch.0", "combine.0", "dispatch.1", "combine.1"]


def test_gradients_are_reduced_only_between_replicas():
    assert "grads.0" in names(LOCAL)
    assert "grads.0" not in names(Topology(1, 2, 1, 1, 2))


def test_a_message_costs_its_rows_and_pairs():
    transfers = {t.name: t for t in build_transfers(CROSSING, [SIZES] * 2)}
    sizes = {"rows": 3, "pairs": 5}
    assert transfers["dispatch.0"].nbytes(sizes) == 2 * 8 + 3 * 16 * 2 + 2 * 5 * 4 + 5 * 4
    assert transfers["combine.0"].nbytes(sizes) == transfers["combine_bwd.0"].nbytes(sizes) == 3 * 12 * 2
    assert transfers["dispatch_bwd.0"].nbytes(sizes) == 3 * 16 * 2 + 5 * 4
    assert transfers["residual.0"].nbytes() == 2 * 20 * 4 + 10 * 16 * 4 + 10 * 8
    assert transfers["residual_bwd.0"].nbytes() == 10 * 16 * 4
    assert transfers["dispatch.0"].nbytes() == 2 * 8 + 10 * 16 * 2 + 2 * 20 * 4 + 20 * 4


def test_no_gradient_of_the_residual_without_a_tensor_that_needs_one():
    sizes = BoundarySizes(4, 1, 8, 8, "float32", "float32", "float32", 2)
    found = [t.name for t in build_transfers(Topology(1, 1, 2, 1, 1), [sizes])]
    assert "residual.0" in found and "residual_bwd.0" not in found


@pytest.mark.parametrize(
    ("topology", "transfer", "source"),
    [
        (LOCAL, "dispatch.0", None),
        (LOCAL, "combine.0", (ActionKind.SEND, "dispatch.0")),
        (CROSSING, "combine.0", (ActionKind.WAIT, "residual.0")),
        (CROSSING, "combine_bwd.1", (ActionKind.WAIT, "dispatch.1")),
        (CROSSING, "dispatch_bwd.1", (ActionKind.SEND, "dispatch.1")),
        (CROSSING, "residual_bwd.0", None),
    ],
)
def test_what_fixes_the_size_of_a_receive(topology, transfer, source):
    routes = Routes(build_transfers(topology, [SIZES] * 2))
    assert routes.size_source(routes.by_name[transfer]) == source


def test_boundaries_must_match_the_topology():
    with pytest.raises(ValueError, match="1 boundary sizes"):
        build_transfers(LOCAL, [SIZES])


@pytest.mark.parametrize("change", [{"tokens": 0}, {"top_k": 9}, {"carried_requires_grad": ()}])
def test_sizes_validate_themselves(change):
    fields = {name: getattr(SIZES, name) for name in SIZES.__slots__}
    with pytest.raises(ValueError):
        BoundarySizes(**{**fields, **change})
