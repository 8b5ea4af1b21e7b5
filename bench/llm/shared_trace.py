"""What sharing prefixes gains on the live engine: conversations of Mooncake's trace, with their lengths divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pliant.bench.findings import Findings
from pliant.bench.llm.systems import System
from pliant.bench.llm.workload import Integers, Request, Workload
from pliant.bench.pages.workload import BLOCK, shared_prefixes
from pliant.bench.report import Row, ratio
from pliant.simulation.llm.one_pass import Turn

DIVISOR = 32
"""Of lengths: what an id of the trace stands for is a page then."""
LONGEST = 512
"""Tokens of a prompt and its answer; longer ones are left out."""
_BLOCK = BLOCK // DIVISOR
_WARM = 8
"""Requests before what is measured."""


@dataclass(frozen=True)
class Scale:
    """One conversation of so many is asked."""

    one_of: int
    repetitions: int

    @property
    def runs(self) -> int:
        """On ours, with and without common prefixes."""
        return 2 * self.repetitions


def measure(ours: System, data: Path, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """All at once, in the trace's order, and the same lengths where no two requests begin alike, in turn."""
    turns = _conversations(shared_prefixes(data, DIVISOR, pace=1.0), scale.one_of)
    sharing, apart = _workload(turns, vocab, together=True), _workload(turns, vocab, together=False)
    with_: list[float] = []
    without: list[float] = []
    ours.run(apart[:_WARM])
    for _ in range(scale.repetitions):
        for workload, seconds in ((sharing, with_), (apart, without)):
            seconds.append(ours.run(workload).total_s)
            done()
    tokens = sum(len(turn.prompt) for turn in turns)
    beside = f"{len(turns)} requests, {tokens} tokens of prompts"
    figure = ratio("shared_trace_throughput_vs_apart", without, with_, ">= 1.5", beside)
    return Findings([figure], [Row("Beyond: Mooncake's trace, prefixes shared ÷ not", "", f"{figure.value:.2f}")])


def _conversations(turns: Sequence[Turn], one_of: int) -> list[Turn]:
    """Those that begin with the same block are a conversation; which are drawn is always the same."""
    starts = {turn.prompt[0] // _BLOCK for turn in turns}
    chosen = {start for start in starts if np.random.default_rng(start).random() < 1 / one_of}
    fitting = (turn for turn in turns if len(turn.prompt) + len(turn.answer) <= LONGEST)
    return [turn for turn in fitting if turn.prompt[0] // _BLOCK in chosen]


def _workload(turns: Sequence[Turn], vocab: int, *, together: bool) -> Workload:
    requests = []
    for number, turn in enumerate(turns):
        if together:
            blocks = [_block(turn.prompt[at] // _BLOCK, vocab) for at in range(0, len(turn.prompt), _BLOCK)]
            prompt = np.concatenate(blocks)[: len(turn.prompt)]
        else:
            prompt = np.random.default_rng((number, 1)).integers(vocab, size=len(turn.prompt))
        requests.append(Request(prompt, len(turn.answer)))
    return requests


def _block(number: int, vocab: int) -> Integers:
    return np.random.default_rng((number, 0)).integers(vocab, size=_BLOCK)
