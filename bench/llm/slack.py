"""A file of requests beside live ones: what these notice of it, and how much of the idle time it uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from pliant.bench.findings import Findings
from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.workload import Integers, Request, Workload, at_once, poisson, prompts, uniform_lengths
from pliant.bench.report import median, ratio
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.loop import EngineLoop
from pliant.deployments.llm.precedence import Precedence
from pliant.deployments.llm.request import Generation, Piece

_AT_A_TIME = 8
"""Requests of a file, as a gateway sends them."""
_ANSWERS = (32, 96)
"""Tokens of live answers."""
_FILE_ANSWER = 64
_PROMPT = 64
_SOLO = 9
"""Live answers computed alone, the first of them for nothing."""
_ALONE = 8
"""Answers to each of the requests at a time, by which it is measured how fast a file alone gets on."""
_WITHOUT_END = 2**62
_CALM_S = 0.5
"""After live requests, until the file gets on at once."""
_LOAD = 0.7
"""Live answers that arrive while one is computed alone: nobody is there for about half of the time."""

LENGTH = _PROMPT + max(*_ANSWERS, _FILE_ANSWER)
"""Tokens that a slot must have."""
SLOTS = 32


@dataclass(frozen=True)
class Scale:
    """Live requests of a block, and pairs of blocks."""

    requests: int
    repetitions: int

    @property
    def runs(self) -> int:
        return self.repetitions


class _Block(NamedTuple):
    """What live requests got in seconds, by request, and the file in tokens."""

    per_token: Sequence[float]
    first: Sequence[float]
    idle_s: float
    """No live request was there."""
    file_tokens: int
    total_s: float


def measure(engine: Engine, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """The same live requests beside a file of requests and without, in turn, on a replica's engine and precedence."""
    return asyncio.run(_measure(engine, scale, vocab, done))


async def _measure(engine: Engine, scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    loop = EngineLoop(engine)
    try:
        service = _Service(Precedence(loop.generate), vocab)
        texts = prompts(scale.requests, _PROMPT, vocab, seed=0)
        live = at_once(texts, uniform_lengths(scale.requests, *_ANSWERS, seed=0))
        solo_s = [(await service.run([request], file=False)).total_s for request in live[:_SOLO]]
        mean_s = sum(solo_s[1:]) / (_SOLO - 1)
        arriving = poisson(mean_s / _LOAD, live, seed=0)
        with_file: list[_Block] = []
        without: list[_Block] = []
        alone_per_s: list[float] = []
        for repetition in range(scale.repetitions):
            turns = [(with_file, True), (without, False)]
            for blocks, file in turns if repetition % 2 else reversed(turns):
                blocks.append(await service.run(arriving, file))
            alone_per_s.append(await service.file_alone())
            done()
    finally:
        loop.close()
    used = [
        block.file_tokens / (per_s * idle.idle_s)
        for block, idle, per_s in zip(with_file, without, alone_per_s, strict=True)
    ]
    idle = sum(block.idle_s for block in without) / sum(block.total_s for block in without)
    return Findings(
        [
            ratio(
                "batch_slack_interference",
                [_p99(block.per_token) for block in with_file],
                [_p99(block.per_token) for block in without],
                "<= 1.1",
                f"P99 of the time per token of {scale.requests} answers",
            ),
            ratio(
                "batch_slack_first_token",
                [_p99(block.first) for block in with_file],
                [_p99(block.first) for block in without],
                beside="P99 of the time to the first token",
            ),
            median(
                "batch_idle_share_used", used, beside=f"of the tokens that the {idle:.0%} without live requests allow"
            ),
        ]
    )


class _Service:
    """Live requests, and a file without end, on one replica's engine."""

    def __init__(self, precedence: Precedence, vocab: int) -> None:
        self._precedence = precedence
        self._vocab = vocab
        self._names = count()
        self._live = 0
        self._file_tokens = 0

    async def run(self, workload: Workload, file: bool) -> _Block:
        """Until the last live request is answered."""
        idle_s, idle_since = 0.0, time.perf_counter()
        began = idle_since

        async def ask(request: Request) -> tuple[float, float]:
            nonlocal idle_s, idle_since
            await asyncio.sleep(began + request.at_s - time.perf_counter())
            if not self._live:
                idle_s += time.perf_counter() - idle_since
            self._live += 1
            times = [time.perf_counter()]
            async for piece in self._answer(request.prompt, request.tokens, background=False):
                times += [time.perf_counter()] * len(piece.tokens)
            self._live -= 1
            idle_since = time.perf_counter()
            return times[1] - times[0], (times[-1] - times[1]) / (request.tokens - 1)

        async with self._filled(file):
            answered = await asyncio.gather(*map(ask, workload))
        first, per_token = zip(*answered, strict=True)
        return _Block(per_token, first, idle_s, self._file_tokens, time.perf_counter() - began)

    async def file_alone(self) -> float:
        """Its tokens per second where nobody else is there."""
        await asyncio.sleep(_CALM_S)
        began = time.perf_counter()
        await asyncio.gather(*(self._work(_ALONE) for _ in range(_AT_A_TIME)))
        return _AT_A_TIME * _ALONE * _FILE_ANSWER / (time.perf_counter() - began)

    @asynccontextmanager
    async def _filled(self, file: bool) -> AsyncGenerator[None, None]:
        """Meanwhile the requests of a file are answered, if there is to be one."""
        self._file_tokens = 0
        workers = [asyncio.create_task(self._work(_WITHOUT_END)) for _ in range(_AT_A_TIME if file else 0)]
        try:
            yield
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, answers: int) -> None:
        for _ in range(answers):
            [prompt] = prompts(1, _PROMPT, self._vocab, seed=next(self._names))
            async for piece in self._answer(prompt, _FILE_ANSWER, background=True):
                self._file_tokens += len(piece.tokens)

    async def _answer(self, prompt: Integers, tokens: int, background: bool) -> AsyncGenerator[Piece, None]:
        wanted = Generation(
            str(next(self._names)), tuple(prompt.tolist()), tokens, GREEDY, ignore_eos=True, background=background
        )
        async with aclosing(self._precedence.generate(wanted)) as pieces:
            async for piece in pieces:
                if piece:
                    yield piece


def _p99(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99))
