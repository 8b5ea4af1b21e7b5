"""One memory of pages for requests, for prefixes that nobody uses at the moment, and for adapters (DESIGN §5).

Whatever is idle stays until somebody needs its pages; then goes what is worth least, adapter or prefix, under one score
(`worth`). A prefix goes a page at a time, the last one first, and before all else while its adapter is out. An adapter
goes whole; one that is in use, loading or pinned stays, and so does one that queued requests wait for, unless nothing
else helps. Nothing is evicted in vain: what turns out not to be needed, because something large goes too, is spared.

Pages and adapters are counted in bytes: adapters take what pages leave, and need not be whole pages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import chain, count
from typing import Generic, NamedTuple, Protocol, TypeVar

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.pages import Pages, PagesError
from pliant.policies.llm.prefixes import WINDOW_S, Prefix
from pliant.policies.llm.worth import Eviction, Use, scorer

K = TypeVar("K", bound=Hashable)
A = TypeVar("A", bound=Hashable)


class Root(NamedTuple, Generic[A]):
    """Whose prefixes may be shared."""

    adapter: A | None
    tenant: Hashable = None
    """None: anybody's."""


class Costs(Protocol):
    """Predicted seconds to bring back what was evicted."""

    def prompt_s(self, tokens: int, before: int) -> float:
        """To compute `tokens` of a prompt, behind `before` others."""
        ...

    def load_s(self, bytes: int) -> float:
        """To load an adapter."""
        ...


class IdleMemory(Generic[K, A]):
    """`total` bytes for `pages`, of `page_bytes` each, and for `adapters`, by whose score both are compared.

    With `prefixes`=False those are not kept: `trim` evicts them. `now` is in seconds on any clock that does not run
    backwards.
    """

    def __init__(
        self,
        pages: Pages[K, Root[A]],
        page_bytes: int,
        total: int,
        adapters: AdapterCache[A],
        costs: Costs,
        prefixes: bool = True,
    ) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self.total = total
        self.adapters = adapters
        """To be read, and to say what is used and wanted."""
        self.evicted = 0
        """Pages of prefixes, since the start."""
        self._costs = costs
        self._prefixes = prefixes
        self.by: Eviction = adapters.eviction if adapters.keeps else "joint"
        """The score."""

    @property
    def limit(self) -> int:
        """Pages that adapters leave room for."""
        return (self.total - self.adapters.bytes) // self.page_bytes

    @property
    def free(self) -> int:
        """Bytes that hold nothing; less than 0 if more was given out than there is."""
        return self.total - self.adapters.bytes - (self.pages.used + self.pages.idle) * self.page_bytes

    @property
    def idle(self) -> int:
        """Bytes that could be freed now."""
        return self.adapters.idle + self.pages.idle * self.page_bytes

    def make_room(self, pages: int, now: float, spare_wanted: bool = False) -> list[A] | None:
        """Evict until so many more pages fit; returns the adapters among what went. None, and nothing goes, if that
        cannot be; with `spare_wanted`, not without adapters that queued requests wait for."""
        return self._free(pages * self.page_bytes, now, spare_wanted)

    def begin_load(self, adapter: A, bytes: int, now: float, spare_wanted: bool = False) -> list[A] | None:
        """An absent adapter takes its memory; returns what was evicted for it, None if there is no room."""
        gone = self._free(bytes, now, spare_wanted)
        if gone is not None:
            self.adapters.begin_load(adapter, bytes, now)
        return gone

    def _free(self, bytes: int, now: float, spare_wanted: bool) -> list[A] | None:
        needed = bytes - self.free
        if needed <= 0:
            return []
        if needed > self.idle:
            return None
        victims = _Victims(self, now, spare_wanted).until(needed)
        if victims is None:
            return None
        gone = []
        for victim in victims:
            if isinstance(victim, Prefix):
                self.pages.evict(victim)
                self.evicted += 1
            else:
                self.adapters.evict(victim, "memory")
                gone.append(victim)
        return gone

    def trim(self, now: float) -> list[A]:
        """Evict what is idle and of a sort that is not kept; returns the adapters."""
        if not self._prefixes:
            self.forget()
        gone = self.adapters.trim(now)
        for adapter in gone:
            self.adapters.evict(adapter, "unused")
        return gone

    def forget(self) -> None:
        """Evict all prefixes that nobody uses."""
        leaves = list(self.pages.leaves())
        while leaves:
            parent = self.pages.evict(leaves.pop())
            if parent is not None:
                leaves.append(parent)

    def check(self) -> None:
        """Raise PagesError or CacheError unless all counts agree. Slow: for tests and debugging."""
        self.adapters.check()
        self.pages.check()
        if self.free < 0:
            raise PagesError(f"{-self.free} bytes more are given out than the {self.total} that there are")

    def adapter_uses(self, now: float) -> dict[A, Use]:
        """Of all that are loading or resident: the cost in seconds, the memory in bytes."""
        return {
            adapter: use._replace(cost=self._costs.load_s(int(use.bytes)))
            for adapter, use in self.adapters.uses(now).items()
        }

    def prefix_use(self, prefix: Prefix[Root[A]], now: float) -> Use:
        """Of a page, in the same units."""
        frequency = prefix.frequency(now)
        seconds = self._costs.prompt_s(self.pages.page_tokens, prefix.depth)
        return Use(frequency, prefix.last_used, seconds, self.page_bytes, frequency / WINDOW_S)


