"""How flows that overlap share links: max-min fairness, exact at every instant (processor sharing of several links at once).

A flow moves an amount over a set of links, at one rate. Rates are the fair ones: all flows of the tightest link get an equal
share of it, that link and those flows are taken out, and so on. Rates change only when a flow starts or ends, and only for flows
that are connected to it by links they share; in between amounts fall linearly, so ends are computed, not stepped to. Amounts,
capacities and times may be any numbers: with `Fraction`s there is no rounding at all.

Flows over the same links always have the same rate. They form a bundle: `served` is what each of its flows has moved since the
bundle began, and a flow ends when that reaches what it stood at when the flow began, plus the flow's amount. So an event costs
O(bundles that are connected), however many flows they hold. Rates follow from how many flows each bundle has, and the same
numbers come again and again: they are worked out once.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Number = int | float | Fraction
Link = Hashable


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of a move: `amount` over all `links` at the same rate. The legs of a move are under way side by side."""

    amount: Number
    links: tuple[Link, ...]


@dataclass(slots=True, eq=False)
class _Bundle:
    """`ends` orders its flows by the value of `served` at which they end. `version` counts changes: older ends are void.
    `neighbours` have a link in common with it; `seen` is the last search that came by.
    """

    number: int
    links: Sequence[int]
    served: Number = 0
    rate: Number = 0
    since: Number = 0
    version: int = 0
    seen: int = 0
    neighbours: list[_Bundle] = field(default_factory=list)
    ends: list[tuple[Number, int]] = field(default_factory=list)

    def bring_to(self, now: Number) -> None:
        self.served += self.rate * (now - self.since)
        self.since = now


_Counts = tuple[tuple[int, int], ...]
"""Of bundles their number and how many flows each has."""
_number = operator.attrgetter("number")


class Network:
    """Flows under way. The caller moves time on: `add` at a time, `next_end`, `finish`; times never go back."""

    def __init__(self, capacities: Mapping[Link, Number]) -> None:
        for link, capacity in capacities.items():
            if not capacity > 0:
                raise ValueError(f"capacity of link {link} must be positive, got {capacity}")
        self._number_of = {link: number for number, link in enumerate(capacities)}
        # a share of an integer would be a float
        self._capacities = [Fraction(c) if isinstance(c, int) else c for c in capacities.values()]
        self._bundles: dict[tuple[Link, ...], _Bundle] = {}
        self._searches = 0
        self._ends: list[tuple[Number, int, int, _Bundle]] = []  # time, flow, version
        self._rates: dict[_Counts, Sequence[Number]] = {}

    def add(self, flow: int, amount: Number, links: tuple[Link, ...], now: Number) -> None:
        """Start to move `amount` over all of `links` at once."""
        bundle = self._bundles.get(links)
        if bundle is None:
            bundle = self._bundles[links] = self._new_bundle(links)
        bundle.bring_to(now)
        if not bundle.ends:
            bundle.served = 0 * now  # nothing is under way: begin again, small numbers round less
        heapq.heappush(bundle.ends, (bundle.served + amount, flow))
        self._share(bundle, now)

    def _new_bundle(self, links: tuple[Link, ...]) -> _Bundle:
        bundle = _Bundle(len(self._bundles), [self._number_of[link] for link in links])
        for other in self._bundles.values():
            if not set(bundle.links).isdisjoint(other.links):
                other.neighbours.append(bundle)
                bundle.neighbours.append(other)
        return bundle

    def next_end(self) -> Number | None:
        """When the next flow ends if none is added before; None where nothing moves."""
        while self._ends:
            end, _, version, bundle = self._ends[0]
            if bundle.version == version:
                return end
            heapq.heappop(self._ends)
        return None

    def finish(self) -> int:
        """Take out the flow that ends at `next_end()`, give its share to the others, and return it."""
        now, flow, _, bundle = heapq.heappop(self._ends)
        bundle.served, bundle.since = heapq.heappop(bundle.ends)[0], now
        self._share(bundle, now)
        return flow

    def rates(self) -> dict[int, Number]:
        """Of every flow under way."""
        return {flow: b.rate for b in self._bundles.values() for _, flow in b.ends}

    def _share(self, changed: _Bundle, now: Number) -> None:
        """New fair rates for every flow that is connected to a bundle that has one more or one less."""
        changed.version += 1
        bundles = self._connected(changed)
        if len(bundles) == 1:
            capacity = min([self._capacities[link] for link in bundles[0].links])
            self._set_rate(bundles[0], capacity / len(bundles[0].ends), now)
            return
        bundles.sort(key=_number)
        counts = tuple([(bundle.number, len(bundle.ends)) for bundle in bundles])
        rates = self._rates.get(counts)
        if rates is None:
            rates = self._rates[counts] = self._fair(bundles)
        for bundle, rate in zip(bundles, rates):
            if rate != bundle.rate or bundle is changed:
                self._set_rate(bundle, rate, now)

    def _fair(self, bundles: Sequence[_Bundle]) -> Sequence[Number]:
        """Max-min fair rates of each bundle's flows."""
        free: dict[int, Number] = {}
        waiting: dict[int, int] = {}
        for bundle in bundles:
            for link in bundle.links:
                free[link] = self._capacities[link]
                waiting[link] = waiting.get(link, 0) + len(bundle.ends)
        rates: dict[int, Number] = {}
        left = bundles
        while left:
            shares = {link: free[link] / count for link, count in waiting.items() if count}
            tightest = min(shares.values())
            tight = {link for link, share in shares.items() if share <= tightest}
            others = []
            for bundle in left:
                if tight.isdisjoint(bundle.links):
                    others.append(bundle)
                    continue
                rates[bundle.number] = tightest
                for link in bundle.links:
                    free[link] -= tightest * len(bundle.ends)
                    waiting[link] -= len(bundle.ends)
            left = others
        return [rates[bundle.number] for bundle in bundles]

    def _set_rate(self, bundle: _Bundle, rate: Number, now: Number) -> None:
        if rate != bundle.rate:
            bundle.bring_to(now)
            bundle.rate = rate
            bundle.version += 1
        target, flow = bundle.ends[0]
        end = now + max(target - bundle.served - rate * (now - bundle.since), 0) / rate
        heapq.heappush(self._ends, (end, flow, bundle.version, bundle))

    def _connected(self, changed: _Bundle) -> list[_Bundle]:
        """Bundles with flows that share links with `changed`, directly or through others."""
        self._searches += 1
        search = changed.seen = self._searches
        found = [changed]
        for bundle in found:
            for other in bundle.neighbours:
                if other.ends and other.seen != search:
                    other.seen = search
                    found.append(other)
        return found if changed.ends else found[1:]
