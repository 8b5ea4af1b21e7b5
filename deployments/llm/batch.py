"""The answers that have an executor's slots, and the iterations that compute them (Flover's inference map, §V-C)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.llm.adapters import key
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.executor import Slots
from pliant.deployments.llm.guide import MaskThread
from pliant.deployments.llm.memory import Memory, PrefixRoot
from pliant.kernels.decoder.decode_step import Launched, Prefill, RowMasks, Step
from pliant.policies.llm.decode_slots import SlotError, SlotMap
from pliant.policies.llm.passes import Due
from pliant.policies.llm.prefixes import Place


class Served(NamedTuple):
    """Whom an iteration serves."""

    prompts: list[Answer | None]
    """Whose prompts, or parts of them."""
    firsts: list[Answer | None]
    """Of these, whose first tokens."""
    rows: list[Answer | None]
    """By row of the window: whose next token; None for rows that mean nothing."""
    computed: list[Answer]
    """Of all of them, those that need no further iteration."""
    scored: list[Answer | None]
    """Of the prompts, those whose log probabilities are wanted; None for all others."""

    def has(self, answer: Answer) -> bool:
        return answer in self.rows or answer in self.prompts


class Iteration(NamedTuple):
    """An iteration under way."""

    launched: Launched
    at: float
    """When it was launched, in seconds."""
    prompt_tokens: int
    served: Served
    leaving: list[Answer]
    """Those who give back their memory when it is over."""


class InFlight(deque[Iteration]):
    """The iterations that are under way, oldest first."""

    def last_for(self, answer: Answer) -> Iteration | None:
        """The last that computes anything for `answer`."""
        return next((iteration for iteration in reversed(self) if iteration.served.has(answer)), None)

    def drop(self, answers: Collection[Answer]) -> None:
        """What is computed for these means nothing any more."""
        for served in (iteration.served for iteration in self):
            for computed in (served.firsts, served.rows, served.scored):
                computed[:] = [None if answer in answers else answer for answer in computed]

    def tokens(self) -> list[Answer]:
        """For each token that is being computed, whose it will be."""
        served = (iteration.served for iteration in self)
        return [answer for one in served for answer in (*one.firsts, *one.rows) if answer]


class Batch:
    """Answers by slot of `executor`. What it tells is true once all iterations that were launched are through.

    Answers, which have begun in `memory`, take pages there as their texts grow; whoever makes an iteration sees to it
    that there are as many as are `lacking`. `compact`=False leaves the gaps between answers open. With `tpot_s` there
    is an objective for the time between two tokens.
    """

    def __init__(self, executor: Slots, memory: Memory, compact: bool, tpot_s: float | None = None) -> None:
        slots = executor.slots
        self._executor = executor
        self._memory = memory
        self._tpot_s = tpot_s
        self._slots: SlotMap[Answer] = SlotMap(slots, compact)
        self._lengths = np.zeros(slots, np.int32)
        """By slot: tokens stored; 0 for holes, as in all of these."""
        self._counts = np.zeros(slots, np.int64)
        """By slot: tokens of the answer."""
        self._most = np.zeros(slots, np.int64)
        """By slot: the most tokens that the answer may have."""
        self._decoding = np.zeros(slots, np.bool_)
        """By slot: whether the prompt is stored whole."""
        self._guided: set[Answer] = set()
        self._masks = MaskThread()
        self._held = np.zeros(slots, np.int32)
        """By slot: pages."""
        self._charged = np.zeros(slots, np.int32)
        """By slot: pages that there will be for it."""
        self._since = np.zeros(slots)
        """By slot: when its first token is taken to have come, by the first one here and the objective's pace."""
        self._tables = np.zeros((slots, -(-executor.max_length // executor.page)), np.int32)
        """By slot: its pages, in the order of its text; 0 behind them."""
        self._pages = memory.pages
        self.partial: dict[Answer, float] = {}
        """Those whose prompts are not stored whole -> when they came."""
        executor.keep_pages(self._pages.limit)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._slots

    @property
    def decoding(self) -> bool:
        """Whether any answer waits for its next token."""
        return bool(self._decoding.any())

    @property
    def due(self) -> Due | None:
        """When the first of the answers is to have its next token; None without an objective for that."""
        if self._tpot_s is None or not self.decoding:
            return None
        return Due(float((self._since + self._counts * self._tpot_s)[self._decoding].min()), self._tpot_s)

    def prompt_left(self, answer: Answer) -> int:
        """Tokens of a partial prompt that are not stored."""
        return len(answer.ids) - int(self._lengths[self._slots.slot(answer)])

    @property
    def guided(self) -> bool:
        """Whether what may come next in any answer depends on what came."""
        return bool(self._guided)

    def tokens_left(self) -> list[int]:
        """For each answer, the tokens that it may still get; one less may be if an iteration is under way."""
        return [answer.most - answer.count for answer in self._slots.window() if answer]

    def place(self, answer: Answer, arrived: float) -> None:
        """Give `answer`, of which nothing is stored but what it found, a slot. Raises SlotsFullError."""
        slot = self._slots.append(answer)
        self._counts[slot] = answer.count
        self._most[slot] = answer.most
        if answer.guide:
            self._guided.add(answer)
        self.partial[answer] = arrived
        self._charged[slot] = answer.pages
        self._show(slot, answer)
        self._lengths[slot] = self._pages.computed(answer)
        prompt, answered = np.split(answer.ids, [answer.prompt])
        self._executor.admit(slot, answer.sampling, answer.adapter and key(answer.adapter), prompt, answered)

    def catch_up(self, answer: Answer) -> Place[PrefixRoot] | None:
        """A partial prompt takes over what was computed for others; returns what its next page will be found by."""
        place = self._memory.catch_up(answer)
        slot = self._slots.slot(answer)
        self._show(slot, answer)
        self._lengths[slot] = self._pages.computed(answer)
        return place

    def outgrown(self) -> list[tuple[Answer, int]]:
        """Those whose next token takes a page that they are not charged for, and the tokens that each has stored."""
        slots = self._full()
        slots = slots[self._held[slots] >= self._charged[slots]]
        answers = [(self._slots.request(slot), int(self._lengths[slot])) for slot in slots.tolist()]
        return [(answer, stored) for answer, stored in answers if answer]

    def charged(self, answer: Answer) -> None:
        """It is charged for other pages than before."""
        self._charged[self._slots.slot(answer)] = answer.pages

    def lacking(self, granted: Iterable[tuple[Answer, int]]) -> int:
        """Pages that an iteration takes, beside those that answers have: for these chunks and for the next tokens."""
        chunks = sum(self._pages.lacking(answer, tokens) for answer, tokens in granted)
        return chunks + len(self._full())

    def resize(self, pages: int) -> None:
        """Use only the first `pages` from now on, no fewer than hold anything."""
        if pages == self._pages.limit:
            return
        if moves := self._pages.resize(pages):
            self._executor.move_pages(moves)
            targets = np.arange(self._pages.count + 1, dtype=np.int32)
            targets[[source for source, _ in moves]] = [target for _, target in moves]
            self._tables = targets[self._tables]
        self._executor.keep_pages(pages)

    def compact(self) -> None:
        """Close the gaps. What moves are tables."""
        moves = self._slots.compact(lambda answer: int(self._lengths[self._slots.slot(answer)]))
        if not moves:
            return
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        for values in self._by_slot:
            values[targets] = values[sources]
            values[sources] = 0
        self._executor.move(list(zip(sources, targets, strict=True)))

    @property
    def _by_slot(self) -> tuple[NDArray[Any], ...]:
        return (
            self._lengths,
            self._counts,
            self._most,
            self._decoding,
            self._held,
            self._charged,
            self._since,
            self._tables,
        )

    def _full(self) -> NDArray[np.intp]:
        """The slots whose next token takes another page."""
        return np.flatnonzero(self._decoding & (self._lengths >= self._held * self._executor.page))

    def _show(self, slot: int, answer: Answer) -> None:
        """Have the executor read the pages that an answer has now."""
        table = self._pages.table(answer)
        self._held[slot] = len(table)
        self._tables[slot, : len(table)] = table

    def prefill(self, answer: Answer, tokens: int) -> Prefill:
        """The next `tokens` of a prompt, as a chunk that the next step computes."""
        slot = self._slots.slot(answer)
        start = int(self._lengths[slot])
        self._pages.grow(answer, tokens)
        self._show(slot, answer)
        self._lengths[slot] = end = start + tokens
        last = end == len(answer.ids)
        if last:
            del self.partial[answer]
        pages = self._tables[slot, : self._held[slot]].copy()
        targets = answer.targets(start, end)
        return Prefill(slot, start, answer.ids[start:end], last, pages, targets, answer.alternatives or 0)

    def step(self, prefills: Sequence[Prefill]) -> Step:
        """The next iteration: these chunks, then a token for each answer whose prompt was whole before."""
        decoding = np.flatnonzero(self._decoding)
        window = slice(int(decoding[0]), int(decoding[-1]) + 1) if len(decoding) else slice(0, 0)
        ended = [prefill.slot for prefill in prefills if prefill.last]
        for slot in self._full().tolist():
            answer = self._slots.request(slot)
            assert answer is not None
            self._memory.stored(answer, int(self._lengths[slot]))
            self._pages.grow(answer, 1)
            self._show(slot, answer)
        live, width = self._decoding[window], int(self._held[window].max(initial=0))
        return Step(
            prefills=tuple(prefills),
            offset=window.start,
            lengths=self._lengths[window] * live,
            tables=self._tables[window, :width] * live[:, None],
            indices=self._counts[window].copy(),
            prefill_indices=self._counts[ended],
            masks=self._begin_masks((slot - window.start, slot) for slot in decoding.tolist()),
            prefill_masks=self._begin_masks(enumerate(ended)),
        )

    def _begin_masks(self, slots: Iterable[tuple[int, int]]) -> Callable[[], RowMasks] | None:
        """Of rows and their slots."""
        if not self._guided:
            return None
        answers = ((row, self._slots.request(slot)) for row, slot in slots)
        return self._masks.start([(row, answer.guide) for row, answer in answers if answer and answer.guide])

    def launched(self, step: Step) -> Served:
        """`step` is under way: count its tokens, and free the slots of answers that need no more."""
        window = slice(step.offset, step.offset + len(step.lengths))
        decoding = self._decoding[window]
        rows = [
            self._slots.request(slot) if decodes else None
            for slot, decodes in enumerate(decoding.tolist(), step.offset)
        ]
        self._lengths[window] += decoding
        self._counts[window] += decoding
        ended = [prefill.slot for prefill in step.prefills if prefill.last]
        prompts = [self._slots.request(prefill.slot) for prefill in step.prefills]
        for answer, prefill in zip(prompts, step.prefills, strict=True):
            if answer is not None:
                self._memory.computed(answer, len(prefill.ids))
                self._show(prefill.slot, answer)
        firsts = [answer for answer, prefill in zip(prompts, step.prefills, strict=True) if prefill.last]
        self._counts[ended] += 1
        self._since[ended] = self._memory.now - (self._counts[ended] - 1) * (self._tpot_s or 0.0)
        self._decoding[ended] = True
        full = np.flatnonzero(self._decoding & (self._counts == self._most)).tolist()
        computed = [answer for slot in full if (answer := self._slots.request(slot))]
        for answer in computed:
            self.evict(answer)
        scored = [
            answer if len(prefill.targets) else None for answer, prefill in zip(prompts, step.prefills, strict=True)
        ]
        return Served(prompts, firsts, rows, computed, scored)

    def evict(self, answer: Answer) -> None:
        """Free the slot of `answer`, if it has one."""
        if answer not in self._slots:
            return
        self._memory.stored(answer, int(self._lengths[self._slots.slot(answer)]))
        self._free(answer)

    def clear(self) -> None:
        """Free all slots, and ask nobody."""
        for answer in self._slots.window():
            if answer:
                self._free(answer)

    def _free(self, answer: Answer) -> None:
        slot = self._slots.evict(answer)
        self._guided.discard(answer)
        for values in self._by_slot:
            values[slot] = 0
        self.partial.pop(answer, None)

    def check(self, flying: Sequence[Answer]) -> None:
        """Raise SlotError unless all numbers agree; `flying` has an answer for each of its tokens not yet read."""
        self._slots.check()
        for slot in range(len(self._lengths)):
            answer = self._slots.request(slot)
            length, count, most = int(self._lengths[slot]), int(self._counts[slot]), int(self._most[slot])
            decoding = bool(self._decoding[slot])
            if answer is None:
                right = not (length or count or most or decoding)
            elif decoding:
                right = count < most == answer.most and length == answer.size - most + count - 1 and not answer.ended
            else:
                right = answer in self.partial and 0 <= length < len(answer.ids) and not answer.ended
            if answer is not None and answer.count + sum(other is answer for other in flying) != count:
                right = False
            if not right:
                raise SlotError(
                    f"slot {slot} has {answer and answer.id}: {length} tokens stored, {count} of {most} of the answer, "
                    f"decoding {decoding}"
                )
            if answer is not None:
                self._check_pages(answer, slot)

    def _check_pages(self, answer: Answer, slot: int) -> None:
        table, length = list(self._pages.table(answer)), int(self._lengths[slot])
        shown = self._tables[slot, : self._held[slot]].tolist()
        if shown != table or self._tables[slot, len(table) :].any() or len(table) * self._executor.page < length:
            raise SlotError(f"slot {slot} has the pages {shown} for {length} tokens, and {answer.id} has {table}")
        if not len(table) <= self._charged[slot] == answer.pages:
            raise SlotError(f"slot {slot} has {len(table)} pages, and {answer.id} is charged for {answer.pages}")
        if self._pages.computed(answer) > length or (answer in self.partial and self._pages.computed(answer) != length):
            raise SlotError(f"slot {slot} has {length} tokens, and {self._pages.computed(answer)} in pages")
