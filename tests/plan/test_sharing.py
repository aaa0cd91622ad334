"""Fair sharing of links, in exact numbers."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe_compile.plan.sharing import Network


def test_a_flow_alone_moves_at_the_speed_of_its_slowest_link() -> None:
    network = Network({"a": Fraction(2), "b": Fraction(3)})
    network.add(0, Fraction(8), ("a", "b"), Fraction(1))
    assert network.next_end() == 5


def test_two_flows_of_a_link_halve_its_speed_and_the_first_to_end_gives_it_back() -> None:
    network = Network({"a": Fraction(1)})
    network.add(0, Fraction(4), ("a",), Fraction(0))
    network.add(1, Fraction(4), ("a",), Fraction(2))
    assert network.next_end() == 6  # 2 alone, then 2 at half speed
    assert network.finish() == 0
    assert network.next_end() == 8


def test_what_a_tight_link_leaves_goes_to_others() -> None:
    """Flow 0 is held to 1/2 by `a`; flow 2 gets the rest of `b`: max-min fairness, not an equal share of each link."""
    network = Network({"a": Fraction(1), "b": Fraction(2)})
    network.add(0, Fraction(9), ("a", "b"), Fraction(0))
    network.add(1, Fraction(9), ("a",), Fraction(0))
    network.add(2, Fraction(9), ("b",), Fraction(0))
    assert network.rates() == {0: Fraction(1, 2), 1: Fraction(1, 2), 2: Fraction(3, 2)}


def test_directions_do_not_share() -> None:
    network = Network({"send": Fraction(1), "recv": Fraction(1)})
    network.add(0, Fraction(4), ("send",), Fraction(0))
    network.add(1, Fraction(4), ("recv",), Fraction(0))
    assert network.rates() == {0: 1, 1: 1}


def test_a_link_without_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity of link a must be positive, got 0"):
        Network({"a": 0})


def test_rates_that_come_again_are_those_of_a_network_that_never_had_them() -> None:
    """The same flows in another order of coming and going."""
    capacities = {"a": Fraction(1), "b": Fraction(2), "c": Fraction(3)}
    ways = [("a", "b"), ("b", "c"), ("c",), ("a", "c")]
    network = Network(capacities)
    for order in itertools.permutations(range(4)):
        for flow in order:
            network.add(flow, Fraction(1000 + flow), ways[flow], Fraction(0))
        fresh = Network(capacities)
        for flow in range(4):
            fresh.add(flow, Fraction(1000), ways[flow], Fraction(0))
        assert network.rates() == fresh.rates()
        while network.next_end() is not None:
            network.finish()


LINKS = ("a", "b", "c")
flows = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sets(st.sampled_from(LINKS), min_size=1, max_size=2).map(lambda s: tuple(sorted(s))),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=6,
)


@given(flows=flows, capacities=st.tuples(*[st.integers(1, 4)] * 3))
def test_sharing_conserves_bytes_and_never_exceeds_a_capacity(
    flows: list[tuple[int, tuple[str, ...], int]], capacities: tuple[int, ...]
) -> None:
    capacity = dict(zip(LINKS, map(Fraction, capacities)))
    network = Network(capacity)
    moved: dict[int, Fraction] = {}
    now = Fraction(0)
    arrivals = sorted((Fraction(at), number) for number, (_, _, at) in enumerate(flows))

    def advance(to: Fraction) -> None:
        nonlocal now
        for flow, rate in network.rates().items():
            moved[flow] += rate * (to - now)
        now = to

    while True:
        end = network.next_end()
        if arrivals and (end is None or arrivals[0][0] <= end):
            at, number = arrivals.pop(0)
            advance(at)
            moved[number] = Fraction(0)
            network.add(number, Fraction(flows[number][0]), flows[number][1], at)
        elif end is not None:
            advance(end)
            number = network.finish()
            assert moved[number] == flows[number][0]
        else:
            break
        for link, most in capacity.items():
            assert sum(r for f, r in network.rates().items() if link in flows[f][1]) <= most
    assert len(moved) == len(flows)


def test_links_of_whole_numbers_round_nothing() -> None:
    network = Network({"a": 1})
    for flow in range(3):
        network.add(flow, Fraction(10**17 + 1, 3), ("a",), Fraction(0))
    assert network.next_end() == 10**17 + 1