class _Victims(Generic[K, A]):
    """What could be evicted now, ranked; nothing is evicted by it."""

    def __init__(self, memory: IdleMemory[K, A], now: float, spare_wanted: bool) -> None:
        self._memory = memory
        self._now = now
        leaves = list(memory.pages.leaves())
        self._uses = uses = memory.adapter_uses(now)
        everything = chain(uses.values(), (memory.prefix_use(leaf, now) for leaf in leaves))
        self._score = scorer(memory.by, everything, now)
        self._out = {leaf.root.adapter for leaf in leaves} - {None, *uses}
        """Adapters that are absent, or planned to be."""
        self._order = count()
        self._heap: list[tuple[bool, float, float, int, Prefix[Root[A]] | A]] = []
        self._leaves: defaultdict[A | None, list[Prefix[Root[A]]]] = defaultdict(list)
        """By adapter; also those that are planned to go already."""
        self._behind: Counter[int] = Counter()
        """By page: how many of those that continue it are planned to go."""
        for leaf in leaves:
            self._add(leaf)
        for adapter in memory.adapters.evictable():
            wanted = memory.adapters.wanted(adapter)
            if not (wanted and spare_wanted):
                use = uses[adapter]
                heappush(self._heap, (wanted, self._score(use), use.last_used, next(self._order), adapter))

    def until(self, needed: int) -> list[Prefix[Root[A]] | A] | None:
        """Those whose eviction frees `needed` bytes, in order; None if all together free fewer."""
        victims: dict[Prefix[Root[A]] | A, int] = {}
        freed = 0
        while freed < needed:
            if not self._heap:
                return None
            victim = heappop(self._heap)[-1]
            if victim not in victims:  # a leaf is ranked again when its adapter goes
                victims[victim] = self._plan(victim)
                freed += victims[victim]
        return _without_the_needless(victims, freed - needed)

    def _plan(self, victim: Prefix[Root[A]] | A) -> int:
        """It is planned to go; returns the bytes that this frees."""
        if not isinstance(victim, Prefix):
            self._out.add(victim)
            for leaf in self._leaves[victim]:
                self._rank(leaf)
            return int(self._uses[victim].bytes)
        parent = victim.parent
        if parent is not None:
            self._behind[parent.page] += 1
            if self._behind[parent.page] == parent.children and not self._memory.pages.in_use(parent):
                self._add(parent)
        return self._memory.page_bytes

    def _add(self, leaf: Prefix[Root[A]]) -> None:
        self._leaves[leaf.root.adapter].append(leaf)
        self._rank(leaf)

    def _rank(self, leaf: Prefix[Root[A]]) -> None:
        out = leaf.root.adapter in self._out
        worth = -math.inf if out else self._score(self._memory.prefix_use(leaf, self._now))
        heappush(self._heap, (False, worth, leaf.last_used, next(self._order), leaf))


def _without_the_needless(victims: dict[Prefix[Root[A]] | A, int], spare: int) -> list[Prefix[Root[A]] | A]:
    """Of victims with the bytes that each frees, in order, those that must go although `spare` bytes too many do.

    The last are spared first; a page that continues another only together with that.
    """
    needed: dict[Prefix[Root[A]] | A, None] = {}
    for victim, bytes in reversed(victims.items()):
        if bytes <= spare and not (isinstance(victim, Prefix) and victim.parent in needed):
            spare -= bytes
        else:
            needed[victim] = None
    return list(reversed(needed))
