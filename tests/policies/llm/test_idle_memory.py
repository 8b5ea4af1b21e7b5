"""One memory for adapters and prefixes: the books, the right victims, and how near the offline optimum it comes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, get_args

import pytest

from pliant.policies.llm.idle_memory import IdleMemory, Root
from pliant.policies.llm.prefixes import Prefix
from pliant.policies.llm.worth import PATIENCE_S
from pliant.simulation.llm.one_pass import Keep
from pliant.simulation.llm.one_pass import memory_of as made

KEEPS: tuple[Keep, ...] = get_args(Keep)


class Seconds:
    """A page is a byte; pages of prefixes take 1 s each, adapters half a second a page and 1 s more."""

    def load_s(self, bytes: int) -> float:
        return 1.0 + bytes / 2

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens / 4


class Asked(NamedTuple):
    """A request: for an adapter, with a prompt of whole pages by their contents."""

    adapter: str
    prompt: tuple[int, ...]


def memory_of(count: int, keep: Keep = "joint") -> IdleMemory[int, str]:
    return made(count, 1, 4, Seconds(), keep)


def tokens(prompt: Iterable[int]) -> list[int]:
    """Each page four times the same, and one token more, which is always computed."""
    return [page for page in prompt for _ in range(4)] + [0]


class Client:
    """Asks one request after the other, and counts the seconds that loads and prompts take."""

    def __init__(self, memory: IdleMemory[int, str], sizes: dict[str, int]) -> None:
        self.memory, self.sizes = memory, sizes
        self.now = self.seconds = 0.0
        self.keys = 0

    def load(self, adapter: str) -> bool:
        if self.memory.adapters.state(adapter) != "absent":
            return True
        if self.memory.begin_load(adapter, self.sizes[adapter], self.now) is None:
            return False
        self.memory.adapters.loaded(adapter, self.now)
        self.seconds += Seconds().load_s(self.sizes[adapter])
        return True

    def begin(self, asked: Asked) -> int | None:
        self.now += 1.0
        memory, pages = self.memory, self.memory.pages
        if not self.load(asked.adapter):
            return None
        memory.adapters.acquire(asked.adapter, self.now)
        self.keys += 1
        there = pages.begin(self.keys, Root(asked.adapter), tokens(asked.prompt), self.now)
        left = pages.left(self.keys)
        if memory.make_room(pages.lacking(self.keys, left), self.now) is None:
            self.end(self.keys, asked.adapter)
            return None
        pages.grow(self.keys, left)
        pages.advance(self.keys, left, self.now)
        self.seconds += len(asked.prompt) - there / 4
        return self.keys

    def end(self, key: int, adapter: str) -> None:
        self.memory.pages.end(key, self.now)
        self.memory.adapters.release(adapter, self.now)
        self.memory.trim(self.now)

    def answer(self, asked: Asked) -> None:
        key = self.begin(asked)
        assert key is not None
        self.end(key, asked.adapter)


@pytest.mark.parametrize("keep", KEEPS)
def test_whatever_happens_the_books_agree_and_nothing_in_use_goes(keep: Keep) -> None:
    rng = random.Random(1)
    sizes = {name: rng.randrange(1, 6) for name in "abcdef"}
    client = Client(memory_of(24, keep), sizes)
    memory = client.memory
    running: dict[int, str] = {}
    refused = 0
    for _ in range(4000):
        what = rng.random()
        if what < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 5))]
            asked = Asked(rng.choice("abcdef"), tuple(prompt))
            key = client.begin(asked)
            if key is None:
                refused += 1
            else:
                running[key] = asked.adapter
        elif what < 0.9 and running:
            key = rng.choice(list(running))
            client.end(key, running.pop(key))
        elif what < 0.95:
            memory.adapters.want(name := rng.choice("abcdef"))
            before = memory.free
            gone = memory.make_room(rng.randrange(1, 10), client.now, spare_wanted=True)
            assert name not in (gone or ()), "it is wanted"
            assert gone is not None or memory.free == before, "nothing goes if it does not suffice"
            memory.adapters.unwant(name)
        else:
            absent = [name for name in sizes if memory.adapters.state(name) == "absent"]
            if absent and memory.begin_load(absent[0], sizes[absent[0]], client.now) is not None:
                memory.adapters.failed(absent[0])
        memory.check()
        assert all(memory.adapters.state(adapter) == "resident" for adapter in running.values())
    assert refused < 1000


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_evicted_in_vain_and_what_goes_is_worth_least(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randrange(1, 6) for name in "abcd"}
    client = Client(memory_of(30), sizes)
    for _ in range(40):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 4)))
        client.answer(Asked(rng.choice("abcd"), prompt))
    memory, now = client.memory, client.now + 5.0
    there = {name for name in sizes if memory.adapters.state(name) == "resident"}
    prefixes = {prefix.page: prefix for prefix in memory.pages._prefixes.values()}
    worth = {
        page: (use.per_s + 1 / (now - use.last_used + PATIENCE_S)) * use.cost
        for page, use in ((page, memory.prefix_use(prefix, now)) for page, prefix in prefixes.items())
    }
    leaves = {leaf.page for leaf in memory.pages.leaves()}
    needed = rng.randrange(1, 12)
    free = memory.free
    gone = memory.make_room(free + needed, now)
    assert gone is not None
    spare = memory.free - free - needed
    left = {prefix.page for prefix in memory.pages._prefixes.values()}
    heads = [page for page, prefix in prefixes.items() if page not in left and may_stay(prefix, left)]
    assert spare >= 0
    assert spare == 0 or not heads, "a page that could have stayed"
    assert all(sizes[name] > spare for name in gone)
    if not gone and all(prefix.root.adapter in there for prefix in prefixes.values()):
        most = max((worth[page] for page in prefixes if page not in left), default=0.0)
        assert all(worth[page] >= most - 1e-9 for page in leaves & left)


def may_stay(prefix: Prefix[Root[str]], left: set[int]) -> bool:
    return prefix.parent is None or prefix.parent.page in left


def test_a_prefix_goes_first_when_its_adapter_is_out() -> None:
    client = Client(memory_of(9), {"a": 2, "b": 1})
    client.answer(Asked("b", (1, 1)))
    for _ in range(5):
        client.answer(Asked("a", (1, 1)))
    memory = client.memory
    memory.adapters.evict("a", "memory")
    memory.make_room(memory.free + 1, client.now)
    kept = [memory.pages.cached(Root(name), tokens((1, 1))) for name in "ab"]
    assert [len(prefixes) for prefixes in kept] == [1, 2]


def test_one_sort_alone_keeps_nothing_of_the_other() -> None:
    kept: dict[Keep, tuple[int, int]] = {"adapters": (1, 0), "prefixes": (0, 2), "none": (0, 0), "lru": (1, 2)}
    for keep, (adapters, prefixes) in kept.items():
        client = Client(memory_of(9, keep), {"a": 2})
        client.answer(Asked("a", (1, 2)))
        assert len(client.memory.adapters.resident()) == adapters
        assert client.memory.pages.idle == prefixes


Item = tuple[str, tuple[int, ...]]
"""A page by its adapter and the contents up to it, or the adapter itself."""


def offline(asked: Sequence[Asked], sizes: dict[str, int], count: int) -> float:
    """The fewest seconds with which anybody can answer, who knows all requests: every cache content is tried."""

    def size(item: Item) -> int:
        return 1 if item[1] else sizes[item[0]]

    def needs(one: Asked) -> list[Item]:
        return [(one.adapter, ()), *((one.adapter, one.prompt[:end]) for end in range(1, len(one.prompt) + 1))]

    def is_whole(items: frozenset[Item]) -> bool:
        return all(len(prompt) < 2 or (name, prompt[:-1]) in items for name, prompt in items)

    best: dict[frozenset[Item], float] = {frozenset(): 0.0}
    for index, one in enumerate(asked):
        wanted = needs(one)
        later = {item for other in asked[index + 1 :] for item in needs(other)}
        then: dict[frozenset[Item], float] = {}
        for held, seconds in best.items():
            missing = [item for item in wanted if item not in held]
            cost = seconds + sum(1.0 if item[1] else Seconds().load_s(sizes[item[0]]) for item in missing)
            others = sorted((held | set(wanted)) & later - set(wanted))
            during = count - sum(map(size, wanted)) - 1  # the page of the last token
            for keep in range(len(others) + 1):
                for kept in combinations(others, keep):
                    if sum(map(size, kept)) <= during:
                        items = frozenset(kept) | (set(wanted) & later)
                        if is_whole(items):
                            then[items] = min(cost, then.get(items, cost))
        best = then
    return min(best.values())


def drawn(seed: int) -> tuple[list[Asked], dict[str, int]]:
    """Popular and seldom adapters, of which each has a conversation or a prompt that all its requests share."""
    rng = random.Random(seed)
    sizes = {name: rng.randrange(1, 4) for name in "abc"}
    prompts = {name: tuple(rng.randrange(9) for _ in range(rng.randrange(1, 4))) for name in "abc"}
    asked = []
    for _ in range(14):
        name = rng.choices("abc", (4, 2, 1))[0]
        asked.append(Asked(name, prompts[name][: rng.randrange(1, 4)]))
    return asked, sizes


def test_how_near_the_offline_optimum_it_comes() -> None:
    ratios: dict[Keep, list[float]] = {keep: [] for keep in KEEPS}
    for seed in range(40):
        asked, sizes = drawn(seed)
        least = offline(asked, sizes, 7)
        for keep in KEEPS:
            client = Client(memory_of(7, keep), sizes)
            for one in asked:
                client.answer(one)
            assert client.seconds >= least - 1e-9
            ratios[keep].append(client.seconds / least)
    means = {keep: statistics.mean(values) for keep, values in ratios.items()}
    assert means["joint"] == min(means.values())
    assert means["joint"] < 1.2
