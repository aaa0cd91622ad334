"""Vector clocks against plain reachability, and cycles."""

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe_compile.plan import Topology
from disagmoe_compile.plan.happens_before import Clocks, Queues, host_order, stream_order
from disagmoe_compile.plan.steps import number_steps
from disagmoe_compile.plan.transfers import Routes
from disagmoe_compile.testing.plans import example_plan


def as_graph(queues):
    graph = nx.DiGraph()
    for nodes in queues.nodes.values():
        graph.add_nodes_from(nodes)
        graph.add_edges_from(pairwise(nodes))
    graph.add_edges_from((first, node) for node, needed in queues.after.items() for first in needed)
    return graph


@st.composite
def random_queues(draw):
    """Up to 4 queues of up to 5 nodes, with arbitrary edges between them: with and without cycles."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    nodes = {f"q{k}": list(range(start, start + size)) for k, (start, size) in enumerate(zip(starts, sizes))}
    total = sum(sizes)
    edges = draw(st.lists(st.tuples(st.integers(0, total - 1), st.integers(0, total - 1)), max_size=10))
    after = {}
    for first, second in edges:
        after.setdefault(second, []).append(first)
    return Queues(nodes, after, {})


@settings(max_examples=150)
@given(random_queues())
def test_clocks_are_reachability(queues):
    graph, clocks = as_graph(queues), Clocks(queues)
    assert bool(clocks.blocked) == (not nx.is_directed_acyclic_graph(graph))
    if not clocks.blocked:
        closure = nx.transitive_closure(graph)
        for one in graph:
            for other in graph:
                if one != other:
                    assert clocks.before(one, other) == closure.has_edge(one, other)


@settings(max_examples=150)
@given(random_queues())
def test_a_reported_cycle_is_one(queues):
    blocked = Clocks(queues).blocked
    for one, other in zip(blocked, (*blocked[1:], *blocked[:1])):
        assert one.node in queues.nodes[one.queue]
        assert one.needs in queues.after[one.node]
        assert other.node in queues.nodes[other.queue]
        assert one.needs in queues.nodes[other.queue]


@pytest.mark.parametrize("topology", [Topology(1, 1, 1, 1, 2), Topology(1, 1, 2, 2, 2)])
def test_what_streams_order_the_host_orders_too(topology):
    plan = example_plan(topology, 2)
    routes = Routes(plan.transfers)
    steps = number_steps(plan.training, routes)
    host, streams = Clocks(host_order(steps, routes)), Clocks(stream_order(steps, routes))
    assert not host.blocked and not streams.blocked
    numbers = range(len(steps.all))
    ordered = [(a, b) for a in numbers for b in numbers if a != b and streams.before(a, b)]
    assert all(host.before(a, b) for a, b in ordered)
    assert any(host.before(a, b) and not streams.before(a, b) for a, b in pairwise(numbers))
