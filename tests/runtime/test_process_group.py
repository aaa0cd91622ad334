"""The process group that an unchanged script never made, and the groups of a pipeline."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from disagmoe_compile.errors import InputError
from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.runtime.process_group import (
    Launch,
    PipelineGroups,
    check_one_rank_per_device,
    ensure_process_group,
)
from disagmoe_compile.testing.pool import GlooPool

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def initialise() -> tuple[bool, bool, int]:
    was = ensure_process_group(60.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    return was, ensure_process_group(60.0), int(total)


def test_several_ranks_are_initialised_from_the_environment_and_once(pool: GlooPool) -> None:
    assert pool.run(initialise, world_size=3, process_group=False) == [(True, True, 3)] * 3


def test_one_process_needs_no_process_group(pool: GlooPool) -> None:
    assert pool.run(ensure_process_group, 60.0, world_size=1, process_group=False) == [False]


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def initialise_as_rank_0() -> None:
    if os.environ["RANK"] == "0":
        ensure_process_group(5.0)


def test_a_port_in_use_is_one_clear_error(pool: GlooPool, busy_port: int) -> None:
    outcomes = pool.outcomes(
        initialise_as_rank_0, world_size=2, process_group=False, env={"MASTER_PORT": str(busy_port)}
    )
    assert outcomes[0].failure is not None
    assert outcomes[0].failure.summary == (
        f"InputError: port {busy_port} of 127.0.0.1 is in use: set MASTER_PORT (torchrun --master-port) to a free one"
    )


def keys_after_restart() -> list[bool]:
    """What the first run left in the store must not be seen by the second."""
    from datetime import timedelta

    from disagmoe_compile.runtime.process_group import _store

    launch = Launch.from_environment()
    assert launch is not None
    first = _store(launch, timedelta(seconds=20))
    first.set("address", "stale")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    again = Launch.from_environment()
    assert again is not None
    second = _store(again, timedelta(seconds=20))
    return [first.check(["address"]), second.check(["address"])]


def test_a_restart_does_not_see_the_addresses_of_the_dead(pool: GlooPool) -> None:
    assert pool.run(keys_after_restart, world_size=1, process_group=False) == [[True, False]]


def test_the_environment_is_read_and_checked() -> None:
    assert Launch.from_environment({}) is None
    launch = Launch.from_environment(
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    assert launch is not None and (
        launch.rank,
        launch.world_size,
        launch.restarts,
        launch.uses_agent_store,
    ) == (1, 4, 2, True)
    with pytest.raises(InputError, match="MASTER_PORT not set"):
        Launch.from_environment({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})
    with pytest.raises(InputError, match="RANK=4 is outside WORLD_SIZE=4"):
        Launch.from_environment({**TORCHRUN, "RANK": "4"})
    with pytest.raises(InputError, match="must be numbers"):
        Launch.from_environment({**TORCHRUN, "MASTER_PORT": "http"})


def test_two_ranks_on_one_device_are_named_with_their_local_ranks() -> None:
    store = dist.HashStore()
    launches = [Launch(rank, 2, rank, "127.0.0.1", 29500, 0, False) for rank in range(2)]
    store.set("device/0", "0 host cuda:GPU-1")
    with pytest.raises(
        InputError, match=r"ranks 0 \(LOCAL_RANK=0\) and 1 \(LOCAL_RANK=1\) are both on host cuda:GPU-1"
    ):
        check_one_rank_per_device(store, launches[1], "host cuda:GPU-1")
    check_one_rank_per_device(store, launches[1], "host cuda:GPU-2")


def exchange(shape: tuple[int, int, int, int]) -> tuple[int, bool, bool]:
    topology = Topology(*shape, n_boundaries=2)
    groups = PipelineGroups.create(topology, 30.0)
    total = torch.ones(1)
    if groups.members is not None:
        dist.all_reduce(total, group=groups.members)
    first_ffn = topology.attention_groups * topology.attention_group_size
    lane = groups.lanes[Role.ATTENTION, Role.FFN]
    arrived = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), first_ffn, group=lane)
    elif dist.get_rank() == first_ffn:
        dist.recv(arrived, 0, group=lane)
    return int(total), groups.replicas is not None, bool(arrived.item())


def test_each_worker_group_has_its_members_and_lanes_reach_across(pool: GlooPool) -> None:
    assert pool.run(exchange, (2, 1, 1, 1), world_size=3) == [
        (2, True, False),
        (2, True, False),
        (1, False, True),
    ]
    results = pool.run(exchange, (1, 2, 2, 1), world_size=4)
    assert results == [(1, False, False), (1, False, False), (2, False, True), (2, False, False)]


def test_a_plan_of_another_world_size_raises_on_every_rank(pool: GlooPool) -> None:
    for outcome in pool.outcomes(exchange, (2, 2, 1, 1), world_size=3):
        assert outcome.failure is not None and "the plan needs 4 ranks" in outcome.failure.message
