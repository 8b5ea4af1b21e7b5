"""The replicas of a dispatcher (see `dispatch`) in rings, so that the least congested of each group is known in O(1).

Replicas of a group that are about equally fast form a *pool*, which is a bucket queue: one ring of replicas for each
amount of congestion, in steps of the shortest text. A dispatch or completion moves one replica to another ring, in
O(1); where all texts take the same time the order is exact. Within a ring the one that waited longest leads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

_OTHERS_WEIGHT = 16
"""What others have counts for so many times less in congestion. As many dispatchers at least keep the balance."""
_MOST_RINGS = 4096
"""The last one holds all that have more work."""


class Replica:
    """A replica and its neighbours in a ring; a nameless one anchors a ring."""

    __slots__ = (
        "added",
        "away",
        "congestion",
        "extra",
        "idle",
        "name",
        "next",
        "others",
        "pool",
        "prev",
        "table",
        "tables",
    )

    def __init__(self, name: Any = None) -> None:
        self.name = name
        self.congestion = 0
        """Microseconds of work that were sent here and not completed, and what little else counts."""
        self.extra = 0
        """By how much the work that is queued, in microseconds, exceeds `congestion`: most of `others`."""
        self.others = 0
        """Microseconds of work that other dispatchers have here."""
        self.away = False
        """It is the own of another dispatcher."""
        self.tables: tuple[list[int], ...] = ([], [], [])
        self.table: list[int] = []
        """Microseconds by length that a text is expected to take."""
        self.idle: list[int] = []
        """Those by which it is admitted when nothing is queued."""
        self.added: list[int] = []
        """Those that it adds to the work that is queued: fewer where texts are computed together."""
        self.pool: Any = None
        """None while it is not routable."""
        self.prev = self.next = self

    @property
    def work(self) -> int:
        """Microseconds of work that are queued here."""
        return self.congestion + self.extra


class Group:
    """The replicas of one home and max_length; `front` anchors the ring of the least congested of them."""

    __slots__ = ("front", "limit", "place", "pools", "several")

    def __init__(self, place: tuple[int, int], limit: int) -> None:
        self.place = place
        self.limit = limit
        """Microseconds of work from which on its head does not get a text of its own at once."""
        self.pools: list[Pool] = []
        self.several = False
        self.front = Replica()

    def elect(self) -> None:
        """Find the front, after some pool or its front has changed."""
        self.several = len(self.pools) > 1
        pool = min(self.pools, key=_congestion)
        self.front = pool.rings[pool.lowest]

    def __iter__(self) -> Iterator[Replica]:
        """Pool by pool, the least congested first."""
        for pool in sorted(self.pools, key=_congestion):
            yield from pool

    def check_integrity(self) -> None:
        """Raise AssertionError unless every ring and front agrees with the others. Slow: for tests."""
        pool = min(self.pools, key=_congestion)
        assert self.front is pool.rings[pool.lowest], "the least congested does not lead"
        for pool in self.pools:
            assert pool.group is self, "a pool is in a group that is not its own"
            assert sum(1 for _ in pool) == pool.size > 0, "a pool's size is wrong"
            taken = [place for place, anchor in enumerate(pool.rings) if anchor.next is not anchor]
            assert pool.lowest == taken[0], "the lowest ring is empty, or is not the lowest"
            for anchor in pool.rings:
                assert anchor.next.prev is anchor.prev.next is anchor, "a ring is broken"
            for record in pool:
                assert record.pool is pool, "a replica is in a pool that is not its own"
                assert record.extra == record.others - pool.counted(record), "what else counts is out of date"
                anchor = record.next
                while anchor.name is not None:
                    anchor = anchor.next
                assert anchor is pool.rings[pool.place(record.congestion)], "a replica is in the wrong ring"


class Pool:
    """About equally fast replicas of one group, in rings by congestion; `lowest` is the first ring not empty."""

    __slots__ = ("group", "lowest", "rings", "size", "speed", "tick")

    def __init__(self, group: Group, speed: int, tick: int) -> None:
        self.group = group
        self.speed = speed
        """A step on the scale of service times."""
        self.tick = tick
        """Microseconds from ring to ring."""
        self.rings = [Replica()]
        self.lowest = 0
        self.size = 0

    def __iter__(self) -> Iterator[Replica]:
        """The least congested first, up to a tick."""
        for anchor in self.rings[self.lowest :]:
            replica = anchor.next
            while replica is not anchor:
                yield replica
                replica = replica.next

    def place(self, congestion: int) -> int:
        """The ring for `congestion`, which is there then."""
        place = min(congestion // self.tick, _MOST_RINGS - 1)
        while place >= len(self.rings):
            self.rings.append(Replica())
        return place

    def counted(self, replica: Replica) -> int:
        """Microseconds that count in the congestion of `replica` beside what it was sent."""
        return replica.others // _OTHERS_WEIGHT // self.tick * self.tick + replica.away * self.tick

    def attach(self, replica: Replica) -> None:
        work = replica.work
        replica.extra = replica.others - self.counted(replica)
        replica.congestion = work - replica.extra
        place = self.place(replica.congestion)
        anchor = self.rings[place]
        replica.pool = self
        replica.prev, replica.next = anchor.prev, anchor
        anchor.prev.next = anchor.prev = replica
        self.lowest = min(self.lowest, place) if self.size else place
        self.size += 1

    def detach(self, replica: Replica) -> None:
        replica.prev.next, replica.next.prev = replica.next, replica.prev
        replica.pool = None
        self.size -= 1
        while self.size and self.rings[self.lowest].next is self.rings[self.lowest]:
            self.lowest += 1


def _congestion(pool: Pool) -> tuple[int, int]:
    """What the pools of a group are compared by: the congestion of the front, then the faster first."""
    return pool.lowest * pool.tick, pool.speed


def first_allowed(group: Group, avoid: Collection[Any]) -> Replica | None:
    return next((replica for replica in group if replica.name not in avoid), None)


def reattach(replica: Replica) -> None:
    """Put `replica`, if it is routable, where it belongs by what else counts now."""
    pool = replica.pool
    if pool is not None:
        pool.detach(replica)
        pool.attach(replica)
        pool.group.elect()
