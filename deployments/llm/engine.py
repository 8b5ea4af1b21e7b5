"""One replica's language model: every request joins the next iteration, and leaves in the one that ends it (Flover §V).

Four verbs: `add` queues a request, and each `step` schedules an iteration (prompts into slots, gaps closed), runs it,
and postprocesses what it sampled. Plain and synchronous, without Ray: `loop.py` runs it in a thread.

An executor may compute while the host goes on (`pipelined`). Then iteration t + 1 is launched before the tokens of t
are read. It needs none of them: how long every text is, and which answers have reached their maximal length, is known
without. Only an answer that ends early is found out one iteration late, and what that computed for it is dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.answer import TooLongError as TooLongError
from pliant.deployments.llm.batch import Batch
from pliant.deployments.llm.detokenizer import TokenBytes
from pliant.deployments.llm.report import LlmReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.kernels.executor import Launched, Prefill, RowLogprobs, Step
from pliant.policies.decode_admission import DecodeAdmission, LateError, Load, Waiting
from pliant.policies.decode_slots import SlotError
from pliant.policies.prefill_chunks import PrefillBudget, chunks
from pliant.policies.recent_ratio import RecentRatio
from pliant.sampling import Sampling

_DECAY = 0.95
_REHEARSED = 16
"""Tokens of a rehearsal's prompt, and of its answer."""


class BrokenError(Exception):
    """The executor failed, and with it all that its slots held; the engine computes nothing any more."""


Item = tuple[str, Piece | Exception]
"""A request's id, and what is new of it; an error is the last of it, as is a piece that says `finish`."""


class Executor(Protocol):
    """What the engine runs, as `pliant.kernels.executor` describes it."""

    slots: int
    max_length: int
    pipelined: bool

    def admit(self, slot: int, sampling: Sampling) -> None: ...

    def launch(self, step: Step) -> Launched: ...

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None: ...


class _Flight(NamedTuple):
    """An iteration under way."""

    launched: Launched
    at: float
    prompt_tokens: int
    firsts: list[Answer | None]
    """Whose first tokens it computes."""
    rows: list[Answer | None]
    """By row of the window: whose next token it computes; None for rows that mean nothing."""


