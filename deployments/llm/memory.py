"""The executor's arena: pages that answers own or share, prefixes that stay behind them, and adapters (DESIGN §5).

Pages are taken from the front, and adapters lie behind them. Whoever lets answers in has counted the pages that they
may come to need, so that there always is one for the next token once enough is evicted of what is idle: prefixes and
adapters, whichever are worth least (`idle_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.chooser import joined, root_name
from pliant.deployments.llm.report import MemoryReport
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.cluster.prefix_affinity import block, root_block
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.decode_slots import SlotError
from pliant.policies.llm.idle_memory import Costs, IdleMemory, Root
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.prefixes import Place, Prefix
from pliant.policies.llm.shared_memory import Again

if TYPE_CHECKING:
    from pliant.deployments.llm.executor import Slots

_AT_ONCE = 32
"""A part of the pages, one of so many, is freed at a time: to rank what is idle takes longer than to evict it."""

_ASSUMED_TOKENS_PER_S = 1e3
"""Of prompts, before any was computed."""

_REPORTED = 256
"""Prefixes that a report names."""

PrefixRoot = Root[AdapterRef]


@dataclass(frozen=True)
class Measured:
    """What it takes to bring things back, by what was seen of late."""

    prompt_tokens_per_s: Callable[[], float]
    """0 as long as it is not known."""
    adapter_s: Callable[[int], float]

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens / (self.prompt_tokens_per_s() or _ASSUMED_TOKENS_PER_S)

    def load_s(self, bytes: int) -> float:
        return self.adapter_s(bytes)


class Memory:
    """Pages of `executor`, beside the adapters of `cache`; `costs` say what it takes to bring back what was evicted.

    With `share` all tenants share prefixes, else each has its own. Nobody else changes the pages.
    """

    def __init__(self, executor: Slots, cache: AdapterCache[AdapterRef], costs: Costs, share: bool) -> None:
        self.page = executor.page
        self.page_bytes = executor.page_bytes
        self.pages: Pages[Answer, PrefixRoot] = Pages(executor.arena_bytes // executor.page_bytes, executor.page)
        self.now = 0.0
        """Of the iteration that is being made."""
        self.hit = 0
        """Tokens of prompts that were there already."""
        self.missed = 0
        """Those that had to be computed."""
        self._idle = IdleMemory(self.pages, executor.page_bytes, executor.arena_bytes, cache, costs)
        self._share = share
        self._costs = costs

    def root(self, answer: Answer) -> PrefixRoot:
        """Whose prefixes it shares."""
        return Root(answer.adapter, None if self._share else answer.tenant.name)

    def found(self, answer: Answer) -> int:
        """Tokens of it that are there already."""
        return len(self._cached(answer)) * self.page

    def charge(self, answer: Answer, tokens: int) -> int:
        """It is charged for the pages of so many tokens, or for those of its longest text; returns their bytes."""
        answer.pages = self.pages.needed(min(tokens, answer.size))
        return answer.pages * self.page_bytes

    def _cached(self, answer: Answer) -> list[Prefix[PrefixRoot]]:
        return self.pages.cached(self.root(answer), answer.ids.data) if _shares(answer) else []

    # What a scheduler asks, and says:

    @property
    def saved(self) -> int:
        return self.pages.saved * self.page_bytes

    def saves(self, answer: Answer) -> int:
        return sum(map(self.pages.in_use, self._cached(answer))) * self.page_bytes

    def again(self, answer: Answer) -> Again:
        own, computed = self.pages.freed_by(answer), self.pages.computed(answer)
        tokens = min(own * self.page, computed)
        shared = (len(self.pages.table(answer)) - own) * self.page_bytes
        return Again(self._costs.prompt_s(tokens, computed - tokens), shared)

    def begin(self, answer: Answer, now: float) -> None:
        self.hit += self.pages.begin(answer, self.root(answer), answer.known(), now, shares=_shares(answer))

    def end(self, answer: Answer, now: float) -> None:
        self.pages.append(answer, answer.known(self.pages.known(answer)), now)
        self.pages.end(answer, now)

    # What a batch does:

    def catch_up(self, answer: Answer) -> Place[PrefixRoot] | None:
        """It takes over what was computed of its prompt meanwhile; returns what its next page will be found by, None if
        it shares none.
        """
        if not _shares(answer):
            return None
        before = self.pages.computed(answer)
        self.hit += self.pages.catch_up(answer, self.now) - before
        return self.pages.next_page(answer)

    def computed(self, answer: Answer, tokens: int) -> None:
        """The next `tokens` of its prompt are computed."""
        self.missed += tokens
        answer.computed += min(tokens, max(0, answer.prompt - self.pages.computed(answer)))
        self.pages.advance(answer, tokens, self.now)

    def stored(self, answer: Answer, tokens: int) -> None:
        """It has `tokens` in its pages by now. Ignored if it has no pages any more."""
        if answer in self.pages:
            self.pages.append(answer, answer.known(self.pages.known(answer)), self.now)
            self.pages.advance(answer, tokens - self.pages.computed(answer), self.now)

    @property
    def limit(self) -> int:
        """Pages that adapters leave room for."""
        return self._idle.limit

    def make_room(self, pages: int) -> list[AdapterRef]:
        """See to it that so many can be given out, and that adapters have what they were promised; returns the adapters
        that go for it. Raises SlotError if that cannot be: a defect of whoever counts the memory."""
        if self._idle.free >= pages * self.page_bytes:
            return []
        gone = self._idle.make_room(pages + self.limit // _AT_ONCE, self.now, spare_wanted=True)
        if gone is None:
            gone = self._idle.make_room(pages, self.now)
        if gone is None:
            raise SlotError(f"{pages} pages are needed, and {self._idle.free + self._idle.idle} bytes could be had")
        return gone

    def forget(self) -> None:
        """Keep nothing of what nobody uses but adapters."""
        self._idle.forget()
        self.hit = self.missed = 0

    def digest(self) -> str:
        """Names of prefixes that are there, for gateways. For any thread."""
        return joined([_name(prefix) for prefix in self.pages.latest(_REPORTED)])

    def report(self) -> MemoryReport:
        return MemoryReport(
            page=self.page,
            page_bytes=self.page_bytes,
            pages=self.pages.count,
            live=self.pages.used,
            idle=self.pages.idle,
            hit=self.hit,
            missed=self.missed,
            evicted=self._idle.evicted,
        )

    def check(self) -> None:
        """Raise PagesError or CacheError unless all counts agree. Slow: for debugging."""
        self._idle.check()


def _shares(answer: Answer) -> bool:
    """Whether it may begin with what was computed for others. How likely tokens are shows only in computing them."""
    return answer.alternatives is None


def _name(prefix: Prefix[PrefixRoot]) -> bytes:
    """As gateways name it."""
    unnamed = []
    at: Prefix[PrefixRoot] | None = prefix
    while at is not None and not at.name:
        unnamed.append(at)
        at = at.parent
    name = at.name if at else root_block(root_name(*prefix.root))
    for one in reversed(unnamed):
        name = one.name = block(name, one.tokens)
    return name
