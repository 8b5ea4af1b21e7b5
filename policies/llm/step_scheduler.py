"""What each pass of a language model computes, and who has which pages for it (DESIGN §5; Chameleon §4, beyond both).

A pass takes the next token of every answer and, of several prompts, as many tokens as live answers can spare by their
objectives; prompts go as `passes.turn` has it. Memory is charged as it is used. A request is let in when, if all end as
predicted, there will be pages for all at any time; its prediction fails now and then, and then pages are short:

- The oldest request that runs always goes on. For it, and for others where that is cheaper, a younger one makes way:
  of these, the one that is computed again the soonest for each page that it frees. What it had computed stays as a
  prefix as far as memory lets it, and it is first again by its age.
- Others keep what they have and sit the pass out while one is predicted to end sooner than that.

So none is lost, and none starves: nobody passes one that waits for memory, so each comes to be the oldest that waits,
whose adapter stays, and then to run as those before it end. The oldest that runs gets its pages in every pass.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Hashable, Mapping
from functools import reduce
from typing import Generic

from pliant.policies.llm.idle_memory import IdleMemory
from pliant.policies.llm.jobs import A, K, SchedulerError
from pliant.policies.llm.pages import Copy
from pliant.policies.llm.passes import (
    LEAST_SHARE,
    Costs,
    Order,
    Work,
    chunk,
    longest_chunk,
    pass_limit_s,
    peak_pages,
    token,
    turn,
)
from pliant.policies.llm.step_requests import Entry, Prompt, Step


class StepScheduler(Generic[K, A]):
    """Shares `memory` out among requests, of which at most `rows` run at a time; nobody else changes it.

    At most `loads` adapters load at a time. Keys name requests for as long as these wait or run. `now` is in seconds on
    any clock that does not run backwards.
    """

    def __init__(
        self,
        memory: IdleMemory[K, A],
        costs: Costs,
        rows: int,
        order: Order = "shortest",
        loads: int = 2,
    ) -> None:
        if rows < 1 or loads < 1:
            raise ValueError(f"rows and loads must be positive, got {rows} and {loads}")
        self.memory = memory
        """To be read."""
        self.preemptions = 0
        self._pages = memory.pages
        self._costs = costs
        self._rows = rows
        self._order = order
        self._loads = loads
        self._waiting: list[Entry[K, A]] = []
        self._running: dict[K, Entry[K, A]] = {}
        self._loading: set[A] = set()
        self._kept: A | None = None

    @property
    def waiting(self) -> int:
        """Requests that have no pages yet, or none any more."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have pages."""
        return len(self._running)

    def add(self, prompt: Prompt[K, A], now: float) -> None:
        """Queue a request. Raises ValueError if its key is known already, or it never fits into memory."""
        if prompt.key in self._running or any(entry.prompt.key == prompt.key for entry in self._waiting):
            raise ValueError(f"a request {prompt.key!r} waits or runs already")
        memory, pages = self.memory, self._pages.needed(len(prompt.tokens) + prompt.most)
        if pages * memory.page_bytes + prompt.adapter_bytes > memory.total:
            raise ValueError(
                f"request {prompt.key!r} may need {pages} pages of {memory.page_bytes} bytes, and "
                f"{prompt.adapter_bytes} bytes for its adapter, but there are {memory.total}"
            )
        self._queue(Entry(prompt, list(prompt.tokens), prompt.output))
        if prompt.root.adapter is not None:
            self.memory.adapters.asked(prompt.root.adapter)

    def loaded(self, adapter: A, now: float) -> None:
        """A load that was asked for is over."""
        self._loading.remove(adapter)
        self.memory.adapters.loaded(adapter, now)

    def load_failed(self, adapter: A) -> list[K]:
        """A load failed: the requests that wait for it do so no longer, and are returned."""
        self._loading.remove(adapter)
        self.memory.adapters.failed(adapter)
        in_vain = [entry for entry in self._waiting if entry.prompt.root.adapter == adapter]
        for entry in in_vain:
            self._dequeue(entry)
        return [entry.prompt.key for entry in in_vain]

    def cancel(self, key: K, now: float) -> None:
        """A request is given up, whether it waits or runs. Unknown ones are ignored."""
        if key in self._running:
            self._leave(key, now)
        for entry in [entry for entry in self._waiting if entry.prompt.key == key]:
            self._dequeue(entry)

    def ended(self, key: K, now: float) -> None:
        """A running request has its last token. Raises KeyError if it does not run."""
        self._leave(key, now)

    def fork(self, key: K, child: K, now: float) -> None:
        """Another answer to a running request's prompt begins, with all that is computed of that.

        Raises ValueError if as many run as may: such a request can be added, and then shares what is found.
        """
        if len(self._running) >= self._rows:
            raise ValueError(f"{self._rows} requests run already")
        entry = self._running[key]
        self._pages.fork(key, child, now)
        shared = len(self._pages.table(child))
        self._running[child] = Entry(
            entry.prompt._replace(key=child), entry.tokens.copy(), entry.output, entry.first_at, shared
        )
        if entry.prompt.root.adapter is not None:
            self.memory.adapters.acquire(entry.prompt.root.adapter, now)

    def schedule(self, now: float) -> Step[K, A]:
        """The next pass. When nothing runs and nothing loads, somebody that waits gets on."""
        trimmed = self.memory.trim(now)
        step = _Making(self, now)
        step.decode()
        step.prompts()
        return Step(step.preempted, trimmed + step.evicted, step.loads, step.copies, step.rows)

    def finish(self, step: Step[K, A], drawn: Mapping[K, int], now: float) -> None:
        """The rows of `step` are computed, and `drawn` are the next tokens of those that had nothing left to compute.

        A request of `step` that was cancelled or ended meanwhile is left out.
        """
        for key, tokens in step.rows.items():
            entry = self._running.get(key)
            if entry is None:
                continue
            self._pages.advance(key, tokens, now)
            if not self._pages.left(key):
                entry.tokens.append(drawn[key])
                self._pages.append(key, [drawn[key]], now)
                if entry.first_at is None:
                    entry.first_at = now

    def check(self) -> None:
        """Raise SchedulerError, PagesError or CacheError unless all counts agree. Slow: for tests and debugging."""
        self.memory.check()
        for key, entry in self._running.items():
            adapter = entry.prompt.root.adapter
            if self._pages.left(key) < 1 or len(entry.tokens) != self._pages.left(key) + self._pages.computed(key):
                raise SchedulerError(f"request {key!r} has nothing to compute, or other tokens than its pages")
            if adapter is not None and self.memory.adapters.state(adapter) != "resident":
                raise SchedulerError(f"the adapter {adapter!r} of request {key!r} is not there")
        if any(entry.prompt.key in self._pages for entry in self._waiting):
            raise SchedulerError("a request waits and has pages")
        if self._waiting != sorted(self._waiting, key=self._rank) or len(self._running) > self._rows:
            raise SchedulerError(f"requests wait in no order, or too many run: {len(self._running)}")

    def _rank(self, entry: Entry[K, A]) -> float:
        return turn(entry.prompt_s, entry.prompt.arrived, self._order)

    def _queue(self, entry: Entry[K, A]) -> None:
        there = len(self._pages.cached(entry.prompt.root, entry.tokens)) * self._pages.page_tokens
        self._predict(entry, there)
        insort(self._waiting, entry, key=self._rank)
        adapter = entry.prompt.root.adapter
        if adapter is not None:
            self.memory.adapters.want(adapter)

    def _predict(self, entry: Entry[K, A], there: int) -> None:
        entry.prompt_s = self._costs.pass_s(chunk(len(entry.tokens) - there, there, entry.prompt.adapter_bytes))

    def _dequeue(self, entry: Entry[K, A]) -> None:
        self._waiting.remove(entry)
        adapter = entry.prompt.root.adapter
        if adapter is not None:
            self.memory.adapters.unwant(adapter)

    def _leave(self, key: K, now: float) -> Entry[K, A]:
        entry = self._running.pop(key)
        self._pages.end(key, now)
        adapter = entry.prompt.root.adapter
        if adapter is not None:
            self.memory.adapters.release(adapter, now)
        return entry

    def _keep(self, adapter: A | None) -> None:
        """Do not evict `adapter` as long as no other is named."""
        if adapter != self._kept:
            if self._kept is not None:
                self.memory.adapters.unpin(self._kept)
            if adapter is not None:
                self.memory.adapters.pin(adapter)
            self._kept = adapter