class Engine:
    """Answers generations on `executor`, whose slots and max_length are its own.

    `eos` are the tokens that end an answer. At most `queue` requests wait for a slot, besides those for whom slots are
    free. `stall_s` bounds for how long prompts may hold up the next tokens of live requests (see `prefill_chunks`).
    `clock` tells seconds. `compact`=False leaves gaps between live requests, as Flover does without its shuffle.
    With `debug` every step checks the engine's integrity. Calls must not overlap, save for `busy` and `report`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        eos: Collection[int],
        queue: int,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
        compact: bool = True,
        debug: bool = False,
    ) -> None:
        self.capacity = executor.slots + queue
        """Requests that there is room for, live or waiting."""
        self._executor = executor
        self._contents = TokenBytes(tokenizer)
        self._eos = frozenset(eos)
        self._clock = clock
        self._debug = debug
        self._admission = DecodeAdmission(queue)
        self._stall_s = stall_s
        self._batch = Batch(executor.slots, compact)
        self._waiting: deque[Answer] = deque()
        self._flights: deque[_Flight] = deque()
        self._open: dict[str, Answer] = {}
        """All that have not ended: they wait, have a slot, or have their last tokens in flight."""
        self._read_at = -math.inf
        self._live_tokens = 0
        self._forget()
        self.failure: Exception | None = None
        """Why the engine is broken, if it is: every request got a BrokenError, and every further one will."""

    def _forget(self) -> None:
        """Begin to measure anew."""
        self._budget = PrefillBudget(self._stall_s)
        self._step_s = RecentRatio(_DECAY)
        self._tokens_per_s = RecentRatio(_DECAY)
        self._served = self._tokens = 0

    def rehearse(self) -> None:
        """Compute two answers for nobody: the first is slow, and the second tells what requests will be promised.

        Raises what the executor does.
        """
        prompt = (0,) * min(_REHEARSED, self._executor.max_length // 2)
        for _ in range(2):
            self._forget()
            self.add(Generation("rehearsal", prompt, max_tokens=len(prompt), sampling=Sampling(), ignore_eos=True))
            while self.busy:
                self.step()
            if self.failure:
                raise self.failure
        self._served = self._tokens = 0

    def add(self, generation: Generation) -> None:
        """Queue a request; it joins the next step that has a slot for it. `max_tokens` is cut to what fits into one.

        Raises QueueFullError or LateError, both BusyError, when it had better be sent elsewhere or later, which an
        answer that goes on is never told; TooLongError
        when it never fits, and another ValueError when it makes no sense; BrokenError when the engine is.
        """
        if self.failure:
            raise self._broken(self.failure)
        if generation.id in self._open:
            raise ValueError(f"a request {generation.id!r} is under way already; ids must differ")
        answer = Answer(generation, self._executor.max_length, self._eos, self._contents)
        within_s = generation.first_token_within_s
        if not generation.generated:  # one that was begun elsewhere is not made to begin again
            self._admission.admit(self._load(), len(answer.ids), within_s, *self._speeds())
        if within_s is not None:
            answer.deadline = self._clock() + within_s
        self._open[answer.id] = answer
        self._waiting.append(answer)
        self._live_tokens += answer.size

    def cancel(self, id: str) -> None:
        """End a request without another word; its slot is free in the next step. Unknown ids are ignored."""
        answer = self._open.get(id)
        if answer is None:
            return
        with suppress(ValueError):
            self._waiting.remove(answer)
        self._end(answer)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._open or self._flights)

    def step(self) -> list[Item]:
        """Run one iteration; returns what is new of all requests, [] if nothing is.

        Does not raise: when the executor fails, every request gets a BrokenError, and `failure` says why.
        """
        items: list[Item] = []
        try:
            self._refuse_late(items)
            step = self._schedule()
            if step is not None:
                self._flights.append(self._run(step))
            in_flight = 1 if step is not None and self._executor.pipelined else 0
            while len(self._flights) > in_flight:
                self._postprocess(self._flights.popleft(), items)
            if self._debug:
                self.check()
        except Exception as failure:
            self._break(failure, items)
        return items

    def _schedule(self) -> Step | None:
        """The next iteration, None if there is nothing to compute.

        Requests that wait get their slots before gaps are closed, as they fill gaps for nothing.
        """
        granted = self._place()
        if moves := self._batch.compact():
            self._executor.move(moves)
        prefills = [self._prefill(answer, tokens) for answer, tokens in granted]
        return self._batch.step(prefills) if prefills or self._batch.decoding else None

    def _place(self) -> list[tuple[Answer, int]]:
        """Whose prompts get how many tokens computed, in order of arrival; each of them has a slot then."""
        batch, partial = self._batch, self._batch.partial
        if not (self._waiting or partial):
            return []
        left = [batch.prompt_left] if partial else []
        left += [len(answer.ids) for answer in islice(self._waiting, batch.free)]
        granted = []
        for tokens in chunks(left, self._budget.tokens(live=batch.decoding)):
            if partial:
                answer, partial = partial, None
            else:
                answer = self._waiting.popleft()
                batch.place(answer)
            granted.append((answer, tokens))
        return granted

    def _prefill(self, answer: Answer, tokens: int) -> Prefill:
        prefill = self._batch.prefill(answer, tokens)
        if not prefill.start:
            self._executor.admit(prefill.slot, answer.sampling)
        return prefill

    def _run(self, step: Step) -> _Flight:
        at = self._clock()
        launched = self._executor.launch(step)
        return _Flight(launched, at, sum(len(prefill.ids) for prefill in step.prefills), *self._batch.launched(step))

    def _postprocess(self, flight: _Flight, items: list[Item]) -> None:
        """Read what an iteration sampled, and end the answers that end with it."""
        output = flight.launched.result()
        before = len(items)
        self._read(flight.firsts, output.first, output.first_logprobs, items)
        self._read(flight.rows, output.tokens, output.logprobs, items)
        now = self._clock()
        self._observe(flight, now - max(flight.at, self._read_at), len(items) - before)
        self._read_at = now

    def _read(
        self,
        answers: Iterable[Answer | None],
        tokens: NDArray[np.int64],
        logprobs: Iterable[RowLogprobs | None] | None,
        items: list[Item],
    ) -> None:
        for answer, token, row in zip(answers, tokens.tolist(), logprobs or repeat(None), strict=False):
            if answer is None or answer.ended:
                continue
            piece = answer.read(token, row)
            items.append((answer.id, piece))
            if piece.finish:
                self._end(answer)
                self._served += 1
                self._admission.ended(answer.count, answer.most)

    def _observe(self, flight: _Flight, seconds: float, tokens: int) -> None:
        """An iteration took `seconds` and gave so many `tokens`."""
        if flight.prompt_tokens:
            self._budget.observe(flight.prompt_tokens, seconds, self._step_s.value if flight.rows else 0.0)
        else:
            self._step_s.add(seconds, 1)
        self._tokens_per_s.add(tokens, seconds)
        self._tokens += tokens

    def _end(self, answer: Answer) -> None:
        """Nothing more of `answer` is told, and nothing more computed."""
        answer.ended = True
        del self._open[answer.id]
        self._live_tokens -= answer.size
        self._batch.evict(answer)

    def _refuse_late(self, items: list[Item]) -> None:
        """End the requests that have waited in vain."""
        if not self._waiting:
            return
        now = self._clock()
        late = [answer for answer in self._waiting if answer.deadline is not None and answer.deadline < now]
        if not late:
            return
        for answer in late:
            self._waiting.remove(answer)
            self._end(answer)
        retry_s = self._admission.next_turn_s(self._load(), *self._speeds())
        error = LateError("no slot was free before the time for the first token was over", retry_s)
        items += [(answer.id, error) for answer in late]

    def _break(self, failure: Exception, items: list[Item]) -> None:
        self.failure = failure
        self._flights.clear()
        self._waiting.clear()
        for answer in list(self._open.values()):
            self._end(answer)
            items.append((answer.id, self._broken(failure)))

    def _broken(self, failure: Exception) -> BrokenError:
        return BrokenError(f"the model's executor failed: {type(failure).__name__}: {failure}")

    def _load(self) -> Load:
        return Load(
            free=self._batch.free,
            live=self._batch.tokens_left(),
            prompt=self._batch.prompt_left,
            waiting=[Waiting(len(answer.ids), answer.most - answer.count) for answer in self._waiting],
        )

    def _speeds(self) -> tuple[float, float]:
        """Seconds of a decode step, and prompt tokens in a second."""
        return self._step_s.value, self._budget.tokens_per_s

    def report(self) -> LlmReport:
        return LlmReport(
            max_length=self._executor.max_length,
            slots=self._executor.slots,
            live=len(self._batch),
            waiting=len(self._waiting),
            live_tokens=self._live_tokens,
            served=self._served,
            tokens=self._tokens,
            tokens_per_s=round(self._tokens_per_s.value, 1),
            step_ms=round(self._step_s.value * 1e3, 3),
            prompt_tokens_per_s=round(self._budget.tokens_per_s, 1),
            answer_ratio=round(self._admission.ratio, 3),
        )

    def check(self) -> None:
        """Raise SlotError unless slots, lengths and requests agree. Slow: for tests and debugging."""
        flying = [answer for flight in self._flights for answer in (*flight.firsts, *flight.rows) if answer]
        self._batch.check(flying)
        for answer in self._open.values():
            places = (answer in self._waiting) + (answer in self._batch)
            if answer.ended or places > 1 or not (places or answer in flying):
                raise SlotError(f"request {answer.id} has {places} places, ended {answer.ended}")
        if self._live_tokens != sum(answer.size for answer in self._open.values()):
            raise SlotError(f"{self._live_tokens} live tokens are counted, {len(self._open)} requests are open")
