"""Counts travel ahead of what they count, and nobody waits for them: a routed receive is posted before its sender has started."""

from __future__ import annotations

import torch
import torch.distributed as dist

from disagmoe_compile.plan.topology import Role, Topology
from disagmoe_compile.runtime.process_group import PipelineGroups
from disagmoe_compile.runtime.transport.process_group import ProcessGroupTransport
from disagmoe_compile.testing.pool import GlooPool

_COUNT, _ROWS = 0, 1  # tags


def exchange() -> list[float]:
    """Rank 0 sends only when it has heard that rank 1 has posted everything: a rank that waited for the count would hang."""
    topology = Topology(1, 1, 1, 1, n_boundaries=1)
    groups = PipelineGroups.create(topology, 20.0)
    transport = ProcessGroupTransport(topology, groups.lanes, groups.replicas, 20.0)
    posted = torch.ones(1)
    if topology.group_of_rank(dist.get_rank()).role is Role.ATTENTION:
        dist.recv(posted, 1)
        rows = torch.arange(3.0)
        for tensor, tag in ((torch.tensor([len(rows)]), _COUNT), (rows, _ROWS)):
            transport.isend(tensor, 1, tag).wait()
        return rows.tolist()
    count = torch.zeros(1, dtype=torch.int64)

    def post_rows() -> torch.Tensor:
        rows = torch.zeros(int(count))
        transport.irecv(rows, 0, _ROWS).wait()
        return rows

    receiving = transport.when_arrived([transport.irecv(count, 0, _COUNT)], post_rows)
    dist.send(posted, 0)
    return receiving.result().tolist()


def test_a_routed_receive_is_posted_without_waiting_for_its_count(pool: GlooPool) -> None:
    assert pool.run(exchange, world_size=2, timeout_s=30) == [[0.0, 1.0, 2.0]] * 2
