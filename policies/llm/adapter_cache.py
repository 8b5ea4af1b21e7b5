"""Which adapters stay in memory when nobody uses them, and which go first when it is needed (Chameleon §4.1).

An adapter that was used lately, often, or takes long to load again is worth its memory: its score is by `worth`, with
uses within a window as frequency and bytes as cost. The lowest goes first, an adapter in use never, one that queued
requests wait for only if nothing else helps. Where prefixes of prompts compete for the same memory, `idle_memory` names
the victims among both.

The cache has no size of its own. It counts bytes and names victims; whoever shares out the memory between adapters and
live requests says when something must go. Of the victims in the order of their scores none is evicted in vain: those
that turn out not to be needed, because a later one is large, are spared (beyond the paper).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from pliant.policies.llm.worth import Eviction as Eviction
from pliant.policies.llm.worth import Use, scorer

A = TypeVar("A", bound=Hashable)

Reason = Literal["memory", "unused"]
"""Why an adapter is evicted: for live requests or other adapters, or for nobody wants it ("none")."""

_LEAST_S = 10.0
"""For so long, uses are taken to have been counted, at least."""

State = Literal["absent", "loading", "resident"]


class CacheError(Exception):
    """The cache contradicts itself: a defect, after which no count may be trusted."""


@dataclass
class CacheStats:
    """What has happened since the start."""

    hits: int = 0
    """Requests whose adapter was resident when they came."""
    misses: int = 0
    """Requests whose adapter was absent or still loading then."""
    loads: int = 0
    failed_loads: int = 0
    evictions: Counter[Reason] = field(default_factory=Counter)


@dataclass
class _Entry:
    bytes: int
    last_used: float
    resident: bool = False
    users: int = 0


class AdapterCache(Generic[A]):
    """The adapters that are loading or resident, who uses and who waits for them, and which are the first to go.

    Frequency counts the uses of the last `window_s` seconds, also from before an adapter was last evicted. `now` is in
    seconds on any clock that does not run backwards. What is asked of an adapter in the wrong state raises ValueError.
    """

    def __init__(self, eviction: Eviction = "compound", window_s: float = 300.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self.bytes = 0
        """Of all adapters that are loading or resident."""
        self.idle = 0
        """Of these, the bytes that could be freed now: of adapters neither loading, nor in use, nor pinned."""
        self.stats = CacheStats()
        self.eviction = eviction
        """By which what is idle is compared."""
        self._window_s = window_s
        self._entries: dict[A, _Entry] = {}
        self._evictable: dict[A, _Entry] = {}
        self._wanted: Counter[A] = Counter()
        self._pinned: set[A] = set()
        self._uses: deque[tuple[float, A]] = deque()
        self._frequency: Counter[A] = Counter()
        self._first_used = math.inf

    @property
    def keeps(self) -> bool:
        """Whether adapters stay that nobody uses or waits for."""
        return self.eviction != "none"

    def state(self, adapter: A) -> State:
        """Whether `adapter` is in memory, or on its way."""
        entry = self._entries.get(adapter)
        if entry is None:
            return "absent"
        return "resident" if entry.resident else "loading"

    def resident(self) -> list[A]:
        """All that are resident, in the order in which they were loaded."""
        return [adapter for adapter, entry in self._entries.items() if entry.resident]

    def begin_load(self, adapter: A, bytes: int, now: float) -> None:
        """From now on an absent `adapter` takes `bytes`, though it cannot be used yet."""
        if bytes < 1:
            raise ValueError(f"an adapter has at least 1 byte, got {bytes} for {adapter!r}")
        if adapter in self._entries:
            raise ValueError(f"{adapter!r} is {self.state(adapter)} already")
        self._entries[adapter] = _Entry(bytes, now)
        self.bytes += bytes

    def loaded(self, adapter: A, now: float) -> None:
        """A load is over: `adapter` is resident and may be used."""
        entry = self._entry(adapter, resident=False)
        entry.resident = True
        entry.last_used = now
        self.stats.loads += 1
        self._update(adapter, entry)

    def failed(self, adapter: A) -> None:
        """A load failed: `adapter` is absent again."""
        self.bytes -= self._entry(adapter, resident=False).bytes
        del self._entries[adapter]
        self.stats.failed_loads += 1

    def acquire(self, adapter: A, now: float) -> None:
        """A request uses a resident `adapter` from now on, and until `release` it cannot be evicted."""
        entry = self._entry(adapter)
        entry.users += 1
        entry.last_used = now
        self._forget(now)
        self._first_used = min(self._first_used, now)
        self._uses.append((now, adapter))
        self._frequency[adapter] += 1
        self._update(adapter, entry)

    def release(self, adapter: A, now: float) -> None:
        """A request that acquired `adapter` has computed its last token."""
        entry = self._entry(adapter)
        if not entry.users:
            raise ValueError(f"nobody uses {adapter!r}")
        entry.users -= 1
        entry.last_used = now
        self._update(adapter, entry)

    def asked(self, adapter: A) -> None:
        """A request for `adapter` has come: a hit or a miss. Once for each, however often it is queued."""
        if self.state(adapter) == "resident":
            self.stats.hits += 1
        else:
            self.stats.misses += 1

    def want(self, adapter: A) -> None:
        """A request for `adapter`, in whatever state that is, is queued."""
        self._wanted[adapter] += 1

    def unwant(self, adapter: A) -> None:
        """A request that wanted `adapter` is queued no more."""
        if not self._wanted[adapter]:
            raise ValueError(f"nobody waits for {adapter!r}")
        _count_down(self._wanted, adapter)

    def pin(self, adapter: A) -> None:
        """Never evict `adapter`, in whatever state it is."""
        self._pinned.add(adapter)
        self._update_if_cached(adapter)

    def unpin(self, adapter: A) -> None:
        """Let a pinned `adapter` be evicted again."""
        self._pinned.discard(adapter)
        self._update_if_cached(adapter)

    def victims(self, bytes: int, now: float, spare_wanted: bool = True, spare_recent: bool = False) -> list[A] | None:
        """Which to evict to free at least `bytes`, lowest scores first; None if that cannot be. Evicts nothing.

        Adapters that queued requests wait for come last, and only without `spare_wanted`; with `spare_recent` none goes
        that was used or loaded within the window. All named are needed.
        """
        if bytes <= 0:
            return []
        if bytes > self.idle:
            return None
        chosen, freed = [], 0
        for adapter in self._ranked(now, spare_wanted):
            if spare_recent and self._entries[adapter].last_used > now - self._window_s:
                continue
            chosen.append(adapter)
            freed += self._entries[adapter].bytes
            if freed >= bytes:
                break
        spare = freed - bytes
        if spare < 0:
            return None
        needed = []
        for adapter in reversed(chosen):
            size = self._entries[adapter].bytes
            if size <= spare:
                spare -= size
            else:
                needed.append(adapter)
        return needed[::-1]

    def uses(self, now: float) -> dict[A, Use]:
        """Of all that are loading or resident; the cost is in bytes."""
        self._forget(now)
        frequency = self._frequency
        seconds = min(max(now - self._first_used, _LEAST_S), self._window_s)
        return {
            adapter: Use(uses, entry.last_used, entry.bytes, entry.bytes, uses / seconds)
            for adapter, entry in self._entries.items()
            for uses in (frequency.get(adapter, 0),)
        }

    def hottest(self, most: int) -> list[tuple[A, int]]:
        """The adapters that were used most often within the window before the latest use, and how often; `most` at
        most. Any thread may call it."""
        uses = list(self._frequency.items())
        return sorted(uses, key=lambda use: -use[1])[:most]

    def evictable(self) -> Collection[A]:
        """Those neither loading, nor in use, nor pinned. Nothing may change meanwhile."""
        return self._evictable

    def wanted(self, adapter: A) -> bool:
        """Whether queued requests wait for `adapter`."""
        return adapter in self._wanted

    def evict(self, adapter: A, reason: Reason) -> None:
        """Forget a resident `adapter` that nobody uses and that is not pinned."""
        entry = self._entry(adapter)
        if adapter not in self._evictable:
            held = "it is pinned" if adapter in self._pinned else f"{entry.users} requests use it"
            raise ValueError(f"{adapter!r} cannot be evicted: {held}")
        del self._entries[adapter], self._evictable[adapter]
        self.bytes -= entry.bytes
        self.idle -= entry.bytes
        self.stats.evictions[reason] += 1

    def trim(self, now: float) -> list[A]:
        """With "none", the adapters that must be evicted now, as nobody uses or waits for them; else there are none."""
        return [] if self.keeps or not self._evictable else self._ranked(now, spare_wanted=True)

    def check(self) -> None:
        """Raise CacheError unless all counts agree."""
        for adapter, entry in self._entries.items():
            if entry.users < 0 or (entry.users and not entry.resident):
                raise CacheError(f"{entry.users} requests use {adapter!r}, which is {self.state(adapter)}")
        evictable = {adapter for adapter, entry in self._entries.items() if self._may_go(adapter, entry)}
        if evictable != set(self._evictable):
            raise CacheError(f"{evictable} may be evicted, but {set(self._evictable)} are counted as such")
        sums = (_bytes(self._entries.values()), _bytes(self._evictable.values()))
        if (self.bytes, self.idle) != sums:
            raise CacheError(f"bytes and idle bytes are {sums}, but {(self.bytes, self.idle)} are counted")
        if min(self._wanted.values(), default=1) < 1:
            raise CacheError(f"requests that wait for adapters are counted as {dict(self._wanted)}")
        if self._frequency != Counter(adapter for _, adapter in self._uses):
            raise CacheError(f"frequencies {dict(self._frequency)} are not those of the uses")

    def _entry(self, adapter: A, resident: bool = True) -> _Entry:
        state: State = "resident" if resident else "loading"
        if self.state(adapter) != state:
            raise ValueError(f"{adapter!r} must be {state}, but is {self.state(adapter)}")
        return self._entries[adapter]

    def _may_go(self, adapter: A, entry: _Entry) -> bool:
        return entry.resident and not entry.users and adapter not in self._pinned

    def _update(self, adapter: A, entry: _Entry) -> None:
        """Count whether `adapter` may be evicted now."""
        if self._may_go(adapter, entry) == (adapter in self._evictable):
            return
        if self._evictable.pop(adapter, None):
            self.idle -= entry.bytes
        else:
            self._evictable[adapter] = entry
            self.idle += entry.bytes

    def _update_if_cached(self, adapter: A) -> None:
        entry = self._entries.get(adapter)
        if entry:
            self._update(adapter, entry)

    def _ranked(self, now: float, spare_wanted: bool) -> list[A]:
        """What may be evicted, in order: those that nobody waits for, then the others; the lowest scores first."""
        wanted = self._wanted
        uses = self.uses(now)
        score = scorer(self.eviction, uses.values(), now)

        def rank(adapter: A) -> tuple[bool, float, float]:
            return adapter in wanted, score(uses[adapter]), uses[adapter].last_used

        candidates = (adapter for adapter in self._evictable if not spare_wanted or adapter not in wanted)
        return sorted(candidates, key=rank)

    def _forget(self, now: float) -> None:
        """Uses that are older than the window count no more."""
        while self._uses and self._uses[0][0] <= now - self._window_s:
            _count_down(self._frequency, self._uses.popleft()[1])


def _count_down(counts: Counter[A], key: A) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _bytes(entries: Iterable[_Entry]) -> int:
    return sum(entry.bytes for entry in entries)
