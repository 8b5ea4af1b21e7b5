"""One memory of pages for requests, for prefixes that nobody uses at the moment, and for adapters (DESIGN §5).

Whatever is idle stays until somebody needs its pages; then goes what is worth least, adapter or prefix, under one score
(`worth`). A prefix goes a page at a time, the last one first, and before all else while its adapter is out. An adapter
goes whole; one that is in use, loading or pinned stays, and so does one that queued requests wait for, unless nothing
else helps. Nothing is evicted in vain: what turns out not to be needed, because something large goes too, is spared.

Chameleon (§4.1) keeps adapters alone, others prefixes alone: both are here by name, to be compared.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import chain, count
from typing import Generic, Literal, NamedTuple, TypeVar

from pliant.policies.llm.adapter_cache import AdapterCache, CacheError
from pliant.policies.llm.pages import WINDOW_S, Pages, Prefix
from pliant.policies.llm.passes import Costs
from pliant.policies.llm.worth import Eviction, Use, scorer

K = TypeVar("K", bound=Hashable)
A = TypeVar("A", bound=Hashable)

Keep = Literal["joint", "lru", "adapters", "prefixes", "none"]
"""What stays when nobody uses it: adapters and prefixes, by what they save or by when they were used last; or only the
ones or the others, by what they save; or nothing."""

_SCORES: dict[Keep, Eviction] = {
    "joint": "joint",
    "lru": "lru",
    "adapters": "joint",
    "prefixes": "joint",
    "none": "none",
}


class Root(NamedTuple, Generic[A]):
    """Whose prefixes may be shared."""

    adapter: A | None
    tenant: Hashable = None
    """None: anybody's."""


