"""What each iteration of a language model's replica computes, and who has which pages for it (DESIGN §5; Chameleon §4).

An iteration is one pass: the next token of every answer and, of prompts, a budget of tokens. Who is let in, and which
adapters come and go, `request_scheduler` says, in bytes; this is what it counts:

- A request is charged for the pages that it needs if its answer gets as long as predicted, less what it shares. One
  that gets longer is charged for a quarter more. Where memory is short for that, one that came later makes way, or it
  sits out until another ends, whichever costs less (`RequestState.extend`); nobody is let in meanwhile. What was
  computed of who made way stays as a prefix as far as memory lets it.
- Prompts share the budget in the order of `passes.turn`. Of those that begin alike, one computes what they share.
- Pages are taken as texts grow; for them goes what is idle and worth least, prefixes or adapters (`idle_memory`).

The live engine and the simulation (`simulation/llm/one_pass.py`) carry out the same plans of this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

from pliant.policies.llm.idle_memory import Costs, IdleMemory, Root
from pliant.policies.llm.jobs import A, Job, K, SchedulerError
from pliant.policies.llm.passes import Order, turn
from pliant.policies.llm.prefill_chunks import chunks
from pliant.policies.llm.prefixes import Place, Prefix
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.policies.llm.shared_memory import Again
from pliant.policies.llm.step_requests import Plan, Prompt, Row

_AT_ONCE = 32
"""A part of the pages, one of so many, is freed at a time: to rank what is idle takes longer than to evict it."""


@dataclass(eq=False)
class _Entry(Generic[K, A]):
    """A request that waits or runs."""

    prompt: Prompt[K, A]
    pages: int
    """That it is charged for."""
    known: int
    """Tokens of its text when it was queued last."""


class StepScheduler(Generic[K, A]):
    """Makes the plans of a replica, whose pages `memory` has; `admission` counts that memory. Nobody else changes these
    but for loads of adapters, which `admission` is told of.

    `costs` predict what it takes to compute prompts. Keys name requests for as long as these wait or run. `now` is in
    seconds on any clock that does not run backwards.
    """

    def __init__(
        self, memory: IdleMemory[K, A], admission: Scheduler[K, A], costs: Costs, order: Order = "shortest"
    ) -> None:
        self.memory = memory
        """To be read."""
        self.admission = admission
        self.hit = self.missed = 0
        """Tokens of prompts that were there already, and those that were computed."""
        self._pages = memory.pages
        self._costs = costs
        self._order: Order = order
        self._entries: dict[K, _Entry[K, A]] = {}
        self._partial: dict[K, _Entry[K, A]] = {}
        """Those that run, and whose prompts are not computed."""
        admission.share(self)

    def job(self, prompt: Prompt[K, A]) -> Job[K, A]:
        """What `prompt` is to `admission`, for `add`."""
        tokens = prompt.text.queued()
        found = len(self._cached(prompt)) * self._pages.page_tokens
        return Job(
            key=prompt.key,
            prompt=len(tokens) - found,
            output=prompt.output,
            charge=self._needed(prompt, len(tokens) + prompt.output) * self.memory.page_bytes,
            adapter=prompt.root.adapter,
            adapter_bytes=prompt.adapter_bytes,
            arrived=prompt.arrived,
        )

    def add(self, prompt: Prompt[K, A], job: Job[K, A], now: float) -> None:
        """Queue a request, whose job this is. Raises ValueError if its key is known already, or it never fits."""
        self.admission.add(job, now)
        self._entries[prompt.key] = _Entry(prompt, job.charge // self.memory.page_bytes, len(prompt.text.queued()))

    def cancel(self, key: K, now: float) -> None:
        """A request is given up, whether it waits or runs. Unknown ones are ignored."""
        self.admission.cancel(key, now)
        self._entries.pop(key, None)

    def ended(self, key: K, now: float) -> None:
        """A running request has its last token, and nothing under way computes anything for it. Raises KeyError if it
        does not run."""
        self.admission.ended(key, now)
        del self._entries[key]

    @property
    def prompt_tokens(self) -> int:
        """Of requests that run: those still to be computed before their first tokens."""
        return sum(map(self._pages.left, self._partial))

    def schedule(
        self, now: float, rows: int, budget: int, full: Sequence[Row[K]], step_s: float, first: Collection[K] = ()
    ) -> Plan[K, A]:
        """The next iteration, in which at most `rows` requests may begin, and `budget` tokens of prompts are computed.

        `full` are the answers whose next tokens take another page, and `step_s` is what an iteration takes without
        prompts. Of those that wait, `first` are let in before others. Raises SchedulerError if memory was given out
        that is not there.
        """
        plan: Plan[K, A] = Plan([], self.memory.trim(now), [], [], [], [], [])
        for row in full:
            self._stored(row, now)
        self._extend(plan, full, now, step_s)
        left = map(self._pages.left, self._partial)
        whole = sum(tokens for tokens in left if tokens <= budget)
        decisions = self.admission.schedule(now, 0 if plan.sit_out or plan.put_back else rows, budget - whole, first)
        self._put_back(plan, decisions.squash)
        plan.evict.extend(decisions.evict)
        plan.load.extend(decisions.load)
        plan.admit.extend(job.key for job in decisions.admit)
        plan.chunks.extend(self._chunks(budget, now))
        growing = [row.key for row in full if row.key not in plan.put_back and row.key not in plan.sit_out]
        self._take(plan, growing, now)
        return plan

    def computed(self, plan: Plan[K, A], now: float) -> None:
        """The chunks of `plan` are under way: what later iterations compute may read what these do."""
        for key, tokens in plan.chunks:
            self.missed += tokens
            self._pages.advance(key, tokens, now)
            if not self._pages.left(key):
                del self._partial[key]

    def halt(self, row: Row[K], now: float) -> None:
        """Nothing more is computed of a request, which may keep its memory for what is under way. Ignored if it does
        not run."""
        if row.key in self._pages:
            self._stored(row, now)
            self._partial.pop(row.key, None)

    def forget(self) -> None:
        """Keep nothing of what nobody uses but adapters."""
        self.memory.forget()
        self.hit = self.missed = 0

    def check(self) -> None:
        """Raise SchedulerError, PagesError or CacheError unless all counts agree. Slow: for tests and debugging."""
        self.admission.check()
        self.memory.check()
        for key, entry in self._entries.items():
            if key in self._pages and len(self._pages.table(key)) > entry.pages:
                raise SchedulerError(f"request {key!r} has more pages than the {entry.pages} it is charged for")
        if any(key not in self._pages or not self._pages.left(key) for key in self._partial):
            raise SchedulerError("a prompt is computed, or has no pages, and is said to be computed in parts")

    # What `admission` asks, and says:

    @property
    def saved(self) -> int:
        return self._pages.saved * self.memory.page_bytes

    def saves(self, key: K) -> int:
        in_use = map(self._pages.in_use, self._cached(self._entries[key].prompt))
        return sum(in_use) * self.memory.page_bytes

    def again(self, key: K) -> Again:
        pages, prompt = self._pages, self._entries[key].prompt
        own, computed = pages.freed_by(key), pages.computed(key)
        tokens = min(own * pages.page_tokens, computed)
        shared = (len(pages.table(key)) - own) * self.memory.page_bytes
        return Again(self._costs.prompt_s(tokens, computed - tokens) * prompt.work, shared)

    def begin(self, key: K, now: float) -> None:
        entry = self._entries[key]
        prompt = entry.prompt
        self.hit += self._pages.begin(key, prompt.root, prompt.text.known(), now, prompt.shares)
        self._partial[key] = entry

    def end(self, key: K, now: float) -> None:
        entry = self._entries[key]
        self._pages.append(key, entry.prompt.text.known(self._pages.known(key)), now)
        entry.known = self._pages.known(key)
        self._pages.end(key, now)
        self._partial.pop(key, None)

    # How a plan is made:

    def _cached(self, prompt: Prompt[K, A]) -> list[Prefix[Root[A]]]:
        return self._pages.cached(prompt.root, prompt.text.queued()) if prompt.shares else []

    def _needed(self, prompt: Prompt[K, A], tokens: int) -> int:
        """Pages for so many tokens, or for those of its longest text."""
        return self._pages.needed(min(tokens, prompt.size))

    def _stored(self, row: Row[K], now: float) -> None:
        """So much of an answer is known and stored by now, and others may find it."""
        text = self._entries[row.key].prompt.text
        self._pages.append(row.key, text.known(self._pages.known(row.key)), now)
        self._pages.advance(row.key, max(0, row.stored - self._pages.computed(row.key)), now)

    def _extend(self, plan: Plan[K, A], full: Sequence[Row[K]], now: float, step_s: float) -> None:
        """Answers that are longer than they were predicted to get are charged for more, oldest first."""
        for row in sorted(full, key=lambda row: self._entries[row.key].prompt.arrived):
            entry = self._entries[row.key]
            if row.key in plan.put_back or self._pages.needed(row.stored + 1) <= entry.pages:
                continue
            if plan.sit_out:
                plan.sit_out.append(row.key)
                continue
            own = row.stored - entry.prompt.length
            pages = self._needed(entry.prompt, row.stored + 1 + max(self._pages.page_tokens, own // 4))
            extension = self.admission.extend(row.key, pages * self.memory.page_bytes, now, step_s)
            plan.evict.extend(extension.evict)
            self._put_back(plan, extension.squash)
            if extension.waits:
                plan.sit_out.append(row.key)
            elif row.key not in extension.squash:
                entry.pages = pages

    def _put_back(self, plan: Plan[K, A], keys: Sequence[K]) -> None:
        """They wait again; each is guessed to get twice as long an answer as it has."""
        for key in keys:
            entry = self._entries[key]
            answered = max(1, entry.known - entry.prompt.length)
            entry.pages = self._needed(entry.prompt, entry.known + answered)
            self.admission.recharge(key, entry.pages * self.memory.page_bytes)
        plan.put_back.extend(keys)
        plan.sit_out[:] = [key for key in plan.sit_out if key not in keys]

    def _chunks(self, budget: int, now: float) -> list[tuple[K, int]]:
        """Whose prompts get how many tokens computed."""
        places = {key: self._catch_up(entry, now) for key, entry in self._partial.items()}
        begun: set[Place[Root[A]]] = set()
        order = []
        for key in sorted(self._partial, key=self._turn):
            place = places[key]
            if place is None or place not in begun:
                order.append(key)
            if place is not None:
                begun.add(place)
        return list(zip(order, chunks(map(self._pages.left, order), budget), strict=False))

    def _catch_up(self, entry: _Entry[K, A], now: float) -> Place[Root[A]] | None:
        """It takes over what was computed of its prompt meanwhile; returns what its next page will be found by, None if
        it shares none."""
        key = entry.prompt.key
        if not entry.prompt.shares:
            return None
        before = self._pages.computed(key)
        self.hit += self._pages.catch_up(key, now) - before
        return self._pages.next_page(key)

    def _turn(self, key: K) -> float:
        """By which its prompt goes."""
        prompt = self._partial[key].prompt
        seconds = self._costs.prompt_s(self._pages.left(key), self._pages.computed(key)) * prompt.work
        return turn(seconds, prompt.arrived, self._order)

    def _take(self, plan: Plan[K, A], growing: Sequence[K], now: float) -> None:
        """Pages for the chunks and for answers that grow, now that something was evicted and others were moved."""
        pages, memory = self._pages, self.memory
        lacking = sum(pages.lacking(key, tokens) for key, tokens in plan.chunks) + len(growing)
        plan.evict.extend(self._make_room(lacking, now))
        if memory.limit != pages.limit:
            plan.moves.extend(pages.resize(memory.limit))
        for key, tokens in plan.chunks:
            pages.grow(key, tokens)
        for key in growing:
            pages.grow(key, 1)

    def _make_room(self, pages: int, now: float) -> list[A]:
        """See to it that so many can be given out, and that adapters have what they were promised."""
        memory = self.memory
        if memory.free >= pages * memory.page_bytes:
            return []
        gone = memory.make_room(pages + memory.limit // _AT_ONCE, now, spare_wanted=True)
        if gone is None:
            gone = memory.make_room(pages, now)
        if gone is None:
            raise SchedulerError(f"{pages} pages are needed, and {memory.free + memory.idle} bytes could be had")
        return gone
