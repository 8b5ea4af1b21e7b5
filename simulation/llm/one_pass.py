"""A replica that takes answers and prompt chunks in one pass, over pages: the live policies under a cost model.

Each iteration is a step of the scheduler's: what is loaded is told to it, it decides, its rows are computed, the next
begins. What a pass takes is what the scheduler predicts, as a live one learns it from its own passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.idle_memory import Costs as BringsBack
from pliant.policies.llm.idle_memory import IdleMemory, Root
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.passes import Order, Work, chunk, token
from pliant.policies.llm.step_requests import Prompt, Step
from pliant.policies.llm.step_scheduler import StepScheduler
from pliant.policies.llm.worth import Eviction
from pliant.simulation.arrivals import Floats
from pliant.simulation.llm.hardware import ADAPTER_FLOP, BANDWIDTH_SHARE, FLOPS_SHARE, Costs
from pliant.simulation.llm.loads import Loads
from pliant.simulation.llm.simulator import SimulationError

Keep = Literal["joint", "lru", "adapters", "prefixes", "none"]
"""What stays when nobody uses it: adapters and prefixes, by what they save or by when they were used last; or only the
ones, as Chameleon has it, or the others, by what they save; or nothing."""

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
class PassCosts:
    """Seconds of passes on a machine; with `apart`, prompts and answers are two passes, each over all weights."""

    machine: Costs
    apart: bool = False

    def pass_s(self, work: Work) -> float:
        """As long as reading the weights or as the operations, whichever is longer; and what is read for each row."""
        computed_s = self._computed_s(work.tokens, work.pairs)
        if self.apart and work.rows and work.prompt:
            prompts_s = max(self._weights_s, self._computed_s(work.prompt, work.pairs))
            base_s = prompts_s + max(self._weights_s, self._computed_s(work.rows, 0))
        else:
            base_s = max(self._weights_s, computed_s)
        read = work.stored * self.machine.model.token_bytes + work.adapter_bytes
        adapters_s = ADAPTER_FLOP * work.adapter_tokens / self._flops
        return base_s + adapters_s + read / (self.machine.gpu.bandwidth * BANDWIDTH_SHARE)

    def prompt_s(self, tokens: int, before: int) -> float:
        """What a chunk adds to a pass that is large anyway."""
        return self._computed_s(tokens, chunk(tokens, before, 0).pairs)

    def load_s(self, bytes: int) -> float:
        """On an idle link."""
        return self.machine.link.seconds(bytes)

    def _computed_s(self, tokens: int, pairs: int) -> float:
        model = self.machine.model
        return (2 * model.parameters * tokens + 4 * model.layers * model.hidden * pairs) / self._flops

    @cached_property
    def _flops(self) -> float:
        return self.machine.gpu.flops * FLOPS_SHARE

    @cached_property
    def _weights_s(self) -> float:
        return self.machine.model.bytes / (self.machine.gpu.bandwidth * BANDWIDTH_SHARE)


@dataclass(frozen=True)
class Replica:
    """How a replica is set up."""

    machine: Costs
    page_tokens: int = 16
    rows: int = 256
    keep: Keep = "joint"
    order: Order = "shortest"
    apart: bool = False
    tpot_s: float = 0.15
    loads: int = 8


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
    adapter_hits: float
    """Share of requests whose adapter was there when they arrived."""


def memory_of(total: int, page_bytes: int, page_tokens: int, costs: BringsBack, keep: Keep) -> IdleMemory[Any, Any]:
    """`total` bytes in which nobody has anything yet."""
    pages: Pages[Any, Root[Any]] = Pages(total // page_bytes, page_tokens)
    prefixes = keep not in ("adapters", "none")
    return IdleMemory(pages, page_bytes, total, AdapterCache(_SCORES[keep]), costs, prefixes)


def simulate(replica: Replica, turns: Sequence[Turn], sizes: Sequence[int] = (), debug: bool = False) -> Answered:
    """Answer `turns`, which are in order of arrival; `sizes` are the bytes of adapters. Raises SimulationError."""
    return _Simulation(replica, turns, sizes, debug).run()


class _Simulation:
    def __init__(self, replica: Replica, turns: Sequence[Turn], sizes: Sequence[int], debug: bool) -> None:
        machine = replica.machine
        page_bytes = replica.page_tokens * machine.model.token_bytes
        self._costs = PassCosts(machine, replica.apart)
        memory: IdleMemory[int, int] = memory_of(
            machine.memory, page_bytes, replica.page_tokens, self._costs, replica.keep
        )
        self._pages = memory.pages
        self._scheduler = StepScheduler(memory, self._costs, replica.rows, replica.order, loads=replica.loads)
        self._replica, self._turns, self._sizes, self._debug = replica, turns, sizes, debug
        self._link = Loads(machine)
        self._given = [0] * len(turns)
        self._first, self._last = np.full((2, len(turns)), np.nan)
        self._now = 0.0
        self._sent = self._answered = self._computed = 0
        self._times: list[tuple[float, int, bool]] = []
        """Seconds of each pass, how many ran, and whether others waited."""

    def run(self) -> Answered:
        while self._answered < len(self._turns):
            self._receive()
            step = self._scheduler.schedule(self._now)
            for adapter in step.load:
                self._link.load(adapter, self._sizes[adapter], self._now)
            if step.rows:
                self._compute(step)
            else:
                self._wait()
            if self._debug:
                self._scheduler.check()
        return self._result()

    def _receive(self) -> None:
        while self._sent < len(self._turns) and self._turns[self._sent].at_s <= self._now:
            self._add(self._sent)
            self._sent += 1
        while self._link.next_end <= self._now:
            self._scheduler.loaded(self._link.under_way.popleft()[1], self._now)

    def _add(self, key: int) -> None:
        turn = self._turns[key]
        adapter, size = (turn.adapter, self._sizes[turn.adapter]) if turn.adapter >= 0 else (None, 0)
        output = len(turn.answer)
        predicted = output if turn.predicted is None else turn.predicted
        prompt = Prompt(
            key, Root(adapter, turn.tenant), turn.prompt, predicted, output, size, turn.at_s, self._replica.tpot_s
        )
        self._scheduler.add(prompt, self._now)

    def _compute(self, step: Step[int, int]) -> None:
        work, drawn = Work(), {}
        for key, tokens in step.rows.items():
            turn, before = self._turns[key], self._pages.computed(key)
            size = self._sizes[turn.adapter] if turn.adapter >= 0 else 0
            answers = tokens == 1 and self._given[key] > 0
            work = work.plus(token(before, size) if answers else chunk(tokens, before, size))
            if before + tokens == len(turn.prompt) + self._given[key]:
                drawn[key] = turn.answer[self._given[key]]
        seconds = self._costs.pass_s(work)
        self._now += seconds
        self._computed += work.prompt
        self._times.append((seconds, self._scheduler.running, self._scheduler.waiting > 0))
        self._scheduler.finish(step, drawn, self._now)
        for key in drawn:
            self._given[key] += 1
            if np.isnan(self._first[key]):
                self._first[key] = self._now
            if self._given[key] == len(self._turns[key].answer):
                self._last[key] = self._now
                self._answered += 1
                self._scheduler.ended(key, self._now)

    def _wait(self) -> None:
        arrival = self._turns[self._sent].at_s if self._sent < len(self._turns) else math.inf
        self._now = min(arrival, self._link.next_end)
        if self._now == math.inf:
            raise SimulationError(f"{self._scheduler.waiting} requests wait for nothing, {self._scheduler.running} run")

    def _result(self) -> Answered:
        at_s = np.array([turn.at_s for turn in self._turns])
        steps = np.array([len(turn.answer) - 1 for turn in self._turns])
        seconds, running, waited = np.array(self._times).T
        weights = seconds * waited if waited.any() else seconds
        stats = self._scheduler.memory.adapters.stats
        with np.errstate(invalid="ignore"):
            tpot_s = (self._last - self._first) / np.where(steps, steps, np.nan)
        return Answered(
            first_s=self._first - at_s,
            tpot_s=tpot_s,
            end_s=self._now,
            running=float(np.average(running, weights=weights)),
            computed=self._computed,
            preemptions=self._scheduler.preemptions,
            adapter_hits=stats.hits / max(1, stats.hits + stats.misses),
        )