class IdleMemory(Generic[K, A]):
    """`pages` for requests and for adapters, of `page_bytes` each; nobody else evicts from it.

    `now` is in seconds on any clock that does not run backwards.
    """

    def __init__(self, pages: Pages[K, Root[A]], page_bytes: int, costs: Costs, keep: Keep = "joint") -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self.keep = keep
        self.adapters: AdapterCache[A] = AdapterCache("none" if keep == "prefixes" else _SCORES[keep])
        """To be read, and to say what is used and wanted; loads and evictions are this object's."""
        self._costs = costs
        self._held: dict[A, list[int]] = {}
        """Pages of the adapters that are loading or resident."""
        self._page_s: dict[int, float] = {}
        """Seconds to compute a page anew, by the tokens before it."""

    def adapter_pages(self, bytes: int) -> int:
        """Pages for an adapter of so many bytes."""
        return -(-bytes // self.page_bytes)

    @property
    def evictable(self) -> int:
        """Pages that could be freed now."""
        return self.pages.idle + sum(len(self._held[adapter]) for adapter in self.adapters.evictable())

    def make_room(self, count: int, now: float, spare_wanted: bool = False) -> list[A] | None:
        """Evict until `count` pages are free; returns the adapters among what went. None, and nothing goes, if that
        cannot be; with `spare_wanted`, not without adapters that queued requests wait for."""
        needed = count - self.pages.free
        if needed <= 0:
            return []
        if needed > self.evictable:
            return None
        victims = _Victims(self, now, spare_wanted).until(needed)
        if victims is None:
            return None
        gone = []
        for victim in victims:
            if isinstance(victim, Prefix):
                self.pages.evict(victim)
            else:
                self._evict(victim, "memory")
                gone.append(victim)
        return gone

    def begin_load(self, adapter: A, bytes: int, now: float, spare_wanted: bool = False) -> list[A] | None:
        """An absent adapter takes its pages; returns what was evicted for it, None if there is no room."""
        count = self.adapter_pages(bytes)
        gone = self.make_room(count, now, spare_wanted)
        if gone is not None:
            self.adapters.begin_load(adapter, bytes, now)
            self._held[adapter] = self.pages.take(count)
        return gone

    def held(self, adapter: A) -> list[int]:
        """The pages that an adapter has. Raises KeyError if it is absent."""
        return self._held[adapter]

    def loaded(self, adapter: A, now: float) -> None:
        """A load is over."""
        self.adapters.loaded(adapter, now)

    def failed(self, adapter: A) -> None:
        """A load failed; its pages are free."""
        self.adapters.failed(adapter)
        self.pages.give_back(self._held.pop(adapter))

    def trim(self, now: float) -> list[A]:
        """Evict what is idle and of a sort that is not kept; returns the adapters."""
        if self.keep in ("adapters", "none"):
            leaves = list(self.pages.leaves())
            while leaves:
                parent = self.pages.evict(leaves.pop())
                if parent is not None:
                    leaves.append(parent)
        gone = self.adapters.trim(now)
        for adapter in gone:
            self._evict(adapter, "unused")
        return gone

    def check(self) -> None:
        """Raise PagesError or CacheError unless all counts agree. Slow: for tests and debugging."""
        self.adapters.check()
        known = {adapter: use.bytes for adapter, use in self.adapters.uses(0.0).items()}
        if {adapter: self.adapter_pages(int(size)) for adapter, size in known.items()} != {
            adapter: len(pages) for adapter, pages in self._held.items()
        }:
            raise CacheError(f"adapters of {known} bytes have the pages {self._held}")
        self.pages.check([page for pages in self._held.values() for page in pages])

    def _evict(self, adapter: A, reason: Literal["memory", "unused"]) -> None:
        self.adapters.evict(adapter, reason)
        self.pages.give_back(self._held.pop(adapter))

    def adapter_uses(self, now: float) -> dict[A, Use]:
        """Of all that are loading or resident: the cost in seconds, the memory in pages."""
        return {
            adapter: use._replace(cost=self._costs.load_s(int(use.bytes)), bytes=len(self._held[adapter]))
            for adapter, use in self.adapters.uses(now).items()
        }

    def prefix_use(self, prefix: Prefix[Root[A]], now: float) -> Use:
        """Of a page, in the same units."""
        seconds = self._page_s.get(prefix.depth)
        if seconds is None:
            seconds = self._page_s[prefix.depth] = self._costs.prompt_s(self.pages.page_tokens, prefix.depth)
        frequency = prefix.frequency(now)
        return Use(frequency, prefix.last_used, seconds, 1, frequency / WINDOW_S)


class _Victims(Generic[K, A]):
    """What could be evicted now, ranked; nothing is evicted by it."""

    def __init__(self, memory: IdleMemory[K, A], now: float, spare_wanted: bool) -> None:
        self._memory = memory
        self._now = now
        leaves = list(memory.pages.leaves())
        uses = memory.adapter_uses(now)
        everything = chain(uses.values(), (memory.prefix_use(leaf, now) for leaf in leaves))
        self._score = scorer(_SCORES[memory.keep], everything, now)
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
        """Those whose eviction frees `needed` pages, in order; None if all together free fewer."""
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
        """It is planned to go; returns the pages that this frees."""
        if not isinstance(victim, Prefix):
            self._out.add(victim)
            for leaf in self._leaves[victim]:
                self._rank(leaf)
            return len(self._memory.held(victim))
        parent = victim.parent
        if parent is not None:
            self._behind[parent.page] += 1
            if self._behind[parent.page] == parent.children and not self._memory.pages.in_use(parent):
                self._add(parent)
        return 1

    def _add(self, leaf: Prefix[Root[A]]) -> None:
        self._leaves[leaf.root.adapter].append(leaf)
        self._rank(leaf)

    def _rank(self, leaf: Prefix[Root[A]]) -> None:
        out = leaf.root.adapter in self._out
        worth = -math.inf if out else self._score(self._memory.prefix_use(leaf, self._now))
        heappush(self._heap, (False, worth, leaf.last_used, next(self._order), leaf))


def _without_the_needless(victims: dict[Prefix[Root[A]] | A, int], spare: int) -> list[Prefix[Root[A]] | A]:
    """Of victims with the pages that each frees, in order, those that must go although `spare` pages too many do.

    The last are spared first; a page that continues another only together with that.
    """
    needed: dict[Prefix[Root[A]] | A, None] = {}
    for victim, pages in reversed(victims.items()):
        if pages <= spare and not (isinstance(victim, Prefix) and victim.parent in needed):
            spare -= pages
        else:
            needed[victim] = None
    return list(reversed(needed))
