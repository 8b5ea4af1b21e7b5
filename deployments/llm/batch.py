"""The answers that have slots, and the numbers that an iteration needs of each (Flover's inference map, §V-C)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pliant.deployments.llm.answer import Answer
from pliant.kernels.executor import Prefill, Step
from pliant.policies.decode_slots import Move, SlotError, SlotMap


class Batch:
    """Answers by slot. What it tells is true once all iterations that were launched are through.

    At most one answer has a slot and its prompt in part only: the one prefilled last.
    """

    def __init__(self, slots: int, compact: bool) -> None:
        self._slots: SlotMap[Answer] = SlotMap(slots, compact)
        self._lengths = np.zeros(slots, np.int32)
        """By slot: tokens stored; 0 for holes, as in all of these."""
        self._counts = np.zeros(slots, np.int64)
        """By slot: tokens of the answer."""
        self._most = np.zeros(slots, np.int64)
        """By slot: the most tokens that the answer may have."""
        self._decoding = np.zeros(slots, np.bool_)
        """By slot: whether the prompt is stored whole."""
        self.partial: Answer | None = None
        """The one whose prompt is not."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._slots

    @property
    def free(self) -> int:
        """Slots."""
        return self._slots.free

    @property
    def decoding(self) -> bool:
        """Whether any answer waits for its next token."""
        return bool(self._decoding.any())

    @property
    def prompt_left(self) -> int:
        """Tokens of the partial prompt that are not stored."""
        return 0 if self.partial is None else len(self.partial.ids) - int(self._lengths[self._slots.slot(self.partial)])

    def tokens_left(self) -> list[int]:
        """For each answer, the tokens that it may still get; one less may be if an iteration is under way."""
        return [answer.most - answer.count for answer in self._slots.window() if answer]

    def place(self, answer: Answer) -> None:
        """Give `answer`, of which nothing is stored, a slot. Raises SlotsFullError."""
        slot = self._slots.append(answer)
        self._counts[slot] = answer.count
        self._most[slot] = answer.most

    def compact(self) -> list[Move]:
        """Close the gaps; what must be moved for it. Answers that were placed just now have nothing to move."""
        moves = self._slots.compact(lambda answer: int(self._lengths[self._slots.slot(answer)]))
        if not moves:
            return []
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        for values in (self._lengths, self._counts, self._most, self._decoding):
            values[targets] = values[sources]
            values[sources] = 0
        return [move for move in moves if move.size]

    def prefill(self, answer: Answer, tokens: int) -> Prefill:
        """The next `tokens` of a prompt, as a chunk that the next step computes."""
        slot = self._slots.slot(answer)
        start = int(self._lengths[slot])
        self._lengths[slot] = end = start + tokens
        last = end == len(answer.ids)
        self.partial = None if last else answer
        return Prefill(slot, start, answer.ids[start:end], last)

    def step(self, prefills: Sequence[Prefill]) -> Step:
        """The next iteration: these chunks, then a token for each answer whose prompt was whole before."""
        decoding = np.flatnonzero(self._decoding)
        window = slice(int(decoding[0]), int(decoding[-1]) + 1) if len(decoding) else slice(0, 0)
        return Step(
            prefills=tuple(prefills),
            offset=window.start,
            lengths=self._lengths[window].copy(),
            indices=self._counts[window].copy(),
            prefill_indices=self._counts[[prefill.slot for prefill in prefills if prefill.last]],
        )

    def launched(self, step: Step) -> tuple[list[Answer | None], list[Answer | None]]:
        """`step` is under way: count its tokens, and free the slots of answers that need no more.

        Returns whose tokens its `last` prefills and its rows compute; None for rows that mean nothing.
        """
        window = slice(step.offset, step.offset + len(step.lengths))
        decoding = self._decoding[window]
        rows = [
            self._slots.request(slot) if decodes else None
            for slot, decodes in enumerate(decoding.tolist(), step.offset)
        ]
        self._lengths[window] += decoding
        self._counts[window] += decoding
        ended = [prefill.slot for prefill in step.prefills if prefill.last]
        firsts = [self._slots.request(slot) for slot in ended]
        self._counts[ended] += 1
        self._decoding[ended] = True
        for slot in np.flatnonzero(self._decoding & (self._counts == self._most)).tolist():
            self.evict(self._slots.request(slot))
        return firsts, rows

    def evict(self, answer: Answer | None) -> None:
        """Free the slot of `answer`, if it has one."""
        if answer is None or answer not in self._slots:
            return
        slot = self._slots.evict(answer)
        for values in (self._lengths, self._counts, self._most, self._decoding):
            values[slot] = 0
        if answer is self.partial:
            self.partial = None

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
                right = answer is self.partial and 0 < length < len(answer.ids) and not answer.ended
            if answer is not None and answer.count + sum(other is answer for other in flying) != count:
                right = False
            if not right:
                raise SlotError(
                    f"slot {slot} has {answer and answer.id}: {length} tokens stored, {count} of {most} of the answer, "
                    f"decoding {decoding}"
                )
