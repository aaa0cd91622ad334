"""How flows that overlap share links: max-min fairness, exact at every instant (processor sharing of several links at once).

A flow moves an amount over a set of links, at one rate. Rates are the fair ones: all flows of the tightest link get an equal
share of it, that link and those flows are taken out, and so on. Rates change only when a flow starts or ends, and only for flows
that are connected to it by links they share; in between amounts fall linearly, so ends are computed, not stepped to. Amounts,
capacities and times may be any numbers: with `Fraction`s there is no rounding at all.

Flows over the same links always have the same rate. They form a bundle: `served` is what each of its flows has moved since the
bundle began, and a flow ends when that reaches what it stood at when the flow began, plus the flow's amount. So an event costs
O(bundles that are connected), however many flows they hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

Number = int | float | Fraction
Link = Hashable


@dataclass(slots=True, eq=False)
class _Bundle:
    """`ends` orders its flows by the value of `served` at which they end. `version` counts changes: older ends are void."""

    links: tuple[Link, ...]
    served: Number = 0
    rate: Number = 0
    since: Number = 0
    version: int = 0
    ends: list[tuple[Number, int]] = field(default_factory=list)

    def bring_to(self, now: Number) -> None:
        self.served += self.rate * (now - self.since)
        self.since = now


class Network:
    """Flows under way. The caller moves time on: `add` at a time, `next_end`, `finish`; times never go back."""

    def __init__(self, capacities: Mapping[Link, Number]) -> None:
        for link, capacity in capacities.items():
            if not capacity > 0:
                raise ValueError(f"capacity of link {link} must be positive, got {capacity}")
        self._capacities = capacities
        self._bundles: dict[tuple[Link, ...], _Bundle] = {}
        self._on_link: dict[Link, list[_Bundle]] = {link: [] for link in capacities}
        self._ends: list[tuple[Number, int, int, _Bundle]] = []  # time, flow, version

    def add(self, flow: int, amount: Number, links: tuple[Link, ...], now: Number) -> None:
        """Start to move `amount` over all of `links` at once."""
        bundle = self._bundles.get(links)
        if bundle is None:
            bundle = self._bundles[links] = _Bundle(links)
            for link in links:
                self._on_link[link].append(bundle)
        bundle.bring_to(now)
        if not bundle.ends:
            bundle.served = 0 * now  # nothing is under way: begin again, small numbers round less
        heapq.heappush(bundle.ends, (bundle.served + amount, flow))
        self._share(bundle, now)

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
            capacity = min(self._capacities[link] for link in bundles[0].links)
            self._set_rate(bundles[0], capacity / len(bundles[0].ends), now)
            return
        free = {link: self._capacities[link] for bundle in bundles for link in bundle.links}
        waiting = dict.fromkeys(free, 0)
        for bundle in bundles:
            for link in bundle.links:
                waiting[link] += len(bundle.ends)
        while bundles:
            tightest = min(free[link] / count for link, count in waiting.items() if count)
            left: list[_Bundle] = []
            fixed: list[_Bundle] = []
            for bundle in bundles:
                is_tight = any(free[link] / waiting[link] <= tightest for link in bundle.links)
                (fixed if is_tight else left).append(bundle)
            for bundle in fixed:
                self._set_rate(bundle, tightest, now)
                for link in bundle.links:
                    free[link] -= tightest * len(bundle.ends)
                    waiting[link] -= len(bundle.ends)
            bundles = left

    def _set_rate(self, bundle: _Bundle, rate: Number, now: Number) -> None:
        if rate != bundle.rate:
            bundle.bring_to(now)
            bundle.rate = rate
            bundle.version += 1
        target, flow = bundle.ends[0]
        end = now + max(target - bundle.served - rate * (now - bundle.since), 0) / rate
        heapq.heappush(self._ends, (end, flow, bundle.version, bundle))

    def _connected(self, changed: _Bundle) -> list[_Bundle]:
        """Bundles with flows that share links with `changed`, directly or through others; always in the same order."""
        found = {id(changed): changed}
        seen: set[Link] = set()
        open_links = list(changed.links)
        while open_links:
            link = open_links.pop()
            if link in seen:
                continue
            seen.add(link)
            for bundle in self._on_link[link]:
                if bundle.ends and id(bundle) not in found:
                    found[id(bundle)] = bundle
                    open_links += bundle.links
        return [bundle for bundle in found.values() if bundle.ends]
