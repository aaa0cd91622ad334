"""Binding under real torch.compile on several gloo ranks: values, optimizers built before the first call,
re-traces, errors.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import GatheringBackend, batch, make_model, place, topology, worst_parameter_error
from torch import nn

from disagmoe_compile.runtime.binding import HOLDERS, bind
from disagmoe_compile.runtime.hollow import hollow_like, is_hollow
from disagmoe_compile.runtime.loading.load import init_weights
from disagmoe_compile.testing.pool import GlooPool


def step(model: Any, optimizer: torch.optim.Optimizer, x_BD: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x_BD)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(adamw: dict[str, bool], tied: bool = False, seed_by_rank: bool = False) -> dict[str, Any]:
    """Three AdamW steps against eager. With `seed_by_rank` every rank starts from other values than rank 0."""
    where = topology(2, dist.get_world_size() - 2)
    reference = make_model(0, tied=tied)
    model = make_model(dist.get_rank() if seed_by_rank else 0, tied=tied)
    unused = model.unused.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
    eager_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, **adamw)
    backend = GatheringBackend(model, where)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    losses = [
        (step(compiled, optimizer, batch(i)), step(reference, eager_optimizer, batch(i))) for i in range(3)
    ]
    assert backend.binding is not None
    moments = [s["exp_avg"].numel() for s in optimizer.state.values()]
    return {
        "loss_error": max(abs(a - b) / abs(b) for a, b in losses),
        "parameter_error": worst_parameter_error(backend.binding, reference),
        "local_bytes": backend.binding.local_bytes,
        "moment_elements": sum(moments),
        "traces": len(backend.traced),
        "unused_kept": torch.equal(model.unused, unused),
    }


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
def test_adamw_built_before_the_first_call_updates_exactly_the_parts(pool: GlooPool, kind: str) -> None:
    adamw = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    results = pool.run(train, adamw, world_size=4)
    assert all(r["loss_error"] < 1e-6 and r["parameter_error"] < 1e-6 for r in results), results
    assert all(r["traces"] == 1 for r in results)


def test_memory_of_parameters_and_moments_is_the_share(pool: GlooPool) -> None:
    results = pool.run(train, {}, world_size=4)
    dense, experts = 8 * 8 + 8 + 8 * 8, 4 * 8 * 8
    assert [r["moment_elements"] for r in results] == [dense, dense, experts // 2, experts // 2]
    assert [r["local_bytes"] for r in results] == [4 * n for n in (dense, dense, experts // 2, experts // 2)]


def test_experts_that_do_not_divide_evenly_are_split_by_the_plan_s_rule(pool: GlooPool) -> None:
    results = pool.run(train, {}, world_size=5)
    assert [r["moment_elements"] for r in results[2:]] == [2 * 64, 64, 64]
    assert all(r["parameter_error"] < 1e-6 for r in results)


def test_initial_values_are_rank_0_s(pool: GlooPool) -> None:
    results = pool.run(train, {}, False, True, world_size=3)
    assert all(r["loss_error"] < 1e-6 and r["parameter_error"] < 1e-6 for r in results), results


def test_a_tied_parameter_is_bound_once(pool: GlooPool) -> None:
    results = pool.run(train, {}, True, world_size=3)
    assert all(r["loss_error"] < 1e-6 and r["parameter_error"] < 1e-6 for r in results), results
    assert results[0]["moment_elements"] == 8 * 8 + 8


def test_parameters_outside_the_graph_are_left_alone(pool: GlooPool) -> None:
    assert all(r["unused_kept"] for r in pool.run(train, {}, world_size=3))


def values_of_every_dtype() -> list[bool]:
    """Parts of odd dtypes and strides arrive bit by bit. Rank 1 owns rows 1..3 of everything."""
    from disagmoe_compile.plan.topology import Group, Role
    from disagmoe_compile.runtime.placement import ParameterPlacement

    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
    source = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(5))
    wanted = {str(d): source.to(d) for d in dtypes} | {
        "transposed": source.transpose(1, 2),
        "scalar": source[0, 0, 0],
    }
    mine = {
        name: nn.Parameter(
            value.clone() if dist.get_rank() == 0 else torch.zeros_like(value), requires_grad=False
        )
        for name, value in wanted.items()
    }
    placements = {
        name: ParameterPlacement(
            name, tuple(p.shape), Group(Role.FFN, 0), {0: (0, 1), 1: (1, 3)} if p.dim() else {1: None}
        )
        for name, p in mine.items()
    }
    bind(mine, placements, dist.get_rank(), dist.group.WORLD)
    if dist.get_rank() == 0:
        return [torch.equal(mine["transposed"], wanted["transposed"][:1]), mine["scalar"].shape == (0,)]
    same = [
        torch.equal(mine[n].float(), (w[1:3] if w.dim() else w).float()) and mine[n].stride() == w.stride()
        for n, w in wanted.items()
    ]
    return same


def test_every_dtype_and_stride_arrives(pool: GlooPool) -> None:
    assert all(all(flags) for flags in pool.run(values_of_every_dtype, world_size=2))


def change_a_parameter(how: str) -> None:
    where = topology(1, 1)
    model = make_model()
    compiled = torch.compile(model, backend=GatheringBackend(model, where), fullgraph=True)
    compiled(batch(0)).backward()
    if how == "freeze":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    elif how == "convert":
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    elif how == "replace":
        model.embed.weight = nn.Parameter(torch.zeros(8, 8))
        model.experts = nn.Parameter(torch.zeros(4, 8, 8))
    elif how == "resize":
        for parameter in model.parameters():
            parameter.grad = None
            parameter.data = torch.zeros(5, *parameter.shape[1:])
    compiled(batch(0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "freeze",
            "has requires_grad=False and had True; freeze or unfreeze parameters before the first call",
        ),
        ("convert", "is torch.float64 on cpu and was torch.float32 on cpu; convert or move the model before"),
        ("resize", "where this rank's part is"),
    ],
)
def test_a_parameter_changed_behind_our_back_raises_on_every_rank(
    pool: GlooPool, how: str, message: str
) -> None:
    outcomes = pool.outcomes(change_a_parameter, how, world_size=2)
    assert all(o.failure is not None and message in o.failure.message for o in outcomes), outcomes


def bind_with_a_gradient() -> None:
    model = make_model()
    model(batch(0)).backward()
    torch.compile(model, backend=GatheringBackend(model, topology(1, 1)), fullgraph=True)(batch(0))


def test_a_gradient_from_before_the_first_call_raises(pool: GlooPool) -> None:
    outcomes = pool.outcomes(bind_with_a_gradient, world_size=2)
    assert all(
        o.failure is not None and "call optimizer.zero_grad() first" in o.failure.message for o in outcomes
    )


def is_forgotten_with_the_model() -> tuple[int, int]:
    before = len(HOLDERS)
    model = make_model()
    bind(dict(model.named_parameters()), place(model, topology(1, 1)), dist.get_rank(), dist.group.WORLD)
    added = len(HOLDERS) - before
    del model
    gc.collect()
    return added, len(HOLDERS) - before


def test_records_die_with_their_parameters(pool: GlooPool) -> None:
    assert pool.run(is_forgotten_with_the_model, world_size=2) == [(4, 0), (4, 0)]


def test_is_hollow_tells_a_tensor_without_storage_from_an_empty_one() -> None:
    assert is_hollow(hollow_like(torch.ones(3, 2)))
    assert not is_hollow(torch.ones(3, 2)) and not is_hollow(torch.empty(0, 2))


def withhold_and_bind(same_seed: bool, forgetful: bool = False) -> torch.Tensor:
    model = make_model()
    if not same_seed:
        torch.manual_seed(dist.get_rank())
    if not (forgetful and dist.get_rank()):
        init_weights(model, init=lambda module: [p.normal_() for p in module.parameters(recurse=False)])
    bind(dict(model.named_parameters()), place(model, topology(1, 1)), dist.get_rank(), dist.group.WORLD)
    return model.experts.detach()


def test_an_owner_makes_its_own_values_where_they_were_withheld(pool: GlooPool) -> None:
    empty, experts = pool.run(withhold_and_bind, True, world_size=2)
    assert empty.shape == (0, 8, 8) and experts.shape == (4, 8, 8)
    assert experts.std() > 0.5, "values of `init`, not of rank 0, which has 0.3"


@pytest.mark.parametrize("arguments", [(False,), (True, True)], ids=["other seed", "one rank alone"])
def test_ranks_that_would_start_from_different_values_raise(
    pool: GlooPool, arguments: tuple[bool, ...]
) -> None:
    for outcome in pool.outcomes(withhold_and_bind, *arguments, world_size=2):
        assert outcome.failure is not None
        assert "differs from rank 0 in where parameters get their first values" in outcome.failure.message
        assert "in the same state of torch's generator" in outcome.failure.message
