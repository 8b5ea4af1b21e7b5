"""A replica that takes answers and prompt chunks in one pass, over pages: the live policies under a cost model.

Each iteration goes as the engine's: what is loaded is told, the step scheduler makes its plan, the plan is carried out,
and what the pass took is told to those who predict the next. Nothing is known to the policies that an engine does not
measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.idle_memory import Costs as BringsBack
from pliant.policies.llm.idle_memory import IdleMemory, Root
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.output_length import OutputLengths
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.passes import Due
from pliant.policies.llm.prefill_chunks import Measured, Speeds
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.policies.llm.step_requests import Plan, Prompt, Row
from pliant.policies.llm.step_scheduler import StepScheduler
from pliant.policies.llm.worth import Eviction
from pliant.simulation.arrivals import Floats
from pliant.simulation.llm.hardware import Costs
from pliant.simulation.llm.loads import Loads
from pliant.simulation.llm.pass_costs import PassCosts, Work, chunk, token
from pliant.simulation.llm.simulator import SimulationError

Keep = Literal["joint", "lru", "adapters", "prefixes", "none"]
"""What stays when nobody uses it: adapters and prefixes, by what they save or by when they were used last; or only the
ones, as Chameleon has it, or the others, by what they save; or nothing."""

Queueing = Literal["multi_queue", "fifo", "sjf"]
"""Who is next, as in `scheduler` of cluster.yaml."""

_REHEARSED = 16
"""Tokens of a rehearsal's prompt."""

_SCORES: dict[Keep, Eviction] = {
    "joint": "joint",
    "lru": "lru",
    "adapters": "joint",
    "prefixes": "none",
    "none": "none",
}


class Turn(NamedTuple):
    """A request: when it arrives, what it says, and what it will be answered; adapter -1 is the base model."""

    at_s: float
    prompt: Sequence[int]
    answer: Sequence[int]
    adapter: int = -1
    predicted: int | None = None
    """Tokens of the answer; None: as many as it has."""
    tenant: int | None = None
    """Whose prefixes it shares; None: anybody's."""


@dataclass(frozen=True)
class Replica:
    """How a replica is set up; by default as a service is that has a `tpot_ms`."""

    machine: Costs
    page_tokens: int = 16
    rows: int = 256
    keep: Keep = "joint"
    scheduler: Queueing = "multi_queue"
    apart: bool = False
    tpot_s: float = 0.15
    stall_s: float = 0.05
    slo_s: float = 10.0
    loads: int = 2
    most: int | None = None
    """With one, answers may have so many tokens, for all that clients say, and their lengths are predicted by what was
    learned of those before; else clients know them, and predictions are those of the turns."""


@dataclass(frozen=True)
class Answered:
    """What came of it, by request, in seconds."""

    first_s: Floats
    """From arrival to the first token."""
    tpot_s: Floats
    """Of each token after the first, on average; NaN for answers of one token."""
    end_s: float
    """When the last token of all came."""
    running: float
    """Requests that had pages, on average over the time in which some waited; of all time if none ever did."""
    computed: int
    """Tokens of prompts that were computed."""
    preemptions: int
    sat_out: int
    """Tokens that came a pass later, as there was no page and others were about to end."""
    adapter_hits: float
    """Share of requests whose adapter was there when they arrived."""


