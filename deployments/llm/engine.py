"""One replica's language model: every request joins the next iteration, and leaves in the one that ends it (Flover §V).

Four verbs: `add` queues a request, and each `step` schedules an iteration (prompts into slots, gaps closed), runs it,
and postprocesses what it sampled. Plain and synchronous, without Ray: `loop.py` runs it in a thread.

An executor may compute while the host goes on (`pipelined`). Then iteration t + 1 is launched before the tokens of t
are read. It needs none of them: how long every text is, and which answers have reached their maximal length, is known
without. Only an answer that ends early is found out one iteration late, and what that computed for it is dropped.

Who waits is `waiting_room.py`, and adapters are `adapters.py`; a scheduler decides about both (Chameleon §4). An answer
uses its adapter until no iteration under way computes anything for it, whether it has ended by then or not.

When nobody is left, what was begun for adapters goes on: loads are installed, and the scheduler is asked once more, as
it may evict some now. It may also want to be asked every now and then (`looks_every_s`), to load what will be needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from tokenizers import Tokenizer

from pliant.deployments.llm.adapter_loader import AdapterLoader
from pliant.deployments.llm.adapters import Adapters
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.answer import BrokenError as BrokenError
from pliant.deployments.llm.answer import TooLongError as TooLongError
from pliant.deployments.llm.batch import Batch, InFlight, Iteration
from pliant.deployments.llm.detokenizer import TokenBytes
from pliant.deployments.llm.executor import Executor
from pliant.deployments.llm.guide import Guide, GuideError, Guides
from pliant.deployments.llm.memory import arena, digest
from pliant.deployments.llm.memory import report as memory_report
from pliant.deployments.llm.report import LlmReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.waiting_room import AnswerJob, AnswerPlan, AnswerScheduler, WaitingRoom, in_order
from pliant.formats.adapter_info import AdapterRef
from pliant.kernels.decoder.decode_step import Step
from pliant.policies.llm.decode_admission import Load
from pliant.policies.llm.decode_slots import SlotError
from pliant.policies.llm.output_length import LengthPredictor, OutputLengths
from pliant.policies.llm.passes import Order
from pliant.policies.llm.prefill_chunks import Measured, Speeds
from pliant.policies.llm.step_scheduler import StepScheduler
from pliant.sampling import Sampling

_REHEARSED = 16
"""Tokens of a rehearsal's prompt, and of its answer."""
_LOAD_S = 0.005
"""How long a step waits for adapters that are being loaded when there is nothing else to do."""


Item = tuple[str, Piece | Exception]
"""A request's id, and what is new of it; an error is the last of it, as is a piece that says `finish`."""


