"""Dispatch: which replica gets a text, over replicas that come, switch, and go: Arlo's Request Scheduler (§3.4).

A replica has one runtime or several (see `residency`), up to a max_length, and a *home*: the length of the texts that
it is to have first. A *group* is all replicas with the same home and max_length; one that has a single runtime is at
home there. Its head is the least congested of them: congestion is the work that is queued there, in seconds, as what a
text takes depends on its length (see `service_curve`). A text's candidates are the groups that it fits into: the group
where it is at home, then those of longer homes in rising length, then those of shorter homes, the nearest first.

The head gets it that is predicted to answer it soonest; of busy heads, each group further from home counts as much as
the shortest text takes. So short texts stay off replicas that long ones fill as long as that costs little, and either
may spill over. A head with a single runtime that has no more to do than one text gets it at once: longer runtimes would
take longer for it, and are there for longer texts. `Algorithm1` is the paper's rule instead.

Beyond the paper:

- Replicas of a group need not be equally fast: of two that are equally congested the faster one is the head.
- With a deadline, the head that is chosen must also be predicted to meet it (see `admission`); else the first replica
  that can, among the same groups in their order, gets the request. If none can, it is refused with a time after which
  to come back.
- Several dispatchers may send to the same replicas. What others have there is known from reports that are a second or
  two old. It counts in full in predictions, but little in congestion: dispatchers that choose by it all run to the
  same replica, and then away from it, in ever greater numbers. Instead each has a share of the replicas for its own
  (see `shares`), and on another's a text more counts as queued than it has sent there.
- Where a replica computes texts that wait together, a text adds less to the work there than it takes alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pliant.policies.encoder.admission import DeadlineError, retry_after
from pliant.policies.encoder.rings import Group, Pool, Replica, first_allowed, reattach
from pliant.policies.encoder.service_curve import Tables

R = TypeVar("R", bound=Hashable)

_EQUALLY_FAST = math.log(1.1)
_MOST_OTHERS_S = 1000.0
"""So that times are small integers."""
_MICROSECONDS = 1e6
_SECONDS = 1e-6
_ROUNDING = 1e-3
"""Microseconds."""


@dataclass(frozen=True)
class Algorithm1:
    """The paper's rule: the first head whose congestion is below a threshold, which decays from group to group.

    Congestion is counted as a share of what a replica can do within the SLO, `threshold` is the paper's lambda, `decay`
    its alpha, and `peek` its L, the most groups that are looked at. When all their heads are busier than that, the head
    at the text's home gets it, however long its queue. Raises ValueError for values out of range.
    """

    threshold: float = 0.85
    decay: float = 0.9
    peek: int = 6

    def __post_init__(self) -> None:
        if not (0 < self.threshold <= 1 and 0 < self.decay <= 1 and self.peek >= 1):
            raise ValueError(f"threshold and decay must be in (0, 1], peek at least 1; got {self}")


class Times(Hashable, Protocol):
    """What a replica takes for a text, by its length: a `ServiceCurve`, or several (see `residency`). Hashable."""

    def tables(self, longest: int) -> Tables:
        """For each length from 0 to `longest`."""


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


class AllAvoidedError(LookupError):
    """Every routable replica that holds a runtime long enough is to be avoided."""


class Dispatcher(Generic[R]):
    """Chooses a replica for each request and sums up what each still has to do.

    `slo_s` is the service's latency objective in seconds, within which Algorithm 1 counts a replica's capacity; without
    `algorithm_1` the replica is chosen by predicted finish. Replicas are named by any hashable value; a name must not
    come back after `remove`, or late completions of its former bearer count against the new one. Raises ValueError for
    arguments out of range.
    """

    def __init__(self, slo_s: float, algorithm_1: Algorithm1 | None = None) -> None:
        if not slo_s > 0:
            raise ValueError(f"slo_s must be positive, got {slo_s}")
        self._limits = _limits(slo_s, algorithm_1) if algorithm_1 else None
        """Of Algorithm 1: microseconds from which on a head is congested, by its group's place among candidates."""
        self._replicas: dict[R, Replica] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        """By home and max_length."""
        self._candidates: list[tuple[Group, ...]] = []
        """By length: the groups that may serve it, in the order in which they are tried."""
        self._own: frozenset[R] | None = None

    @property
    def longest(self) -> int:
        """The greatest length that can be served now; 0 when nothing can."""
        return max(len(self._candidates) - 1, 0)

    def assign(self, replica: R, max_length: int, times: Times, home: int | None = None) -> None:
        """From now on `replica` takes texts of at most `max_length` tokens, and needs the seconds of `times` for them.

        It is to have those first for which `home` (by default max_length) is the shortest home that they fit into. A
        replica that is known already changes over, and what it has to do still counts, as it was predicted.
        """
        place = (home or max_length, max_length)
        if not 1 <= place[0] <= max_length:
            raise ValueError(f"home and max_length must be positive and rise, got {home} and {max_length}")
        tables = _microseconds(times, max_length)
        record = self._replicas.get(replica)
        if record is None:
            record = self._replicas[replica] = Replica(replica)
            record.away = self._is_away(replica)
        elif record.pool and record.tables is tables and record.pool.group.place == place:
            return
        self.suspend(replica)
        record.tables = tables
        record.table, record.idle, record.added = tables
        group = self._groups.get(place)
        if group is None:
            at_once = self._limits[0] if self._limits else record.table[0] + 1 if place[0] == max_length else 1
            group = self._groups[place] = Group(place, at_once)
            self._list_candidates()
        speed = round(math.log(record.table[-1]) / _EQUALLY_FAST)
        pool = next((pool for pool in group.pools if pool.speed == speed), None)
        if pool is None:
            pool = Pool(group, speed, record.added[0])
            group.pools.append(pool)
        pool.attach(record)
        group.elect()

    def suspend(self, replica: R) -> None:
        """Send nothing more to `replica` until it is assigned again; what it has to do still counts."""
        record = self._replicas.get(replica)
        if record is None or record.pool is None:
            return
        pool = record.pool
        group = pool.group
        pool.detach(record)
        if not pool.size:
            group.pools.remove(pool)
        if group.pools:
            group.elect()
        else:
            self._groups = {place: group for place, group in self._groups.items() if group.pools}
            self._list_candidates()

    def remove(self, replica: R) -> None:
        """Forget `replica`, which died or left; completions that still come in for it are ignored."""
        self.suspend(replica)
        self._replicas.pop(replica, None)

    def report(self, replica: R, others_s: float) -> None:
        """`replica` says that it has work for `others_s` seconds from other dispatchers. Ignored for an unknown one."""
        record = self._replicas.get(replica)
        if record is None:
            return
        others = round(min(others_s, _MOST_OTHERS_S) * _MICROSECONDS)
        if others == record.others:
            return
        record.extra += others - record.others
        record.others = others
        reattach(record)

    def prefer(self, own: Collection[R] | None) -> None:
        """Prefer the replicas of `own` to others that have as much (see `shares`); None: all are equal."""
        self._own = None if own is None else frozenset(own)
        for name, record in self._replicas.items():
            if record.away != self._is_away(name):
                record.away = not record.away
                reattach(record)

    def dispatch(
        self, length: int, budget_s: float | None = None, slack_share: float = 1.0, avoid: Collection[R] = ()
    ) -> tuple[R, float, int]:
        """Choose the replica for a text of `length` tokens (at least 0), and count the work for it there.

        Returns the replica, the seconds after which it is predicted to answer, and the work, for `complete`. `budget_s`
        is the time left until the request's deadline, in seconds (finite), and `slack_share` how much of its slack it
        may spend waiting, 0 to 1 (see `admission`); without a budget every request is taken. None of `avoid` is chosen.

        Raises NoRuntimeError when no routable replica holds the length; of the groups that are looked at,
        AllAvoidedError when all replicas are to be avoided, and DeadlineError when none can meet the deadline. Nothing
        is counted then.
        """
        try:
            groups = self._candidates[length]
        except IndexError:
            raise NoRuntimeError(length, self.longest) from None
        # The usual case first, and replicas are relinked in place, here and in `complete`: calls are what costs.
        group = groups[0]
        replica = first_allowed(group, avoid) if avoid else group.front.next
        if replica is None or replica.congestion >= group.limit:
            replica = self._search(groups, length, avoid)
        predicted_s = (replica.congestion + replica.table[length] + replica.extra) * _SECONDS
        if (
            budget_s is not None
            and (predicted_s > budget_s or slack_share < 1.0)
            and _retry_after(replica, length, budget_s, slack_share)
        ):
            replica = _first_in_time(groups, length, budget_s, slack_share, avoid)
            predicted_s = (replica.congestion + replica.table[length] + replica.extra) * _SECONDS
        added = replica.added[length]
        replica.congestion = congestion = replica.congestion + added
        pool = replica.pool
        before = replica.prev
        after = replica.next
        before.next = after
        after.prev = before
        rings = pool.rings
        try:
            anchor = rings[congestion // pool.tick]
        except IndexError:
            anchor = rings[pool.place(congestion)]
        last = anchor.prev
        last.next = anchor.prev = replica
        replica.prev = last
        replica.next = anchor
        if before is after:
            lowest = pool.lowest
            while (front := rings[lowest]).next is front:
                lowest += 1
            pool.lowest = lowest
            group = pool.group
            if group.several:
                group.elect()
            else:
                group.front = front
        return replica.name, predicted_s, added

    def complete(self, replica: R, work: int) -> None:
        """A request of `replica` ended, well or not; `work` is what `dispatch` gave. Ignored for an unknown replica.

        Raises ValueError when less than `work` is left of what was sent.
        """
        try:
            record = self._replicas[replica]
        except KeyError:
            return
        congestion = record.congestion - work
        if congestion < 0:
            raise ValueError(f"{replica} has less to do than {work} microseconds")
        record.congestion = congestion
        pool = record.pool
        if pool is None:
            return
        before = record.prev
        after = record.next
        before.next = after
        after.prev = before
        place = congestion // pool.tick
        try:
            anchor = pool.rings[place]
        except IndexError:
            anchor = pool.rings[pool.place(congestion)]
        last = anchor.prev
        last.next = anchor.prev = record
        record.prev = last
        record.next = anchor
        if place < pool.lowest:
            pool.lowest = place
            group = pool.group
            if group.several:
                group.elect()
            else:
                group.front = anchor

    def sent_s(self, replica: R) -> float:
        """Seconds of work that were sent to `replica` and not completed, suspended or not; 0 when it is not known."""
        record = self._replicas.get(replica)
        return (record.work - record.others) * _SECONDS if record else 0.0

    def groups(self) -> dict[int, dict[R, float]]:
        """The routable replicas and the seconds of work there, others' included, by home in rising order."""
        found: dict[int, dict[R, float]] = {}
        for (home, _), group in sorted(self._groups.items()):
            works = {record.name: record.work * _SECONDS for pool in group.pools for record in pool}
            found.setdefault(home, {}).update(works)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sum, ring, front and table agrees with the others. Slow: for tests."""
        routable = {record.name: record for record in self._replicas.values() if record.pool}
        listed = [record for group in self._groups.values() for pool in group.pools for record in pool]
        assert len(listed) == len(routable), "a replica is in two rings or none"
        assert all(routable[record.name] is record for record in listed), "a ring holds a replica that has left"
        assert all(record.work >= record.others >= 0 for record in self._replicas.values()), "work is negative"
        for group in self._groups.values():
            group.check_integrity()
        for length, candidates in enumerate(self._candidates):
            fitting = [group for (_, max_length), group in self._groups.items() if max_length >= length]
            assert set(candidates) <= set(fitting), "a length has a candidate that it does not fit into"
            assert self._limits or len(candidates) == len(fitting), "a length lacks a candidate"

    def _is_away(self, replica: R) -> bool:
        return self._own is not None and replica not in self._own

    def _list_candidates(self) -> None:
        self._candidates = []
        most = len(self._limits) if self._limits else None
        for edge in sorted({edge for place in self._groups for edge in place}):
            # All lengths since the edge before have the same candidates.
            fitting = [(home < edge, abs(home - edge), longest) for home, longest in self._groups if longest >= edge]
            places = [(edge + (-far if shorter else far), longest) for shorter, far, longest in sorted(fitting)[:most]]
            groups = tuple(self._groups[place] for place in places)
            self._candidates += [groups] * (edge + 1 - len(self._candidates))

    def _search(self, groups: tuple[Group, ...], length: int, avoid: Collection[R]) -> Replica:
        """The replica that is chosen when the head at home is busy, or all there are to be avoided."""
        found = None
        if self._limits:
            for group, limit in zip(groups, self._limits, strict=False):
                head = first_allowed(group, avoid) if avoid else group.front.next
                if head and head.congestion < limit:
                    return head
                found = found or head
        else:
            least, handicap = math.inf, 0
            for group in groups:
                head = first_allowed(group, avoid) if avoid else group.front.next
                if not head:
                    continue
                table = head.table
                finish = table[length]
                if congestion := head.congestion:
                    finish += congestion + handicap
                if finish < least:
                    found, least = head, finish
                    if not congestion:
                        break
                handicap += table[0]
        if not found:
            raise AllAvoidedError
        return found


def _limits(slo_s: float, rule: Algorithm1) -> list[int]:
    capacity = slo_s * _MICROSECONDS
    return [math.ceil(capacity * rule.threshold * rule.decay**rank - _ROUNDING) for rank in range(rule.peek)]


def _retry_after(replica: Replica, length: int, budget_s: float, slack_share: float) -> float:
    service_s, idle_s = replica.table[length] * _SECONDS, replica.idle[length] * _SECONDS
    return retry_after(replica.work * _SECONDS, service_s, idle_s, budget_s, slack_share)


def _first_in_time(
    groups: tuple[Group, ...], length: int, budget_s: float, slack_share: float, avoid: Collection[Any]
) -> Replica:
    """The first replica, group by group, that can meet the deadline; raises DeadlineError when there is none."""
    soonest_s = fastest_s = math.inf
    for group in groups:
        for replica in group:
            if replica.name in avoid:
                continue
            wait_s = _retry_after(replica, length, budget_s, slack_share)
            if not wait_s:
                return replica
            soonest_s = min(soonest_s, wait_s)
            fastest_s = min(fastest_s, replica.idle[length] * _SECONDS)
    raise DeadlineError(soonest_s, fastest_s)


@lru_cache(maxsize=1024)
def _microseconds(times: Times, longest: int) -> tuple[list[int], ...]:
    """The tables for each length from 0."""
    return tuple(np.maximum(1, np.rint(table * _MICROSECONDS)).astype(int).tolist() for table in times.tables(longest))
