"""Dispatch: which replica gets a request (Arlo §3.4, Algorithm 1), over replicas that come, switch, and go.

A *level* is all replicas that hold one max_length. Its head is the least congested of them: congestion is outstanding
requests over capacity, and capacity the requests that one replica can finish within the SLO. The levels a text fits
into are tried in rising length, at most `peek` of them: the first head whose congestion is below a threshold, which
decays from level to level, gets the request.

Beyond the paper:

- When all heads are busier than that, the one gets it that answers it soonest, for which longer runtimes count their
  service time twice, as they hold up longer texts. The paper queues it at the shortest level, however long the queue.
- Replicas of a level need not be equally fast. Those that are form a *pool*, and a level's head is the head of its
  least congested pool. The order is exact; its price is a sort of the level's pools whenever the least count in one of
  them changes. So give the service time profiled for a kind of GPU, not one measured on each replica.
- With a deadline, the head that Algorithm 1 chooses must also be predicted to meet it (see `admission`); else the first
  pool that can, among the same levels in rising length, gets the request. If none can, it is refused with a time after
  which to come back.

A pool is a bucket queue: one ring of replicas per number of outstanding requests, so a dispatch or completion moves one
replica to the neighbouring ring, in O(1). Among equals the one that waited longest is taken, so that several
dispatchers, each counting only what it sent itself, do not all favour the same replica.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from pliant.policies.encoder.admission import DeadlineError, most_outstanding, requests_within, retry_after

R = TypeVar("R", bound=Hashable)

THRESHOLD = 0.02
"""Of a replica's capacity. The paper's 0.85 lets a queue take most of the SLO before a longer runtime helps out."""


class NoRuntimeError(LookupError):
    """No routable replica holds a runtime that is long enough."""

    def __init__(self, length: int, longest: int) -> None:
        super().__init__(length, longest)
        self.length = length
        self.longest = longest

    def __str__(self) -> str:
        if not self.longest:
            return "no replica is ready"
        return f"no replica holds a runtime for {self.length} tokens; the longest is {self.longest}"


class _Replica:
    """A replica and its neighbours in a ring; a nameless one anchors a ring and is its only node when it is empty."""

    __slots__ = ("name", "next", "outstanding", "pool", "prev")

    def __init__(self, name: Any = None) -> None:
        self.name = name
        self.outstanding = 0
        self.pool: _Pool | None = None
        self.prev = self.next = self


class _Pool:
    """Equally fast replicas of one level, in rings by outstanding requests; `lowest` is the first ring not empty."""

    __slots__ = ("capacity", "level", "limits", "lowest", "rings", "service_s", "size")

    def __init__(self, level: list[_Pool], service_s: float, capacity: int, thresholds: list[float]) -> None:
        self.level = level
        self.service_s = service_s
        self.capacity = capacity
        self.limits = [_least_congested(limit, capacity) for limit in thresholds]
        """By the level's place among the candidates: from this many outstanding requests on, it is congested."""
        self.rings = [_Replica()]
        self.lowest = 0
        self.size = 0

    def __iter__(self) -> Iterator[_Replica]:
        for ring in self.rings:
            replica = ring.next
            while replica is not ring:
                yield replica
                replica = replica.next

    @property
    def congestion(self) -> tuple[float, float]:
        """What a level's pools are sorted by: the head's congestion, then the faster pool first."""
        return self.lowest / self.capacity, self.service_s

    def attach(self, replica: _Replica) -> None:
        outstanding = replica.outstanding
        while len(self.rings) <= outstanding:
            self.rings.append(_Replica())
        ring = self.rings[outstanding]
        replica.prev, replica.next = ring.prev, ring
        ring.prev.next = ring.prev = replica
        replica.pool = self
        self.lowest = min(self.lowest, outstanding) if self.size else outstanding
        self.size += 1

    def detach(self, replica: _Replica) -> None:
        replica.prev.next, replica.next.prev = replica.next, replica.prev
        replica.pool = None
        self.size -= 1
        while self.size and self.rings[self.lowest].next is self.rings[self.lowest]:
            self.lowest += 1


