"""The answers that have an executor's slots, and the iterations that compute them (Flover's inference map, §V-C)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.llm.adapters import key
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.executor import Slots
from pliant.deployments.llm.guide import GuideError, MaskThread
from pliant.deployments.llm.memory import AnswerSteps, PrefixRoot
from pliant.deployments.llm.request import Piece
from pliant.formats.adapter_info import AdapterRef
from pliant.kernels.decoder.decode_step import Launched, Prefill, RowMasks, Step
from pliant.policies.llm.decode_slots import SlotError, SlotMap
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.passes import Due
from pliant.policies.llm.step_requests import Plan, Row


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

    def read(self) -> Iterator[tuple[Answer, Piece | GuideError]]:
        """Wait for it; then what is new of each answer that has not ended, or why it cannot go on."""
        output, served = self.launched.result(), self.served
        for scored, targets in zip(served.scored, output.targets or (), strict=False):
            if scored is not None:
                scored.score(targets)
        firsts = zip(served.firsts, output.first.tolist(), output.first_logprobs or repeat(None), strict=False)
        rows = zip(served.rows, output.tokens.tolist(), output.logprobs or repeat(None), strict=False)
        for answer, token, logprobs in chain(firsts, rows):
            if answer is not None and not answer.ended:
                try:
                    yield answer, answer.read(token, logprobs)
                except GuideError as error:
                    yield answer, error


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

    Answers have their pages by `steps`, whose plans this carries out. `compact`=False leaves the gaps between answers
    open. With `tpot_s` there is an objective for the time between two tokens.
    """

    def __init__(self, executor: Slots, steps: AnswerSteps, compact: bool, tpot_s: float | None = None) -> None:
        slots = executor.slots
        self._executor = executor
        self._steps = steps
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
        self._going = np.zeros(slots, np.bool_)
        """By slot: whether the next iteration computes the next token."""
        self._guided: set[Answer] = set()
        self._masks = MaskThread()
        self._held = np.zeros(slots, np.int32)
        """By slot: pages."""
        self._since = np.zeros(slots)
        """By slot: when its first token is taken to have come, by the first one here and the objective's pace."""
        self._tables = np.zeros((slots, -(-executor.max_length // executor.page)), np.int32)
        """By slot: its pages, in the order of its text; 0 behind them."""
        self._pages: Pages[Answer, PrefixRoot] = steps.memory.pages
        self._limit = self._pages.limit
        self._now = 0.0
        """Of the last iteration."""
        executor.keep_pages(self._limit)

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

    @property
    def guided(self) -> bool:
        """Whether what may come next in any answer depends on what came."""
        return bool(self._guided)

    def tokens_left(self) -> list[int]:
        """For each answer, the tokens that it may still get; one less may be if an iteration is under way."""
        return [answer.most - answer.count for answer in self._slots.window() if answer]

    def place(self, answer: Answer) -> None:
        """Give `answer`, of which nothing is stored but what it found, a slot. Raises SlotsFullError."""
        slot = self._slots.append(answer)
        self._counts[slot] = answer.count
        self._most[slot] = answer.most
        if answer.guide:
            self._guided.add(answer)
        self._lengths[slot] = self._pages.computed(answer)
        prompt, answered = np.split(answer.ids, [answer.prompt])
        self._executor.admit(slot, answer.sampling, answer.adapter and key(answer.adapter), prompt, answered)

    def full(self) -> list[Row[Answer]]:
        """Those whose next token takes another page."""
        rows = [(self._slots.request(slot), int(self._lengths[slot])) for slot in self._full().tolist()]
        return [Row(answer, stored) for answer, stored in rows if answer]

    def resize(self, moves: Sequence[tuple[int, int]]) -> None:
        """Use only the first pages from now on, as many as adapters leave room for, after these moves."""
        if moves:
            self._executor.move_pages(moves)
            targets = np.arange(self._pages.count + 1, dtype=np.int32)
            targets[[source for source, _ in moves]] = [target for _, target in moves]
            self._tables = targets[self._tables]
        if self._pages.limit != self._limit:
            self._limit = self._pages.limit
            self._executor.keep_pages(self._limit)

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
            self._going,
            self._held,
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

    def step(self, plan: Plan[Answer, AdapterRef], now: float) -> Step | None:
        """The next iteration: chunks, then a token for each answer whose prompt was whole before; None if it computes
        nothing."""
        self._now = now
        for slot in self._full().tolist():
            answer = self._slots.request(slot)
            assert answer is not None
            self._show(slot, answer)
        self._going = self._decoding.copy()
        for answer in plan.sit_out:
            if answer in self._slots:
                self._going[self._slots.slot(answer)] = False
        self.compact()
        prefills = [self._prefill(answer, tokens) for answer, tokens in plan.chunks]
        going = np.flatnonzero(self._going)
        if not (prefills or len(going)):
            return None
        window = slice(int(going[0]), int(going[-1]) + 1) if len(going) else slice(0, 0)
        ended = [prefill.slot for prefill in prefills if prefill.last]
        live, width = self._going[window], int(self._held[window].max(initial=0))
        return Step(
            prefills=tuple(prefills),
            offset=window.start,
            lengths=self._lengths[window] * live,
            tables=self._tables[window, :width] * live[:, None],
            indices=self._counts[window].copy(),
            prefill_indices=self._counts[ended],
            masks=self._begin_masks((slot - window.start, slot) for slot in going.tolist()),
            prefill_masks=self._begin_masks(enumerate(ended)),
        )

    def _prefill(self, answer: Answer, tokens: int) -> Prefill:
        """The next `tokens` of a prompt, as a chunk that the next step computes."""
        slot, start = self._slots.slot(answer), self._pages.computed(answer)
        self._show(slot, answer)
        self._lengths[slot] = end = start + tokens
        pages = self._tables[slot, : self._held[slot]].copy()
        targets = answer.targets(start, end)
        last = end == len(answer.ids)
        return Prefill(slot, start, answer.ids[start:end], last, pages, targets, answer.alternatives or 0)

    def _begin_masks(self, slots: Iterable[tuple[int, int]]) -> Callable[[], RowMasks] | None:
        """Of rows and their slots."""
        if not self._guided:
            return None
        answers = ((row, self._slots.request(slot)) for row, slot in slots)
        return self._masks.start([(row, answer.guide) for row, answer in answers if answer and answer.guide])

    def launched(self, step: Step, plan: Plan[Answer, AdapterRef]) -> Served:
        """`step`, of this plan, is under way: count its tokens, and free the slots of answers that need no more."""
        window = slice(step.offset, step.offset + len(step.lengths))
        going = self._going[window]
        rows = [self._slots.request(slot) if goes else None for slot, goes in enumerate(going.tolist(), step.offset)]
        self._lengths[window] += going
        self._counts[window] += going
        prompts = [answer for answer, _ in plan.chunks]
        if prompts:
            self._chunks_launched(step, plan)
        whole = np.flatnonzero(self._decoding & (self._counts == self._most)).tolist()
        computed = [done for slot in whole if (done := self._slots.request(slot))]
        for answer in computed:
            self.evict(answer)
        firsts = [answer for answer, prefill in zip(prompts, step.prefills, strict=True) if prefill.last]
        scored = [
            answer if len(prefill.targets) else None for answer, prefill in zip(prompts, step.prefills, strict=True)
        ]
        return Served([*prompts], [*firsts], rows, computed, scored)

    def _chunks_launched(self, step: Step, plan: Plan[Answer, AdapterRef]) -> None:
        for answer, tokens in plan.chunks:
            answer.computed += min(tokens, max(0, answer.prompt - self._pages.computed(answer)))
        self._steps.computed(plan, self._now)
        for (answer, _), prefill in zip(plan.chunks, step.prefills, strict=True):
            self._show(prefill.slot, answer)
        ended = [prefill.slot for prefill in step.prefills if prefill.last]
        self._counts[ended] += 1
        self._since[ended] = self._now - (self._counts[ended] - 1) * (self._tpot_s or 0.0)
        self._decoding[ended] = True

    def evict(self, answer: Answer) -> None:
        """Free the slot of `answer`, if it has one."""
        if answer not in self._slots:
            return
        self._steps.halt(Row(answer, int(self._lengths[self._slots.slot(answer)])), self._now)
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
                right = 0 <= length < len(answer.ids) and not answer.ended
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
        table, length, shown = list(self._pages.table(answer)), int(self._lengths[slot]), int(self._held[slot])
        if self._decoding[slot]:
            if self._tables[slot, :shown].tolist() != table or len(table) * self._executor.page < length:
                raise SlotError(f"slot {slot} shows other pages for {length} tokens than {answer.id} has: {table}")
        elif self._pages.computed(answer) < length:
            raise SlotError(f"slot {slot} has {length} tokens of a prompt, and {self._pages.computed(answer)} in pages")
        if self._tables[slot, shown:].any():
            raise SlotError(f"slot {slot} shows pages behind those of {answer.id}")
        if self._decoding[slot] and self._pages.computed(answer) > length:
            raise SlotError(f"slot {slot} has {length} tokens, and {self._pages.computed(answer)} in pages")
