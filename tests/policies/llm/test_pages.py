"""Pages: whatever happens, none is owned twice, none is lost, and every request reads the tokens that are its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pliant.policies.llm.pages import Pages, PagesError

ROOTS = ("base", "adapter of a", "adapter of b")


class House:
    """Pages, and the memory that they describe: what was computed in each slot, by all the tokens up to it."""

    def __init__(self, count: int, page_tokens: int) -> None:
        self.pages: Pages[int, str] = Pages(count, page_tokens)
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.requests: dict[int, tuple[str, list[int]]] = {}
        self.now = 0.0
        self.shared = 0
        self._keys = 0

    def begin(self, root: str, tokens: Sequence[int]) -> int:
        self.now += 1.0
        self._keys += 1
        self.requests[self._keys] = (root, list(tokens))
        self.shared += self.pages.begin(self._keys, root, tokens, self.now)
        assert self.pages.computed(self._keys) < len(tokens)
        return self._keys

    def compute(self, key: int, most: int) -> bool:
        """Of what the request says, known yet or not, as much as memory and `most` allow; whether anything is."""
        self.now += 1.0
        tokens = min(most, len(self.requests[key][1]) - self.pages.computed(key))
        free = self.pages.free - self.pages.count + self.pages.limit
        while tokens > 0 and self.pages.lacking(key, tokens) > free:
            tokens -= 1
        if tokens < 1:
            return False
        before = self.pages.free
        lacking = self.pages.lacking(key, tokens)
        self.pages.grow(key, tokens)
        assert self.pages.free == before - max(0, lacking)
        root, known = self.requests[key]
        table, start = self.pages.table(key), self.pages.computed(key)
        for at in range(start, start + tokens):
            page, slot = divmod(at, self.pages.page_tokens)
            self.memory[table[page], slot] = (root, tuple(known[: at + 1]))
        self.pages.advance(key, tokens, self.now)
        return True

    def append(self, key: int, token: int, known: bool = True) -> None:
        self.requests[key][1].append(token)
        if known:
            self.know(key)

    def know(self, key: int) -> None:
        self.now += 1.0
        self.pages.append(key, self.requests[key][1][self.pages.known(key) :], self.now)

    def catch_up(self, key: int) -> None:
        self.now += 1.0
        before = self.pages.computed(key)
        self.shared += self.pages.catch_up(key, self.now) - before

    def end(self, key: int) -> None:
        self.now += 1.0
        freed, before = self.pages.freed_by(key), self.pages.free + self.pages.idle
        self.pages.end(key, self.now)
        assert self.pages.free + self.pages.idle == before + freed
        del self.requests[key]

    def evict(self, choose: Callable[[int], int]) -> None:
        leaves = sorted(self.pages.leaves(), key=lambda prefix: prefix.page)
        if leaves:
            self.pages.evict(leaves[choose(len(leaves))])

    def resize(self, limit: int) -> None:
        taken = self.pages.count - self.pages.free
        moves = self.pages.resize(max(limit, taken))
        sources, targets = {source for source, _ in moves}, {target for _, target in moves}
        assert len(sources) == len(targets) == len(moves)
        assert not sources & targets
        for source, target in moves:
            for slot in range(self.pages.page_tokens):
                if (source, slot) in self.memory:
                    self.memory[target, slot] = self.memory.pop((source, slot))

    def check(self) -> None:
        """Everybody reads its own tokens, and nothing else."""
        self.pages.check()
        size = self.pages.page_tokens
        for key, (root, tokens) in self.requests.items():
            table = self.pages.table(key)
            assert 0 not in table
            for at in range(self.pages.computed(key)):
                assert self.memory[table[at // size], at % size] == (root, tuple(tokens[: at + 1]))


def step(house: House, rng: random.Random) -> None:
    """Anything that may happen."""
    keys = list(house.requests)
    what = rng.random()
    if not keys or what < 0.10:
        opening = [rng.randrange(2)] * rng.randrange(1, 12)
        house.begin(rng.choice(ROOTS), [*opening, *(rng.randrange(2) for _ in range(rng.randrange(4)))])
    elif what < 0.55:
        house.compute(rng.choice(keys), rng.randrange(1, 9))
    elif what < 0.70:
        house.append(rng.choice(keys), rng.randrange(2), rng.random() < 0.7)
    elif what < 0.80:
        house.catch_up(rng.choice(keys))
    elif what < 0.90:
        house.end(rng.choice(keys))
    elif what < 0.96:
        house.evict(rng.randrange)
    elif what < 0.98:
        house.know(rng.choice(keys))
    else:
        house.resize(rng.randint(house.pages.count // 2, house.pages.count))


@pytest.mark.parametrize(("count", "page_tokens"), [(40, 1), (24, 2), (60, 4), (7, 4), (30, 8)])
def test_any_number_of_random_steps_keeps_the_books_and_the_contents(count: int, page_tokens: int) -> None:
    house, rng = House(count, page_tokens), random.Random(count)
    for _ in range(6_000):
        step(house, rng)
        house.check()
    assert house.shared > 100
    for key in list(house.requests):
        house.end(key)
    while house.pages.idle:
        house.evict(rng.randrange)
    house.check()
    assert house.pages.free == count


class Steps(RuleBasedStateMachine):
    """The same, where what fails is made small."""

    @initialize(count=st.integers(1, 20), page_tokens=st.sampled_from((1, 2, 4)))
    def start(self, count: int, page_tokens: int) -> None:
        self.house = House(count, page_tokens)

    def one(self, number: int) -> int:
        return list(self.house.requests)[number % len(self.house.requests)]

    @rule(root=st.sampled_from(ROOTS[:2]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, root: str, tokens: list[int]) -> None:
        self.house.begin(root, tokens)

    @precondition(lambda self: self.house.requests)
    @rule(number=st.integers(0, 50), tokens=st.integers(1, 12))
    def compute(self, number: int, tokens: int) -> None:
        self.house.compute(self.one(number), tokens)

    @precondition(lambda self: self.house.requests)
    @rule(number=st.integers(0, 50), token=st.integers(0, 1), known=st.booleans())
    def append(self, number: int, token: int, known: bool) -> None:
        self.house.append(self.one(number), token, known)

    @rule(limit=st.integers(1, 20))
    def resize(self, limit: int) -> None:
        self.house.resize(min(limit, self.house.pages.count))

    @precondition(lambda self: self.house.requests)
    @rule(number=st.integers(0, 50), what=st.sampled_from(("catch_up", "end", "know")))
    def other(self, number: int, what: str) -> None:
        getattr(self.house, what)(self.one(number))

    @rule(number=st.integers(0, 50))
    def evict(self, number: int) -> None:
        self.house.evict(lambda leaves: number % leaves)

    @invariant()
    def right(self) -> None:
        if hasattr(self, "house"):
            self.house.check()


Steps.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSteps = Steps.TestCase


def computed(house: House, root: str, tokens: Sequence[int]) -> int:
    key = house.begin(root, tokens)
    house.compute(key, len(tokens))
    return key


def test_a_second_turn_begins_behind_the_first() -> None:
    house = House(10, 4)
    first = computed(house, "base", range(10))
    for token in (10, 11, 12):
        house.append(first, token)
        house.compute(first, 1)
    house.end(first)
    assert house.pages.idle == 3
    turn = house.begin("base", [*range(13), 20, 21])
    assert house.pages.computed(turn) == 12


def test_nothing_is_shared_between_roots() -> None:
    house = House(10, 4)
    computed(house, "adapter of a", range(10))
    assert house.pages.computed(house.begin("adapter of b", range(10))) == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    house = House(10, 4)
    house.end(computed(house, "base", range(8)))
    assert house.pages.computed(house.begin("base", range(8))) == 4
    assert house.pages.computed(house.begin("base", range(9))) == 8


def test_requests_that_come_together_compute_what_they_share_once() -> None:
    house = House(20, 4)
    first, second = house.begin("base", range(12)), house.begin("base", [*range(8), 99, 99])
    house.compute(first, 8)
    house.catch_up(second)
    assert house.pages.computed(second) == 8
    assert house.pages.table(first)[:2] == house.pages.table(second)[:2]


def test_who_does_not_share_computes_all_and_others_find_it_once() -> None:
    house = House(20, 4)
    computed(house, "base", range(12))
    assert house.pages.begin("alone", "base", range(12), 9.0, shares=False) == 0
    house.pages.grow("alone", 12)
    assert (house.pages.free, house.pages.saved) == (14, 0)
    house.pages.advance("alone", 12, 9.0)
    assert (house.pages.free, house.pages.saved) == (17, 3)
    house.pages.check()


def test_what_two_computed_at_once_is_kept_once() -> None:
    house = House(20, 4)
    first, second = house.begin("base", range(12)), house.begin("base", range(12))
    house.compute(first, 12)
    house.compute(second, 12)
    assert house.pages.table(first) == house.pages.table(second)
    assert house.pages.free == 17
    assert house.pages.saved == 3


def test_misuse_is_refused() -> None:
    pages: Pages[str, str] = Pages(4, 4)
    pages.begin("a", "base", range(30), 0.0)
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: Pages(0, 16), "pages must be 1 or more"),
        (lambda: Pages(1, 0), "of 1 token or more; got 1 of 0"),
        (lambda: pages.begin("a", "base", [1], 0.0), "'a' has begun already"),
        (lambda: pages.begin("b", "base", [], 0.0), "'b' has no tokens"),
        (lambda: pages.grow("a", 17), "'a' lacks 5 pages, and 4 of 4 are free"),
        (lambda: pages.advance("a", 1, 0.0), "'a' has no pages for 1 tokens"),
        (lambda: pages.resize(5), "0 of 4 pages hold something, and 5 shall do"),
    ]
    for refused, message in refusals:
        with pytest.raises(ValueError, match=message):
            refused()
    pages.grow("a", 16)
    pages.advance("a", 16, 0.0)
    pages.end("a", 0.0)
    root = next(prefix for prefix in pages.cached("base", range(30)) if prefix.parent is None)
    with pytest.raises(ValueError, match="cannot be evicted"):
        pages.evict(root)
    pages.check()


@pytest.mark.parametrize("damage", ["lost", "twice", "idle", "found", "read"])
def test_check_finds_contradictions(damage: str) -> None:
    house = House(10, 4)
    first = computed(house, "base", range(10))
    house.end(computed(house, "base", range(20, 30)))
    pages = house.pages
    if damage == "lost":
        pages._free.pop()
    elif damage == "twice":
        pages._free.append(pages.table(first)[0])
    elif damage == "idle":
        pages.idle += 1
    elif damage == "found":
        pages._found.popitem()
    else:
        pages._requests[first].table[0], pages._requests[first].table[1] = pages.table(first)[1], pages.table(first)[0]
    with pytest.raises(PagesError):
        pages.check()
