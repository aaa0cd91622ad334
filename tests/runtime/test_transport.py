"""Messages between real processes, larger than any buffer of the system."""

from __future__ import annotations

import torch
import torch.distributed as dist

from disagmoe_compile.plan.topology import Topology
from disagmoe_compile.runtime.process_group import PipelineGroups
from disagmoe_compile.runtime.transport.process_group import ProcessGroupTransport
from disagmoe_compile.testing.pool import GlooPool

N_MESSAGES, NUMEL = 3, 16 * 2**20  # 64 MB each


def send_before_receiving() -> list[tuple[bool, int]]:
    """Both ranks have all of their messages on the way before either asks for one."""
    topology = Topology(1, 1, 1, 1, n_boundaries=1)
    groups = PipelineGroups.create(topology, 60.0)
    transport = ProcessGroupTransport(topology, groups.lanes, groups.replicas, 60.0)
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    sent = [transport.isend(torch.full((NUMEL,), 10.0 * rank + i), peer, tag=i) for i in range(N_MESSAGES)]
    found = []
    for i in range(N_MESSAGES):
        buffer = torch.empty(NUMEL)
        transport.irecv(buffer, peer, tag=i).wait()
        found.append((bool((buffer == buffer[0]).all()), int(buffer[0])))
    for work in sent:
        work.wait()
    transport.close()
    return found


def test_large_messages_both_ways_at_once_arrive(pool: GlooPool) -> None:
    results = pool.run(send_before_receiving, world_size=2, timeout_s=120)
    assert results == [[(True, 10 * (1 - rank) + i) for i in range(N_MESSAGES)] for rank in (0, 1)]
