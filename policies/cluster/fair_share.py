"""Whose waiting work is next: tenants share a replica by weight (Virtual Token Counter, Sheng et al., OSDI'24).

Each tenant has a counter of what it was served, in tokens or seconds of computing, divided by its weight. The next
piece of work is of the tenant with the lowest counter among those that have some waiting; which of its own is the
kind's affair. A tenant that comes back is lifted to the lowest counter of those that wait, or to that of the last one
that did, so that nobody saves up (Algorithm 2).

While two tenants have work waiting, what each is served, divided by its weight, differs by 2 U at most, U being the
greatest such quotient of one piece (Theorem 4.4). So a tenant that asks for less than its share waits for little more
than what runs, whatever the others ask for.

Beyond the paper: what a piece costs may be known only once it was served (`charge`), and queues are bounded. When one
is full, the tenant goes without whose counter would be the highest if all that waits were served.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)
"""A piece of work."""


class _Line(Generic[W]):
    """What waits of one tenant."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.costs: dict[W, float] = {}
        """By piece, in the order in which they came."""
        self.waiting = 0.0
        """Their sum."""


class FairShare(Generic[W]):
    """The work that waits in one replica, by tenant. Costs are in any one unit; weights are above 0."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        """By tenant: cost served / weight. Those below the floor are forgotten, as they would be lifted to it."""
        self._lines: dict[str, _Line[W]] = {}
        """Of the tenants that have work waiting."""
        self._owners: dict[W, str] = {}
        self._last = 0.0
        """The counter of the tenant that had work waiting last, when nobody has."""

    def __len__(self) -> int:
        """Pieces that wait."""
        return len(self._owners)

    def __contains__(self, work: W) -> bool:
        return work in self._owners

    def __iter__(self) -> Iterator[W]:
        """Pieces that wait, in the order in which they came."""
        return iter(self._owners)

    @property
    def contended(self) -> bool:
        """Whether several tenants have work waiting."""
        return len(self._lines) > 1

    def waiting(self) -> dict[str, float]:
        """By tenant: what its waiting work costs. Any thread may call it."""
        return {tenant: line.waiting for tenant, line in list(self._lines.items())}

    def owner(self, work: W) -> str:
        """The tenant of a piece that waits."""
        return self._owners[work]

    def add(self, work: W, tenant: str, weight: float, cost: float) -> None:
        """`work` waits from now on. Raises ValueError if it does already, or weight or cost make no sense."""
        if work in self._owners:
            raise ValueError(f"{work!r} waits already")
        if not (weight > 0 and cost >= 0):
            raise ValueError(f"a weight must be above 0 and a cost not below, got {weight} and {cost}")
        line = self._lines.get(tenant)
        if line is None:
            floor = self._floor
            self._counters = {
                name: counter for name, counter in self._counters.items() if counter > floor or name in self._lines
            }
            self._counters[tenant] = self._lifted(tenant)
            line = self._lines[tenant] = _Line(weight)
        line.weight = weight
        line.costs[work] = cost
        line.waiting += cost
        self._owners[work] = tenant

    def take(self, work: W, cost: float | None = None) -> None:
        """A piece is served from now on, and charged: `cost`, or what it was added with. KeyError if none waits."""
        tenant = self._owners[work]
        line = self._lines[tenant]
        self._counters[tenant] += (line.costs[work] if cost is None else cost) / line.weight
        self.remove(work)

    def remove(self, work: W) -> bool:
        """A piece that waits is given up; False if it does not wait."""
        tenant = self._owners.pop(work, None)
        if tenant is None:
            return False
        line = self._lines[tenant]
        line.waiting -= line.costs.pop(work)
        if not line.costs:
            del self._lines[tenant]
            if not self._lines:
                self._last = self._counters[tenant]
        return True

    def charge(self, tenant: str, weight: float, more: float) -> None:
        """What was served of `tenant` cost `more` than it was charged, or less."""
        counter = self._counters[tenant] = self._counters.get(tenant, self._floor) + more / weight
        if not self._lines:
            self._last = max(self._last, counter)

    def ranked(self, most: int = 1, own: Iterable[W] | None = None) -> list[W]:
        """Up to `most` pieces in the order in which they are to be served.

        `own` has all that wait, those of each tenant in the order in which that one's are served; by default in which
        they came.
        """
        pieces = self._by_tenant(own)
        turns = []
        for tenant in self._lines:
            first = next(pieces[tenant], None)
            if first is not None:
                turns.append((*self._turn(tenant), first))
        heapq.heapify(turns)
        found: list[W] = []
        while turns and len(found) < most:
            counter, waiting, tenant, work = turns[0]
            found.append(work)
            line = self._lines[tenant]
            following = next(pieces[tenant], None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (counter + line.costs[work] / line.weight, waiting, tenant, following))
        return found

    def turns(self) -> list[str]:
        """The tenants that have work waiting, the one whose turn it is first."""
        return sorted(self._lines, key=self._turn)

    def _turn(self, tenant: str) -> tuple[float, float, str]:
        line = self._lines[tenant]
        return self._counters[tenant], line.waiting / line.weight, tenant

    def ahead(self, tenant: str, weight: float, own: Collection[W] | None = None) -> list[W]:
        """What would be served before one more piece of `tenant`, if nothing else came.

        `own` are those of its own that go before it; by default all.
        """
        line = self._lines.get(tenant)
        before = list(line.costs if own is None else own) if line else []
        turn = self._lifted(tenant) + (sum(line.costs[work] for work in before) / weight if line else 0.0)
        for name, other in self._lines.items():
            if other is line:
                continue
            counter = self._counters[name]
            for work, cost in other.costs.items():
                if counter > turn:
                    break
                before.append(work)
                counter += cost / other.weight
        return before

    def cost(self, work: Iterable[W]) -> float:
        """Of pieces that wait, as they were added."""
        return sum(self._lines[self._owners[piece]].costs[piece] for piece in work)

    def furthest_over(self, tenant: str, weight: float, cost: float) -> str:
        """Who is to go without if there is no room for one more piece of `tenant`; that itself, if all are even."""
        line = self._lines.get(tenant)
        over = self._lifted(tenant) + ((line.waiting if line else 0.0) + cost) / weight
        for name, other in self._lines.items():
            if other is not line and (theirs := self._counters[name] + other.waiting / other.weight) > over:
                tenant, over = name, theirs
        return tenant

    def newest(self, tenant: str) -> Iterator[W]:
        """The pieces of `tenant` that wait, those first that came last. Nothing may change meanwhile."""
        return reversed(self._lines[tenant].costs)

    @property
    def _floor(self) -> float:
        return min((self._counters[tenant] for tenant in self._lines), default=self._last)

    def _lifted(self, tenant: str) -> float:
        """Its counter, if it has work waiting or gets some now."""
        if tenant in self._lines:
            return self._counters[tenant]
        return max(self._counters.get(tenant, 0.0), self._floor)

    def _by_tenant(self, own: Iterable[W] | None) -> dict[str, Iterator[W]]:
        if own is None:
            return {tenant: iter(line.costs) for tenant, line in self._lines.items()}
        pieces: defaultdict[str, list[W]] = defaultdict(list)
        for work in own:
            pieces[self._owners[work]].append(work)
        return {tenant: iter(pieces[tenant]) for tenant in self._lines}