class Engine:
    """Answers generations on `executor`, whose slots and max_length are its own.

    `eos` are the tokens that end an answer. At most `queue` requests wait for a slot, besides those for whom slots are
    free, in the order of `scheduler`; by default that of their arrival. `predictor` tells it how long answers will be,
    and `loader` loads adapters; without one requests have none. `stall_s` bounds for how long prompts may hold up the
    next tokens of live requests (see `prefill_chunks`); with a `tpot_s`, the objective for the time between two tokens,
    they may take what live requests can spare by that instead; `order` is theirs. `clock` tells seconds.
    `compact`=False leaves gaps between live requests, as Flover does without its shuffle. With `share_prefixes` tenants
    share what was computed of prompts. With `debug` every step checks the engine's integrity.

    Calls must not overlap, save for `busy`, `report`, `progress` and `loading_s`.
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
        scheduler: AnswerScheduler | None = None,
        predictor: LengthPredictor[str] | None = None,
        loader: AdapterLoader | None = None,
        share_prefixes: bool = False,
        tpot_s: float | None = None,
        order: Order = "shortest",
    ) -> None:
        self.capacity = executor.slots + queue
        """Requests that there is room for, live or waiting."""
        self._executor = executor
        self._tokenizer = tokenizer
        self._contents = TokenBytes(tokenizer)
        self._eos = frozenset(token for token in eos if token < executor.vocabulary)
        self._guides = Guides(tokenizer, self._contents, self._eos, executor.vocabulary)
        self._clock = clock
        self._debug = debug
        self._stall_s = stall_s
        self._speeds = Speeds(stall_s)
        scheduler = scheduler or in_order(executor.arena_bytes)
        self._adapters = Adapters(executor, scheduler, loader)
        costs = Measured(lambda: self._speeds.prompt_tokens_per_s, self._adapters.load_s)
        self._steps = StepScheduler(arena(executor, scheduler.cache, costs), scheduler, costs, order)
        self._room = WaitingRoom(self._steps, predictor or OutputLengths(), queue, share_prefixes)
        self._batch = Batch(executor, self._steps, compact, tpot_s)
        self._in_flight = InFlight()
        self._open: dict[str, Answer] = {}
        """All that have not ended: they wait, have a slot, or have their last tokens in flight."""
        self._owed: list[Item] = []
        """What is to be said of requests that ended between two steps."""
        self._settled = True
        """Whether the scheduler has been asked since the last request ended."""
        self._read_at = -math.inf
        self._live_tokens = 0
        self._served = 0
        self._prompts = 0
        self._prompts_s = 0.0
        self.failure: Exception | None = None
        """Why the engine is broken, if it is: every request got a BrokenError, and every further one will."""

    def rehearse(self) -> None:
        """Compute two answers for nobody: the first is slow, and the second tells what requests will be promised.

        Raises what the executor does.
        """
        tokens = min(_REHEARSED, self._executor.max_length // 2)
        for token in range(2):
            other = Engine(self._executor, self._tokenizer, (), 0, self._stall_s, self._clock)
            other.add(Generation("rehearsal", (token,) * tokens, tokens, Sampling(), ignore_eos=True))
            while other.busy:
                other.step()
            if other.failure:
                raise other.failure
            self._speeds = other._speeds
        self._speeds.tokens = 0

    def pin(self, adapter: AdapterRef) -> None:
        """Load `adapter`, and keep it for good. Before the first request. Raises AdapterLoadError."""
        now = self._clock()
        self._adapters.pin(adapter)
        plan = self._room.schedule(now, 0, 0, (), 0.0)  # asks for this load, as pinned adapters come first
        self._adapters.evict(plan.evict)
        self._batch.resize(plan.moves)
        self._adapters.load_now(adapter, now)

    def forget(self) -> None:
        """Keep nothing of what was computed but for requests under way, as a benchmark wants it that repeats itself."""
        self._steps.forget()

    def guide(self, generation: Generation) -> Guide | None:
        """What `generation` is bound to, for `add`. Slow for large grammars; for any thread. Raises GuideError."""
        return self._guides.guide(generation)

    def add(self, generation: Generation, guide: Guide | None = None) -> None:
        """Queue a request; it joins the next step that has a slot for it. `max_tokens` is cut to what fits into one.
        `guide` is what it is bound to.

        Raises QueueFullError or LateError, both BusyError, when it had better be sent elsewhere or later, which an
        answer that goes on is never told; TooLongError when it never fits, AdapterLoadError when its adapter does not,
        and another ValueError when it makes no sense; BrokenError when the engine is.
        """
        if self.failure:
            raise _broken(self.failure)
        if generation.id in self._open:
            raise ValueError(f"a request {generation.id!r} is under way already; ids must differ")
        generation.check_tokens(self._executor.vocabulary)
        answer = Answer(generation, self._executor.max_length, self._eos, self._contents, guide)
        now, within_s = self._clock(), generation.first_token_within_s
        adapter_bytes = self._adapters.bytes(answer.adapter)
        prompt = self._room.prompt(answer, adapter_bytes, 1.0 + adapter_bytes / self._executor.weight_bytes, now)
        job = self._steps.job(prompt)
        if not generation.generated:  # one that was begun elsewhere is not made to begin again
            load = self._load(job)
            if loser := self._room.refuse(job, load, within_s, self._speeds):
                self._end(loser)
                self._owed.append((loser.id, self._room.crowded_out_error(load, self._speeds)))
        if within_s is not None:
            answer.deadline = now + within_s
        self._room.enter(prompt, job, now)
        self._open[answer.id] = answer
        self._live_tokens += answer.size

    def cancel(self, id: str) -> None:
        """End a request without another word; its slot is free in the next step. Unknown ids are ignored."""
        if answer := self._open.get(id):
            self._end(answer)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return not self.failure and bool(
            self._owed or self._open or self._in_flight or self._adapters.loading or not self._settled
        )

    def progress(self, id: str) -> int | None:
        """As `Answer.progress`; 0 of unknown ids. For any thread."""
        answer = self._open.get(id)
        return answer.progress if answer else 0

    @property
    def looks_every_s(self) -> float | None:
        """Seconds after which `step` has something to do though the engine is not busy; None if it never has."""
        return self._steps.admission.looks_every_s

    def limit_loads(self, seconds: float) -> None:
        """Give loads of adapters up that take longer, and end the requests that wait for them."""
        self._adapters.limit_loads(seconds)

    def loading_s(self) -> float:
        """Seconds that the load under way has taken; 0 when none is. For any thread."""
        return self._adapters.loading_s()

    def step(self) -> list[Item]:
        """Run one iteration; returns what is new of all requests, [] if nothing is.

        Does not raise: when the executor fails, every request gets a BrokenError, and `failure` says why.
        """
        items, self._owed = self._owed, []
        if self.failure:
            return items
        try:
            now = self._clock()
            self._give_up(now, items)
            if self._batch.guided:  # what may come next depends on what is on its way
                self._postprocess(0, items)
            self._settled = not (self._open or self._in_flight)
            plan = self._schedule(now, items)
            step = self._batch.step(plan, now)
            if step is not None:
                self._in_flight.append(self._run(step, plan))
            in_flight = 1 if step is not None and self._executor.pipelined else 0
            idle = not self._in_flight
            self._postprocess(in_flight, items)
            if self._debug:
                self.check()
            if idle and self.busy and not items:
                self._adapters.wait(_LOAD_S)
        except Exception as failure:
            self._break(failure, items)
        return items

    def _schedule(self, now: float, items: list[Item]) -> AnswerPlan:
        """The next iteration, and all that comes before it. Who begins gets a slot before gaps are closed, and fills
        one for nothing."""
        budget = self._speeds.prompt_tokens(self._batch.decoding, now, self._batch.due)
        slots = self._executor.slots - len(self._batch)
        plan = self._room.schedule(now, slots, budget, self._batch.full(), self._speeds.step_s or math.inf)
        self._put_back(plan.put_back, items)
        self._adapters.evict(plan.evict)
        self._adapters.load(plan.load)
        for answer in plan.admit:
            self._room.take(answer)
            answer.placed = now
            self._batch.place(answer)
        self._batch.resize(plan.moves)
        return plan

    def _put_back(self, answers: list[Answer], items: list[Item]) -> None:
        """These lose their slots and go on later. Their adapters may go at once, so iterations under way come first.

        One may have ended, and have held its memory for those iterations alone.
        """
        if not answers:
            return
        for answer in answers:
            self._room.put_back(answer)
            self._batch.evict(answer)
        self._in_flight.drop(answers)
        self._postprocess(0, items)
        for answer in answers:
            if answer.ended:
                self._room.cancel(answer, self._clock())

    def _run(self, step: Step, plan: AnswerPlan) -> Iteration:
        at = self._clock()
        launched = self._executor.launch(step)
        served = self._batch.launched(step, plan)
        for answer in served.computed:
            if answer.adapter is None:
                self._room.left(answer, at)
        return Iteration(launched, at, sum(len(prefill.ids) for prefill in step.prefills), served, [])

    def _postprocess(self, in_flight: int, items: list[Item]) -> None:
        """Read what iterations sampled, until so many are under way, and end the answers that end with them."""
        while len(self._in_flight) > in_flight:
            iteration = self._in_flight.popleft()
            before = len(items)
            for answer, piece in iteration.read():
                self._tell(answer, piece, items)
            now = self._clock()
            seconds, self._read_at = now - max(iteration.at, self._read_at), now
            self._speeds.observe(iteration.prompt_tokens, bool(iteration.served.rows), len(items) - before, seconds)
            for answer in iteration.leaving:
                self._room.left(answer, now)

    def _tell(self, answer: Answer, piece: Piece | GuideError, items: list[Item]) -> None:
        """`piece` is what is new of `answer`, or why it cannot go on."""
        if isinstance(piece, GuideError):
            items.append((answer.id, piece))
            self._end(answer)
            return
        if answer.count == answer.begun + 1:
            prompt_s = self._clock() - answer.placed
            piece = piece._replace(prompt_s=prompt_s, cached=answer.cached)
            self._prompts += 1
            self._prompts_s += prompt_s
        if answer.running:
            self._steps.admission.generated(answer, answer.count - answer.begun)
        items.append((answer.id, piece))
        if piece.finish:
            self._end(answer)
            self._served += 1
            self._room.learn(answer)

    def _end(self, answer: Answer) -> None:
        """Nothing more of `answer` is told, and nothing more computed."""
        answer.ended = True
        self._settled = False
        del self._open[answer.id]
        self._live_tokens -= answer.size
        self._batch.evict(answer)
        if answer in self._room:
            self._room.cancel(answer, self._clock())
        elif answer.adapter and (iteration := self._in_flight.last_for(answer)):
            iteration.leaving.append(answer)
        else:
            self._room.left(answer, self._clock())

    def _give_up(self, now: float, items: list[Item]) -> None:
        """End the requests that have waited in vain: for an adapter that cannot be loaded, or for too long."""
        for answer, failure in self._adapters.collect(now):
            self._end(answer)
            items.append((answer.id, failure))
        late = self._room.late(now)
        for answer in late:
            self._end(answer)
        if late:
            error = self._room.late_error(self._load(), self._speeds)
            items += [(answer.id, error) for answer in late]

    def _break(self, failure: Exception, items: list[Item]) -> None:
        """End everything, and ask nobody who may have been the cause."""
        self.failure = failure
        items += [(id, _broken(failure)) for id in self._open]
        self._batch.clear()
        self._open.clear()
        self._in_flight.clear()
        self._room.clear()
        self._live_tokens = 0

    def _load(self, job: AnswerJob | None = None) -> Load:
        """What there is to do before a request that comes now; those who wait are the room's."""
        adapter = job and job.adapter
        return Load(
            free=self._adapters.free_slots(adapter, len(self._batch), job and job.charge),
            live=self._batch.tokens_left(),
            prompt=self._steps.prompt_tokens,
            waiting=(),
            ready_s=self._adapters.ready_s(adapter),
        )

    def report(self) -> LlmReport:
        return {
            **self._room.report(),
            "max_length": self._executor.max_length,
            "slots": self._executor.slots,
            "live": len(self._batch),
            "live_tokens": self._live_tokens,
            "served": self._served,
            "tokens": self._speeds.tokens,
            "tokens_per_s": round(self._speeds.tokens_per_s, 1),
            "step_ms": round(self._speeds.step_s * 1e3, 3),
            "prompt_tokens_per_s": round(self._speeds.prompt_tokens_per_s, 1),
            "answer_ratio": round(self._room.answer_ratio, 3),
            "prompts": self._prompts,
            "prompts_s": round(self._prompts_s, 3),
            "memory": memory_report(self._steps),
            "digest": digest(self._steps.memory.pages),
            "adapters": self._adapters.report(),
        }

    def close(self) -> None:
        """End the thread that loads adapters."""
        self._adapters.close()

    def check(self) -> None:
        """Raise SlotError, SchedulerError or CacheError unless all that is counted agrees. Slow: for debugging."""
        self._batch.check(self._in_flight.tokens())
        self._room.check()
        self._adapters.check()
        for answer in self._open.values():
            places = (answer in self._room) + (answer in self._batch)
            if answer.ended or places > 1 or not (places or self._in_flight.last_for(answer)):
                raise SlotError(f"request {answer.id} has {places} places, ended {answer.ended}")
        if self._live_tokens != sum(answer.size for answer in self._open.values()):
            raise SlotError(f"{self._live_tokens} live tokens are counted, {len(self._open)} requests are open")


def _broken(failure: Exception) -> BrokenError:
    return BrokenError(f"the model's executor failed: {type(failure).__name__}: {failure}")