class Dispatcher(Generic[R]):
    """Chooses a replica for each request (Arlo §3.4, Algorithm 1) and counts what each still has to answer.

    `slo_s` is the service's latency objective in seconds, from which capacities follow. The paper calls `threshold`
    lambda, `decay` alpha and `peek` L. Replicas are named by any hashable value; a name must not come back after
    `remove`, or late completions of its former bearer count against the new one. Raises ValueError for arguments out of
    range.
    """

    def __init__(self, slo_s: float, threshold: float = THRESHOLD, decay: float = 0.9, peek: int = 6) -> None:
        if not (slo_s > 0 and 0 < threshold <= 1 and 0 < decay <= 1 and peek >= 1):
            raise ValueError(
                "slo_s must be positive, threshold and decay in (0, 1], peek at least 1; "
                f"got {slo_s}, {threshold}, {decay}, {peek}"
            )
        self._slo_s = slo_s
        self._thresholds = [threshold]
        while len(self._thresholds) < peek:
            self._thresholds.append(self._thresholds[-1] * decay)
        self._replicas: dict[R, _Replica] = {}
        self._levels: dict[int, list[_Pool]] = {}
        self._candidates: list[tuple[list[_Pool], ...]] = []
        """By length: the levels that may serve it, in rising max_length, at most `peek`."""

    @property
    def longest(self) -> int:
        """The greatest length that can be served now; 0 when nothing can."""
        return max(self._levels, default=0)

    def assign(self, replica: R, max_length: int, service_s: float) -> None:
        """From now on `replica` takes requests of at most `max_length` tokens and needs `service_s` seconds for each.

        A replica that is known already changes over, and what it has outstanding still counts.
        """
        if max_length < 1 or not service_s > 0:
            raise ValueError(f"max_length and service_s must be positive, got {max_length} and {service_s}")
        self.suspend(replica)
        record = self._replicas.setdefault(replica, _Replica(replica))
        level = self._levels.get(max_length)
        if level is None:
            level = self._levels[max_length] = []
            self._list_candidates()
        pool = next((pool for pool in level if pool.service_s == service_s), None)
        if pool is None:
            pool = _Pool(level, service_s, max(1, requests_within(self._slo_s, service_s)), self._thresholds)
            level.append(pool)
        pool.attach(record)
        level.sort(key=lambda pool: pool.congestion)

    def suspend(self, replica: R) -> None:
        """Send nothing more to `replica` until it is assigned again; what it has outstanding still counts."""
        record = self._replicas.get(replica)
        if record is None or record.pool is None:
            return
        pool = record.pool
        level = pool.level
        pool.detach(record)
        if not pool.size:
            level.remove(pool)
        level.sort(key=lambda pool: pool.congestion)
        if not level:
            self._levels = {length: pools for length, pools in self._levels.items() if pools}
            self._list_candidates()

    def remove(self, replica: R) -> None:
        """Forget `replica`, which died or left; completions that still come in for it are ignored."""
        self.suspend(replica)
        self._replicas.pop(replica, None)

    def dispatch(self, length: int, budget_s: float | None = None, utility: float = 1.0) -> R:
        """Choose the replica for a text of `length` tokens (at least 0), and count the request as outstanding there.

        `budget_s` is the time left until the request's deadline, in seconds (finite), and `utility` the share of its
        slack that it may spend waiting, 0 to 1 (see `admission`); without a budget every request is taken.

        Raises NoRuntimeError when no routable replica holds the length, and DeadlineError when none in the `peek`
        shortest levels that do can meet the deadline; nothing is counted then.
        """
        try:
            candidates = self._candidates[length]
        except IndexError:
            raise NoRuntimeError(length, self.longest) from None
        pool = candidates[0][0]
        if pool.lowest >= pool.limits[0]:
            cheapest, least = pool, math.inf
            for rank, level in enumerate(candidates):
                head = level[0]
                lowest = head.lowest
                if lowest < head.limits[rank]:
                    pool = head
                    break
                # Until it would be answered, and once more the time for which it would hold up others.
                cost = (lowest + 2) * head.service_s
                if cost < least:
                    cheapest, least = head, cost
            else:
                pool = cheapest
        if budget_s is not None and pool.lowest > most_outstanding(pool.service_s, budget_s, utility):
            pool = _first_in_time(candidates, budget_s, utility)

        # Rings are relinked in place, here and in `complete`: at a million requests a second, calls are what costs.
        lowest = pool.lowest
        rings = pool.rings
        ring = rings[lowest]
        replica = ring.next
        second = replica.next
        ring.next = second
        second.prev = ring
        replica.outstanding = outstanding = lowest + 1
        if outstanding == len(rings):
            rings.append(_Replica())
        anchor = rings[outstanding]
        last = anchor.prev
        last.next = anchor.prev = replica
        replica.prev = last
        replica.next = anchor
        if second is ring:
            pool.lowest = outstanding
            if len(pool.level) > 1:
                pool.level.sort(key=lambda pool: pool.congestion)
        name: R = replica.name
        return name

    def complete(self, replica: R) -> None:
        """One request of `replica` ended, well or not. Ignored for an unknown replica, or one with none outstanding."""
        record = self._replicas.get(replica)
        if record is None or not record.outstanding:
            return
        record.outstanding = outstanding = record.outstanding - 1
        pool = record.pool
        if pool is None:
            return
        before, after = record.prev, record.next
        before.next = after
        after.prev = before
        anchor = pool.rings[outstanding]
        last = anchor.prev
        last.next = anchor.prev = record
        record.prev = last
        record.next = anchor
        if outstanding < pool.lowest:
            pool.lowest = outstanding
            if len(pool.level) > 1:
                pool.level.sort(key=lambda pool: pool.congestion)

    def outstanding(self, replica: R) -> int:
        """Requests sent to `replica` and not completed, suspended or not; 0 when it is not known."""
        record = self._replicas.get(replica)
        return record.outstanding if record else 0

    def levels(self) -> dict[int, dict[R, int]]:
        """The routable replicas and their outstanding requests, by max_length in rising order."""
        return {
            length: {replica.name: replica.outstanding for pool in self._levels[length] for replica in pool}
            for length in sorted(self._levels)
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count, ring, order and table agrees with the others. Slow: for tests."""
        routable = {record.name: record for record in self._replicas.values() if record.pool}
        listed = [record for level in self._levels.values() for pool in level for record in pool]
        assert len(listed) == len(routable), "a replica is in two rings or none"
        assert all(routable[record.name] is record for record in listed), "a ring holds a replica that has left"
        for level in self._levels.values():
            assert level == sorted(level, key=lambda pool: pool.congestion), "the least congested pool does not lead"
            for pool in level:
                assert pool.level is level, "a pool is in a level that is not its own"
                assert all(record.pool is pool for record in pool), "a replica is in a pool that is not its own"
                counts = [record.outstanding for record in pool]
                assert len(counts) == pool.size > 0, "a pool's size is wrong"
                assert pool.lowest == min(counts), "a pool's head is not its least busy replica"
                for count, ring in enumerate(pool.rings):
                    assert ring.next.prev is ring.prev.next is ring, "a ring is broken"
                    assert ring.next is ring or ring.next.outstanding == count, "a replica is in the wrong ring"
        for length, candidates in enumerate(self._candidates):
            lengths = sorted(held for held in self._levels if held >= length)[: len(self._thresholds)]
            assert list(candidates) == [self._levels[held] for held in lengths], "the candidates of a length are wrong"

    def _list_candidates(self) -> None:
        lengths = sorted(self._levels)
        self._candidates = []
        for index, length in enumerate(lengths):
            levels = tuple(self._levels[held] for held in lengths[index : index + len(self._thresholds)])
            self._candidates += [levels] * (length + 1 - len(self._candidates))


def _least_congested(threshold: float, capacity: int) -> int:
    """The least number of requests whose share of `capacity`, as a float, reaches `threshold`."""
    count = math.ceil(threshold * capacity)
    while count > 0 and (count - 1) / capacity >= threshold:
        count -= 1
    while count / capacity < threshold:
        count += 1
    return count


def _first_in_time(candidates: tuple[list[_Pool], ...], budget_s: float, utility: float) -> _Pool:
    """The first pool, in rising length, whose head can meet the deadline; raises DeadlineError when there is none."""
    soonest = fastest_s = math.inf
    for level in candidates:
        for pool in level:
            wait = retry_after(pool.lowest, pool.service_s, budget_s, utility)
            if not wait:
                return pool
            soonest = min(soonest, wait)
            fastest_s = min(fastest_s, pool.service_s)
    raise DeadlineError(soonest, fastest_s)
