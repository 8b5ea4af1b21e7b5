"""The adapter cache: the right victims, against brute force, and counts that hold whatever happens (Chameleon §4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pliant.policies.llm.adapter_cache import AdapterCache, CacheError, Eviction
from pliant.policies.llm.worth import PATIENCE_S

EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
F, R, S = 0.45, 0.10, 0.45


def cached(*adapters: tuple[str, int], eviction: Eviction = "compound", window_s: float = 300.0) -> AdapterCache[str]:
    """A cache that at time 0 holds adapters of such names and bytes."""
    cache: AdapterCache[str] = AdapterCache(eviction, window_s)
    for adapter, size in adapters:
        cache.begin_load(adapter, size, 0.0)
        cache.loaded(adapter, 0.0)
    return cache


def use(cache: AdapterCache[str], adapter: str, *times: float) -> None:
    for now in times:
        cache.acquire(adapter, now)
        cache.release(adapter, now)


def test_the_compound_score_weighs_frequency_recency_and_size() -> None:
    cache = cached(("small", 10), ("large", 40), ("often", 10), ("lately", 20))
    use(cache, "often", 1.0, 2.0, 3.0, 4.0)
    use(cache, "large", 5.0)
    use(cache, "lately", 9.0)
    scores = {
        "small": F * 0 + R * 0 + S * 10 / 40,
        "large": F * 1 / 4 + R * (1 - 5 / 10) + S * 1,
        "often": F * 1 + R * (1 - 6 / 10) + S * 10 / 40,
        "lately": F * 1 / 4 + R * (1 - 1 / 10) + S * 20 / 40,
    }
    assert cache.victims(80, now=10.0) == sorted(scores, key=scores.__getitem__)


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("joint", ["cold", "large", "warm", "hot"]),
        ("compound", ["cold", "warm", "large", "hot"]),
        ("fair_share", ["cold", "hot", "warm", "large"]),
        ("lru", ["hot", "cold", "large", "warm"]),
        ("lfu", ["cold", "large", "warm", "hot"]),
        ("none", ["hot", "cold", "large", "warm"]),
    ],
)
def test_each_alternative_has_its_order(eviction: Eviction, order: list[str]) -> None:
    cache = cached(("hot", 10), ("cold", 10), ("large", 40), ("warm", 20), eviction=eviction)
    use(cache, "hot", *(1.0,) * 8)
    use(cache, "cold", 2.0)
    use(cache, "large", 3.0)
    use(cache, "warm", 4.0, 4.0)
    assert cache.victims(80, now=5.0) == order
    assert cache.victims(1, now=5.0) == order[:1]


def test_what_was_used_before_the_window_does_not_count() -> None:
    cache = cached(("once", 10), ("now", 10), eviction="lfu", window_s=60.0)
    use(cache, "once", 1.0, 2.0, 3.0)
    use(cache, "now", 40.0)
    assert cache.victims(10, now=60.0) == ["now"]
    assert cache.victims(10, now=62.5) == ["once"]


def test_the_hottest_are_those_used_most_within_the_window() -> None:
    cache = cached(("once", 1), ("twice", 1), ("long ago", 1), ("never", 1), window_s=10.0)
    use(cache, "long ago", 1.0, 2.0, 3.0)
    use(cache, "twice", 14.0, 15.0)
    use(cache, "once", 16.0)
    cache.evict("twice", "memory")
    assert cache.hottest(9) == [("twice", 2), ("once", 1)]
    assert cache.hottest(1) == [("twice", 2)]


def test_frequency_outlives_an_eviction() -> None:
    cache = cached(("popular", 10), ("other", 10), eviction="lfu")
    use(cache, "popular", 1.0, 2.0)
    use(cache, "other", 3.0)
    cache.evict("popular", "memory")
    cache.begin_load("popular", 10, 4.0)
    cache.loaded("popular", 4.0)
    assert cache.victims(10, now=5.0) == ["other"]


def test_nothing_is_evicted_in_vain() -> None:
    cache = cached(("a", 10), ("b", 20), ("c", 80), eviction="lru")
    assert cache.victims(90, now=1.0) == ["a", "c"]
    assert cache.victims(80, now=1.0) == ["c"]
    assert cache.victims(101, now=1.0) == ["a", "b", "c"]
    assert cache.victims(111, now=1.0) is None
    assert cache.victims(0, now=1.0) == []


def test_adapters_in_use_pinned_or_loading_are_never_victims() -> None:
    cache = cached(("used", 10), ("pinned", 10), ("idle", 10))
    cache.acquire("used", 1.0)
    cache.pin("pinned")
    cache.begin_load("loading", 10, 1.0)
    assert (cache.bytes, cache.idle) == (40, 10)
    assert cache.victims(10, now=2.0, spare_wanted=False) == ["idle"]
    assert cache.victims(11, now=2.0, spare_wanted=False) is None
    with pytest.raises(ValueError, match="'used' cannot be evicted: 1 requests use it"):
        cache.evict("used", "memory")
    with pytest.raises(ValueError, match="'pinned' cannot be evicted: it is pinned"):
        cache.evict("pinned", "memory")
    cache.release("used", 3.0)
    cache.unpin("pinned")
    assert cache.idle == 30
    assert cache.resident() == ["used", "pinned", "idle"]


def test_wanted_adapters_go_last_and_only_if_they_may() -> None:
    cache = cached(("wanted", 10), ("b", 10), ("c", 10), eviction="lru")
    use(cache, "b", 1.0)
    use(cache, "c", 2.0)
    cache.want("wanted")
    assert cache.victims(20, now=3.0) == ["b", "c"]
    assert cache.victims(30, now=3.0) is None
    assert cache.victims(30, now=3.0, spare_wanted=False) == ["b", "c", "wanted"]
    cache.unwant("wanted")
    assert cache.victims(10, now=3.0) == ["wanted"]


def test_adapters_of_late_are_spared_on_request() -> None:
    cache = cached(("old", 10), ("used", 10), ("loaded", 10), window_s=60.0)
    use(cache, "used", 1.0)
    cache.begin_load("new", 10, 50.0)
    cache.loaded("new", 50.0)
    assert cache.victims(20, now=60.5, spare_recent=True) == ["old", "loaded"]
    assert cache.victims(30, now=60.5, spare_recent=True) is None
    assert cache.victims(30, now=61.0, spare_recent=True) == ["old", "loaded", "used"]


def test_a_pin_may_come_before_the_adapter() -> None:
    cache = cached()
    cache.pin("a")
    cache.begin_load("a", 10, 0.0)
    cache.loaded("a", 0.0)
    assert (cache.bytes, cache.idle) == (10, 0)
    cache.unpin("never pinned")


def test_without_a_cache_what_nobody_wants_goes_at_once() -> None:
    cache = cached(("a", 10), ("b", 10), ("c", 10), ("d", 10), eviction="none")
    cache.acquire("a", 1.0)
    cache.want("b")
    cache.pin("c")
    assert cache.trim(2.0) == ["d"]
    cache.evict("d", "unused")
    cache.release("a", 3.0)
    assert cache.trim(3.0) == ["a"]
    assert cached(("a", 10), eviction="lru").trim(1.0) == []
    assert cached(eviction="none").trim(1.0) == []


def test_statistics() -> None:
    cache = cached(("a", 10))
    cache.asked("a")
    cache.asked("b")
    cache.begin_load("b", 30, 1.0)
    cache.asked("b")
    cache.loaded("b", 2.0)
    cache.begin_load("c", 30, 1.0)
    cache.failed("c")
    cache.evict("a", "memory")
    cache.evict("b", "unused")
    stats = cache.stats
    assert (stats.hits, stats.misses, stats.loads, stats.failed_loads) == (1, 2, 2, 1)
    assert stats.evictions == {"memory": 1, "unused": 1}
    assert cache.state("c") == "absent"
    assert cache.bytes == 0


def test_misuse_is_refused() -> None:
    cache = cached(("a", 10))
    cache.begin_load("loading", 10, 0.0)
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: cache.begin_load("a", 10, 1.0), "'a' is resident already"),
        (lambda: cache.begin_load("b", 0, 1.0), "at least 1 byte, got 0 for 'b'"),
        (lambda: cache.acquire("loading", 1.0), "'loading' must be resident, but is loading"),
        (lambda: cache.acquire("b", 1.0), "'b' must be resident, but is absent"),
        (lambda: cache.loaded("a", 1.0), "'a' must be loading, but is resident"),
        (lambda: cache.failed("a"), "'a' must be loading, but is resident"),
        (lambda: cache.release("a", 1.0), "nobody uses 'a'"),
        (lambda: cache.unwant("a"), "nobody waits for 'a'"),
        (lambda: cache.evict("loading", "memory"), "'loading' must be resident, but is loading"),
        (lambda: AdapterCache[str]("lru", window_s=0.0), "window_s must be positive"),
    ]
    for refused, message in refusals:
        with pytest.raises(ValueError, match=message):
            refused()
    cache.check()


@pytest.mark.parametrize(("name", "value"), [("bytes", 9), ("idle", 9), ("_evictable", {}), ("_frequency", {"a": 2})])
def test_check_finds_contradictions(name: str, value: object) -> None:
    cache = cached(("a", 10))
    use(cache, "a", 1.0)
    cache.check()
    setattr(cache, name, value)
    with pytest.raises(CacheError):
        cache.check()


class Reference:
    """The same cache with nothing counted ahead: every answer is worked out from the history."""

    def __init__(self, eviction: Eviction, window_s: float) -> None:
        self.eviction, self.window_s = eviction, window_s
        self.sizes: dict[str, int] = {}
        self.resident: set[str] = set()
        self.users: list[str] = []
        self.wanted: list[str] = []
        self.pinned: set[str] = set()
        self.uses: list[tuple[float, str]] = []
        self.last_used: dict[str, float] = {}

    def idle(self) -> set[str]:
        return self.resident - set(self.users) - self.pinned

    def score(self, adapter: str, now: float) -> float:
        uses = [used for at, used in self.uses if at > now - self.window_s]
        frequency = uses.count(adapter) / max(1, *map(uses.count, self.sizes), 1)
        oldest = max(now - self.last_used[other] for other in self.sizes)
        recency = 1 - (now - self.last_used[adapter]) / oldest if oldest else 1.0
        size = self.sizes[adapter] / max(self.sizes.values())
        return {
            "joint": uses.count(adapter) / self.seconds(now) + 1 / (now - self.last_used[adapter] + PATIENCE_S),
            "compound": F * frequency + R * recency + S * size,
            "fair_share": (frequency + recency + size) / 3,
            "lru": recency,
            "lfu": frequency,
            "none": recency,
        }[self.eviction]

    def seconds(self, now: float) -> float:
        """For which uses are counted."""
        first = min((at for at, _ in self.uses), default=now)
        return min(max(now - first, 10.0), self.window_s)

    def order(self, adapters: Iterable[str], now: float) -> list[tuple[bool, float]]:
        """What victims are sorted by: wanted or not, and their score."""
        return [(adapter in self.wanted, self.score(adapter, now)) for adapter in adapters]


def not_after(first: tuple[bool, float], second: tuple[bool, float]) -> bool:
    """Whether the first of two ranks comes before the second, or is the same but for rounding."""
    return first[0] < second[0] or (first[0] == second[0] and first[1] <= second[1] + 1e-9)


class Cache(RuleBasedStateMachine):
    """Random operations: the counts agree with the history, and victims are the right ones."""

    @initialize(eviction=st.sampled_from(EVICTIONS), window_s=st.sampled_from((5.0, 50.0)))
    def start(self, eviction: Eviction, window_s: float) -> None:
        self.cache: AdapterCache[str] = AdapterCache(eviction, window_s)
        self.reference = Reference(eviction, window_s)
        self.now = 0.0

    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(adapter=st.sampled_from("abcdef"), size=st.integers(1, 50))
    def load(self, adapter: str, size: int) -> None:
        if self.cache.state(adapter) == "absent":
            self.cache.begin_load(adapter, size, self.now)
            self.reference.sizes[adapter] = size
            self.reference.last_used[adapter] = self.now

    @precondition(lambda self: set(self.reference.sizes) - self.reference.resident)
    @rule(data=st.data(), works=st.sampled_from((True, True, True, False)))
    def finish(self, data: st.DataObject, works: bool) -> None:
        adapter = data.draw(st.sampled_from(sorted(set(self.reference.sizes) - self.reference.resident)))
        if works:
            self.cache.loaded(adapter, self.now)
            self.reference.resident.add(adapter)
            self.reference.last_used[adapter] = self.now
        else:
            self.cache.failed(adapter)
            del self.reference.sizes[adapter]

    @precondition(lambda self: self.reference.resident)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.reference.resident)))
        self.cache.acquire(adapter, self.now)
        self.reference.users.append(adapter)
        self.reference.uses.append((self.now, adapter))
        self.reference.last_used[adapter] = self.now

    @precondition(lambda self: self.reference.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(self.reference.users))
        self.cache.release(adapter, self.now)
        self.reference.users.remove(adapter)
        self.reference.last_used[adapter] = self.now

    @rule(adapter=st.sampled_from("abcdef"))
    def want(self, adapter: str) -> None:
        self.cache.want(adapter)
        self.reference.wanted.append(adapter)

    @precondition(lambda self: self.reference.wanted)
    @rule(data=st.data())
    def unwant(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(self.reference.wanted))
        self.cache.unwant(adapter)
        self.reference.wanted.remove(adapter)

    @rule(adapter=st.sampled_from("abcdef"), pin=st.booleans())
    def pin(self, adapter: str, pin: bool) -> None:
        if pin:
            self.cache.pin(adapter)
            self.reference.pinned.add(adapter)
        else:
            self.cache.unpin(adapter)
            self.reference.pinned.discard(adapter)

    @rule(needed=st.integers(0, 120), spare_wanted=st.booleans(), evict=st.booleans())
    def free(self, needed: int, spare_wanted: bool, evict: bool) -> None:
        reference = self.reference
        allowed = {adapter for adapter in reference.idle() if not spare_wanted or adapter not in reference.wanted}
        victims = self.cache.victims(needed, self.now, spare_wanted)
        if sum(reference.sizes[adapter] for adapter in allowed) < needed:
            assert victims is None
            return
        assert victims is not None
        freed = sum(reference.sizes[adapter] for adapter in victims)
        assert freed >= needed
        assert all(freed - reference.sizes[adapter] < needed for adapter in victims), "one is evicted in vain"
        assert set(victims) <= allowed
        assert len(set(victims)) == len(victims)
        order = reference.order(victims, self.now)
        assert all(not_after(first, second) for first, second in pairwise(order))
        rivals = [adapter for adapter in allowed - set(victims) if reference.sizes[adapter] >= freed]
        assert not victims or all(not_after(order[-1], rank) for rank in reference.order(rivals, self.now))
        if evict:
            for adapter in victims:
                self.cache.evict(adapter, "memory")
                reference.resident.remove(adapter)
                del reference.sizes[adapter]

    @invariant()
    def right(self) -> None:
        self.cache.check()
        reference = self.reference
        assert self.cache.bytes == sum(reference.sizes.values())
        assert self.cache.idle == sum(reference.sizes[adapter] for adapter in reference.idle())
        assert set(self.cache.resident()) == reference.resident
        dropped = reference.idle() - set(reference.wanted) if reference.eviction == "none" else set()
        assert set(self.cache.trim(self.now)) == dropped


Cache.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestCache = Cache.TestCase


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.floats(0, 99), max_size=4)), min_size=1, max_size=7),
    st.integers(1, 120),
    st.sampled_from(EVICTIONS),
)
def test_victims_are_the_first_that_suffice_less_the_needless(
    adapters: list[tuple[int, list[float]]], needed: int, eviction: Eviction
) -> None:
    names = "abcdefg"[: len(adapters)]
    sizes = dict(zip(names, (size for size, _ in adapters), strict=True))
    cache = cached(*sizes.items(), eviction=eviction)
    uses = [(now, adapter) for adapter, (_, times) in zip(names, adapters, strict=True) for now in times]
    for now, adapter in sorted(uses):
        use(cache, adapter, now)
    order = cache.victims(sum(sizes.values()), 100.0)
    assert order is not None
    expected: list[str] | None = None
    for end in range(1, len(order) + 1):
        if sum(sizes[adapter] for adapter in order[:end]) >= needed:
            expected = order[:end]
            for adapter in reversed(order[:end]):
                rest = [other for other in expected if other != adapter]
                if sum(sizes[other] for other in rest) >= needed:
                    expected = rest
            break
    assert cache.victims(needed, 100.0) == expected