def memory_of(total: int, page_bytes: int, page_tokens: int, costs: BringsBack, keep: Keep) -> IdleMemory[Any, Any]:
    """`total` bytes in which nobody has anything yet."""
    pages: Pages[Any, Root[Any]] = Pages(total // page_bytes, page_tokens)
    prefixes = keep not in ("adapters", "none")
    return IdleMemory(pages, page_bytes, total, AdapterCache(_SCORES[keep]), costs, prefixes)


def queues(scheduler: Queueing, slo_s: float) -> Queues[Any, Any]:
    """In which requests wait."""
    if scheduler == "fifo":
        return Fifo()
    return ShortestFirst() if scheduler == "sjf" else MultiQueue(QueueClasses(slo_s))


def simulate(replica: Replica, turns: Sequence[Turn], sizes: Sequence[int] = (), debug: bool = False) -> Answered:
    """Answer `turns`, which are in order of arrival; `sizes` are the bytes of adapters. Raises SimulationError."""
    return _Simulation(replica, turns, sizes, debug).run()


class _Request:
    """A turn that waits or runs."""

    def __init__(self, turn: Turn, bytes: int, predicted: int) -> None:
        self.turn, self.bytes, self.predicted = turn, bytes, predicted
        self.tokens = [*turn.prompt, *turn.answer]
        self.given = 0
        """Tokens of its answer that there are."""
        self.first_s = math.inf

    @property
    def stored(self) -> int:
        """Tokens in its pages, when its next one is computed: all but the last."""
        return len(self.turn.prompt) + self.given - 1

    def queued(self) -> Sequence[int]:
        return self.known()

    def known(self, start: int = 0) -> list[int]:
        return self.tokens[start : len(self.turn.prompt) + self.given]


class _Simulation:
    def __init__(self, replica: Replica, turns: Sequence[Turn], sizes: Sequence[int], debug: bool) -> None:
        machine = replica.machine
        page_bytes = replica.page_tokens * machine.model.token_bytes
        self._costs = PassCosts(machine, replica.apart)
        self._speeds = Speeds(replica.stall_s)
        measured = Measured(lambda: self._speeds.prompt_tokens_per_s, self._costs.load_s)
        memory: IdleMemory[int, int] = memory_of(
            machine.memory, page_bytes, replica.page_tokens, measured, replica.keep
        )
        admission: Scheduler[int, int] = Scheduler(
            queues(replica.scheduler, replica.slo_s),
            memory.adapters,
            machine.memory,
            loads=replica.loads,
            slots=replica.rows,
        )
        order = "fifo" if replica.scheduler == "fifo" else "shortest"
        self._steps: StepScheduler[int, int] = StepScheduler(memory, admission, measured, order)  # type: ignore[arg-type]
        self._predictor: OutputLengths[int] = OutputLengths()
        self._replica, self._turns, self._sizes, self._debug = replica, turns, sizes, debug
        self._link = Loads(machine)
        self._waiting: dict[int, _Request] = {}
        self._prompts: dict[int, _Request] = {}
        """Those that run, and have no token yet, or lost their pages."""
        self._decoding: dict[int, _Request] = {}
        self._first, self._last = np.full((2, len(turns)), np.nan)
        self._now = 0.0
        self._sent = self._answered = self._computed = self._preempted = self._sat_out = 0
        self._times: list[tuple[float, int, bool]] = []
        """Seconds of each pass, how many ran, and whether others waited."""
        self._rehearse()

    def _rehearse(self) -> None:
        """As an engine does before the first request."""
        self._speeds.observe(_REHEARSED, False, 1, self._costs.pass_s(chunk(_REHEARSED, 0, 0)))
        self._speeds.observe(0, True, 1, self._costs.pass_s(token(_REHEARSED, 0)))

    def run(self) -> Answered:
        while self._answered < len(self._turns):
            self._receive()
            plan = self._plan()
            sitting = set(plan.sit_out)
            going = [key for key in self._decoding if key not in sitting]
            if plan.chunks or going:
                self._compute(plan, going)
            elif not plan.put_back:
                self._wait()
            if self._debug:
                self._steps.check()
        return self._result()

    def _receive(self) -> None:
        while self._sent < len(self._turns) and self._turns[self._sent].at_s <= self._now:
            self._add(self._sent)
            self._sent += 1
        while self._link.next_end <= self._now:
            self._steps.admission.loaded(self._link.under_way.popleft()[1], self._now)

    def _add(self, key: int) -> None:
        turn, most = self._turns[key], self._replica.most
        adapter, bytes = (turn.adapter, self._sizes[turn.adapter]) if turn.adapter >= 0 else (None, 0)
        output, length = len(turn.answer), len(turn.prompt)
        predicted = output if turn.predicted is None else turn.predicted
        if most is not None:
            predicted = self._predictor.predict(adapter, length, most)
        request = self._waiting[key] = _Request(turn, bytes, predicted)
        work = 1.0 + bytes / self._replica.machine.model.bytes
        root = Root(adapter, turn.tenant)
        prompt = Prompt(key, request, root, length, predicted, length + (most or output), turn.at_s, bytes, work)
        self._steps.add(prompt, self._steps.job(prompt), self._now)

    def _plan(self) -> Plan[int, int]:
        """The next pass; all that comes before it is carried out."""
        size, pages = self._replica.page_tokens, self._steps.memory.pages
        requests = self._decoding.items()
        full = [Row(key, one.stored) for key, one in requests if one.stored >= len(pages.table(key)) * size]
        tpot_s = self._replica.tpot_s
        due = Due(min((one.first_s + one.given * tpot_s for _, one in requests), default=math.inf), tpot_s)
        budget = self._speeds.prompt_tokens(bool(self._decoding), self._now, due if math.isfinite(tpot_s) else None)
        rows = self._replica.rows - len(self._prompts) - len(self._decoding)
        plan = self._steps.schedule(self._now, rows, budget, full, self._speeds.step_s or math.inf)
        for key in plan.put_back:
            self._waiting[key] = (self._prompts if key in self._prompts else self._decoding).pop(key)
        for adapter in plan.load:
            self._link.load(adapter, self._sizes[adapter], self._now)
        for key in plan.admit:
            self._prompts[key] = self._waiting.pop(key)
        self._preempted += len(plan.put_back)
        self._sat_out += len(plan.sit_out)
        return plan

    def _compute(self, plan: Plan[int, int], going: Sequence[int]) -> None:
        work, pages = Work(), self._steps.memory.pages
        for key in going:
            request = self._decoding[key]
            work = work.plus(token(request.stored, request.bytes))
        for key, tokens in plan.chunks:
            work = work.plus(chunk(tokens, pages.computed(key), self._prompts[key].bytes))
        seconds = self._costs.pass_s(work)
        self._steps.computed(plan, self._now)
        self._now += seconds
        self._computed += work.prompt
        self._times.append((seconds, len(self._prompts) + len(self._decoding), bool(self._waiting)))
        whole = [key for key, _ in plan.chunks if not pages.left(key)]
        self._speeds.observe(work.prompt, bool(going), len(going) + len(whole), seconds)
        for key in whole:
            self._decoding[key] = self._prompts.pop(key)
        for key in (*going, *whole):
            self._give(key)

    def _give(self, key: int) -> None:
        """It has its next token."""
        request = self._decoding[key]
        if not request.given:
            self._first[key] = request.first_s = self._now
        request.given += 1
        self._steps.admission.generated(key, request.given)
        if request.given == len(request.turn.answer):
            del self._decoding[key]
            self._last[key] = self._now
            self._answered += 1
            self._steps.halt(Row(key, request.stored), self._now)
            self._steps.ended(key, self._now)
            adapter = request.turn.adapter if request.turn.adapter >= 0 else None
            self._predictor.observe(adapter, len(request.turn.prompt), request.given, request.predicted)

    def _wait(self) -> None:
        arrival = self._turns[self._sent].at_s if self._sent < len(self._turns) else math.inf
        self._now = min(arrival, self._link.next_end)
        if self._now == math.inf:
            raise SimulationError(f"{len(self._waiting)} requests wait for nothing, {len(self._prompts)} run")

    def _result(self) -> Answered:
        at_s = np.array([turn.at_s for turn in self._turns])
        steps = np.array([len(turn.answer) - 1 for turn in self._turns])
        seconds, running, waited = np.array(self._times).T
        weights = seconds * waited if waited.any() else seconds
        stats = self._steps.memory.adapters.stats
        with np.errstate(invalid="ignore"):
            tpot_s = (self._last - self._first) / np.where(steps, steps, np.nan)
        return Answered(
            first_s=self._first - at_s,
            tpot_s=tpot_s,
            end_s=self._now,
            running=float(np.average(running, weights=weights)),
            computed=self._computed,
            preemptions=self._preempted,
            sat_out=self._sat_out,
            adapter_hits=stats.hits / max(1, stats.hits + stats.misses),
        )