class _Making(Generic[K, A]):
    """One step in the making."""

    def __init__(self, scheduler: StepScheduler[K, A], now: float) -> None:
        self.preempted: list[K] = []
        self.evicted: list[A] = []
        self.loads: list[A] = []
        self.copies: list[Copy] = []
        self.rows: dict[K, int] = {}
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._pages = scheduler.memory.pages
        self._running = scheduler._running
        self._costs, self._now, self._work = scheduler._costs, now, Work()
        self._limit_s = self._soonest_s = math.inf
        self._by_age = sorted(self._running.values(), key=_age)
        self._oldest = min(scheduler._waiting, key=_age, default=None)
        scheduler._keep(self._oldest.prompt.root.adapter if self._oldest else None)

    def decode(self) -> None:
        """The next token of every answer, as far as there are pages."""
        if self._by_age:
            self._secure(self._by_age[0])
        answering = [entry for entry in self._by_age if entry.prompt.key in self._running and self._answers(entry)]
        if answering:
            together = reduce(Work.plus, map(self._token, answering))
            self._soonest_s = min(entry.left for entry in answering) * self._costs.pass_s(together)
        lacking = sum(self._pages.lacking(entry.prompt.key, 1) for entry in answering)
        self.evicted += self._memory.make_room(lacking, self._now) or []
        for entry in answering:
            if entry.prompt.key in self._running and self._has_room(entry, 1, by_preemption=True):
                self._take(entry, 1, self._token(entry))
        limit_s = pass_limit_s((self._running[key].due for key in self.rows), self._now)
        self._limit_s = max(limit_s, (1 + LEAST_SHARE) * self._costs.pass_s(self._work))

    def prompts(self) -> None:
        """Chunks of prompts within the limit, those that run and those that wait in one order."""
        scheduler = self._scheduler
        running = [entry for entry in self._by_age if entry.prompt.key in self._running and not self._answers(entry)]
        for entry in running:
            scheduler._predict(entry, self._pages.catch_up(entry.prompt.key, self._now))
        waiting = [] if self.preempted else scheduler._waiting
        begun: set[Hashable] = set()
        blocked = False
        for entry in sorted([*running, *waiting], key=scheduler._rank):
            if self.rows and self._costs.pass_s(self._work.plus(chunk(1, 0, 0))) > self._limit_s:
                break
            if entry.prompt.key not in self._running and (blocked or not self._admits(entry)):
                blocked = blocked or not self._loads(entry)
                continue
            place = self._pages.next_page(entry.prompt.key)
            if place is None or place not in begun:
                self._compute(entry)
                begun.update([place] if entry.prompt.key in self.rows else [])
        if self._oldest and not (self._running or scheduler._loading or self.preempted) and self._admits(self._oldest):
            self._compute(self._oldest)

    def _answers(self, entry: Entry[K, A]) -> bool:
        """Whether the next token is one of its answer."""
        return entry.answered > 0 and self._pages.left(entry.prompt.key) == 1

    def _token(self, entry: Entry[K, A]) -> Work:
        return token(self._pages.computed(entry.prompt.key), entry.prompt.adapter_bytes)

    def _take(self, entry: Entry[K, A], tokens: int, work: Work) -> None:
        """It computes `tokens`, for which there is room."""
        self.copies += self._pages.grow(entry.prompt.key, tokens)
        self.rows[entry.prompt.key] = tokens
        self._work = self._work.plus(work)

    def _compute(self, entry: Entry[K, A]) -> None:
        """A chunk of its prompt, as long as may be; whole pages, so that others can catch up, or all."""
        key, size = entry.prompt.key, self._pages.page_tokens
        before, left, bytes = self._pages.computed(key), self._pages.left(key), entry.prompt.adapter_bytes
        tokens = longest_chunk(self._costs, self._work, left, before, bytes, self._limit_s)
        if not self.rows:
            tokens = max(tokens, min(left, size))
        if tokens < left:
            tokens -= (before + tokens) % size if tokens > (before + tokens) % size else 0
        while tokens and not self._has_room(entry, tokens):
            tokens //= 2
        if tokens:
            self._take(entry, tokens, chunk(tokens, before, bytes))

    def _has_room(self, entry: Entry[K, A], tokens: int, by_preemption: bool = False) -> bool:
        """Whether there are pages for its next `tokens`, now that something was evicted or somebody made way."""
        while True:
            gone = self._memory.make_room(self._pages.lacking(entry.prompt.key, tokens), self._now)
            if gone is not None:
                self.evicted += gone
                return True
            victim = self._victim(entry) if by_preemption else None
            if victim is None:
                return False
            if entry is not self._by_age[0] and self._soonest_s < self._again_s(victim):
                return False
            self._preempt(victim)

    def _secure(self, oldest: Entry[K, A]) -> None:
        """The oldest that runs has pages to go on, whoever must make way, or the adapter of one that waits."""
        tokens = min(self._pages.left(oldest.prompt.key), self._pages.page_tokens)
        if not self._has_room(oldest, tokens, by_preemption=True):
            self._scheduler._keep(None)
            if not self._has_room(oldest, tokens):
                return  # adapters that are loading have the rest, and can be evicted later
        self.copies += self._pages.grow(oldest.prompt.key, tokens)

    def _victim(self, entry: Entry[K, A]) -> Entry[K, A] | None:
        """Who makes way: of the younger ones not in this step, that whose pages are filled again the soonest."""
        younger = [
            other
            for other in self._by_age[self._by_age.index(entry) + 1 :]
            if other.prompt.key in self._running and other.prompt.key not in self.rows
        ]
        freed = {other: self._pages.freed_by(other.prompt.key) for other in younger}
        if not any(freed.values()) and entry is self._by_age[0]:  # they share what they have, or hold adapters
            return younger[-1] if younger else None
        some = (other for other in younger if freed[other])
        return min(some, key=lambda other: self._again_s(other) / freed[other], default=None)

    def _again_s(self, entry: Entry[K, A]) -> float:
        """To compute again what it alone has."""
        key = entry.prompt.key
        tokens = min(self._pages.freed_by(key) * self._pages.page_tokens, self._pages.computed(key))
        return self._costs.prompt_s(tokens, self._pages.computed(key) - tokens)

    def _preempt(self, entry: Entry[K, A]) -> None:
        key = entry.prompt.key
        self._scheduler._leave(key, self._now)
        self._scheduler._queue(entry)
        self._scheduler.preemptions += 1
        self.preempted.append(key)

    def _admits(self, entry: Entry[K, A]) -> bool:
        """Whether a request that waits begins now, with its adapter there and pages for all to come."""
        scheduler, key, adapter = self._scheduler, entry.prompt.key, entry.prompt.root.adapter
        if len(self._running) >= scheduler._rows:
            return False
        if adapter is not None and self._memory.adapters.state(adapter) != "resident":
            self._load(entry, adapter)
            return False
        if self._running and not self._fits(entry):
            return False
        scheduler._dequeue(entry)
        self._running[key] = entry
        self._by_age.append(entry)
        self._pages.begin(key, entry.prompt.root, entry.tokens, self._now)
        entry.shared = len(self._pages.table(key))
        if adapter is not None:
            self._memory.adapters.acquire(adapter, self._now)
        return True

    def _loads(self, entry: Entry[K, A]) -> bool:
        """Whether all that it waits for is a load, so that others may pass it."""
        adapter = entry.prompt.root.adapter
        return adapter is not None and self._memory.adapters.state(adapter) == "loading"

    def _load(self, entry: Entry[K, A], adapter: A) -> None:
        """Have its adapter loaded, if there is room for it, and not too many loads are under way."""
        scheduler = self._scheduler
        if len(scheduler._loading) >= scheduler._loads or self._memory.adapters.state(adapter) == "loading":
            return
        gone = self._memory.begin_load(adapter, entry.prompt.adapter_bytes, self._now, entry is not self._oldest)
        if gone is not None:
            self.evicted += gone
            self.loads.append(adapter)
            scheduler._loading.add(adapter)

    def _fits(self, entry: Entry[K, A]) -> bool:
        """Whether there will be pages for it and for all that run, if they end as predicted."""
        pages, memory = self._pages, self._memory
        rows = []
        bytes = memory.total - memory.free - memory.idle
        adapter = entry.prompt.root.adapter
        if adapter is not None and adapter in memory.adapters.evictable():
            bytes += entry.prompt.adapter_bytes
        fixed = -(-bytes // memory.page_bytes)
        for other in self._running.values():
            own = len(pages.table(other.prompt.key)) - other.shared
            fixed -= own
            rows.append((max(own, pages.needed(len(other.tokens)) - other.shared), other.left))
        shared = sum(pages.in_use(prefix) for prefix in pages.cached(entry.prompt.root, entry.tokens))
        rows.append((pages.needed(len(entry.tokens)) - shared, entry.left))
        return peak_pages(fixed, rows, pages.page_tokens) <= memory.total // memory.page_bytes


def _age(entry: Entry[K, A]) -> float:
    return entry.prompt.arrived
