"""What a conversation's second turn waits for its first token, when the first is kept and when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pliant.bench.findings import Findings
from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.workload import prompts
from pliant.bench.report import Row, ratio
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece


@dataclass(frozen=True)
class Scale:
    """Tokens of the first prompt, of its answer, and of what the second turn adds."""

    prompt: int
    answer: int
    new: int
    repetitions: int

    @property
    def runs(self) -> int:
        """Conversations."""
        return self.repetitions


def measure(engine: Engine, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """Each conversation's second turn is asked twice, first where its first turn is kept and then where nothing is."""
    warm, cold = [], []
    for repetition in range(scale.repetitions):
        first, new = prompts(2, max(scale.prompt, scale.new), vocab, seed=repetition)
        said = first[: scale.prompt].tolist()
        engine.forget()
        answer, _ = _answer(engine, said, scale.answer)
        second = [*said, *answer, *new[: scale.new].tolist()]
        warm.append(_answer(engine, second, 1)[1])
        engine.forget()
        cold.append(_answer(engine, second, 1)[1])
        done()
    beside = f"{scale.prompt} tokens, {scale.answer} of the answer and {scale.new} more"
    figure = ratio("second_turn_ttft_vs_cold", warm, cold, "<= 0.25", beside)
    return Findings([figure], [Row("Beyond: second turn's first token, kept ÷ not", "", f"{figure.value:.2f}")])


def _answer(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """The tokens, and the seconds to the first of them."""
    began = time.perf_counter()
    engine.add(Generation("turn", tuple(prompt), tokens, GREEDY, ignore_eos=True))
    said: list[int] = []
    first_s = 0.0
    while engine.busy:
        for _, piece in engine.step():
            assert isinstance(piece, Piece), piece
            first_s = first_s or time.perf_counter() - began
            said += piece.tokens
    return said, first_s
