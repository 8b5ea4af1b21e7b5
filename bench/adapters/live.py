"""The live engine on a CPU: our scheduler and cache against S-LoRA's policy, on the same kernels and loader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pliant.bench.adapters import workload
from pliant.bench.adapters.folders import folders
from pliant.bench.llm.checkpoints import SMALL, checkpoint
from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.ours import STALL_S
from pliant.bench.llm.outcome import Outcome, Recorder
from pliant.bench.llm.workload import Request
from pliant.bench.report import Figure, ratio
from pliant.deployments.llm.adapter_loader import AdapterLoader, PeftFolders
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation
from pliant.deployments.llm.waiting_room import AnswerScheduler
from pliant.formats.adapter_info import AdapterRef, read_adapter
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.executor import DTYPES, Executor
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues
from pliant.policies.llm.request_scheduler import Scheduler

_DTYPE = "bfloat16"
_ADAPTERS = 100
_SLOTS = 16
_MAX_LENGTH = 512
_ARENA = 128 * 2**20
"""Bytes: all slots take 72 MiB, and all adapters would take 175."""
_SCALE = 0.08
"""Of the trace's lengths, so that the longest fit."""
_LOADS = 8
"""As many as the loader takes."""
_AT_ONCE = 100
_LOAD = 0.8
"""Of what S-LoRA's policy answers when everything comes at once."""
_SLO_S = 5.0
_QUEUE = 100_000

_S_LORA, _CACHED, _OURS = "S-LoRA", "S-LoRA with our cache", "ours"


@dataclass(frozen=True)
class Scale:
    """Seconds that requests come for in each run, and how often each system runs."""

    seconds: float
    repetitions: int


@dataclass(frozen=True)
class _Sent:
    """Requests, and the adapter of each."""

    requests: Sequence[Request]
    adapters: Sequence[AdapterRef]


def compare(scale: Scale, data: Path | None, threads: int) -> list[Figure]:
    """P99 of the time to first token on 15M parameters, 100 adapters, and memory for a third of them beside all slots.

    All systems get the same requests, in turn and in another order each time, at four fifths of the rate at which
    S-LoRA's policy answers requests that come all at once.
    """
    population = workload.population(_ADAPTERS)
    systems = {name: _System(name, threads) for name in (_S_LORA, _CACHED, _OURS)}
    try:
        refs = _refs(systems[_OURS].executor, population)
        rate = _saturated(systems, population, refs, data)
        p99: dict[str, list[float]] = {name: [] for name in systems}
        for repetition in range(scale.repetitions):
            sent = _sent(rate * _LOAD, scale.seconds, population, refs, data, seed=1 + repetition)
            for name in random.Random(repetition).sample(sorted(systems), len(systems)):
                outcome = systems[name].run(sent)
                p99[name].append(float(np.quantile(outcome.to_first_token, 0.99)))
    finally:
        for system in systems.values():
            system.close()
    beside = f"{rate * _LOAD:.1f} requests/s, " + ", ".join(
        f"{name} {np.median(values) * 1e3:.0f} ms" for name, values in p99.items()
    )
    return [
        ratio("p99_ttft_live_vs_slora", p99[_OURS], p99[_S_LORA], "< 1", beside),
        ratio("cache_p99_live_vs_none", p99[_CACHED], p99[_S_LORA], "< 1", beside),
    ]


class _System:
    """An engine of its own, with memory of its own."""

    def __init__(self, name: str, threads: int) -> None:
        folder = checkpoint(SMALL, _DTYPE)
        most_rank = max(workload.RANKS)
        self.executor = executor.load(folder, _SLOTS, _MAX_LENGTH, _DTYPE, "cpu", threads, None, _ARENA, most_rank)
        self._engine = Engine(
            self.executor,
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            (),
            queue=_QUEUE,
            stall_s=STALL_S,
            scheduler=_scheduler(name, self.executor),
            loader=AdapterLoader(PeftFolders(self.executor, DTYPES[_DTYPE].itemsize, most_rank)),
        )
        self._engine.rehearse()
        self._asked = 0

    def run(self, sent: _Sent) -> Outcome:
        """Every request from its arrival on, to its last token."""
        engine, requests = self._engine, sent.requests
        engine.forget()
        recorder = Recorder(threads=1)
        first, next_, done = self._asked, 0, 0
        while done < len(requests):
            while next_ < len(requests) and requests[next_].at_s <= recorder.now():
                engine.add(_generation(first + next_, requests[next_], sent.adapters[next_]))
                next_ += 1
            if not engine.busy:
                recorder.wait_until(requests[next_].at_s)
                continue
            for name, piece in engine.step():
                if isinstance(piece, Exception):
                    raise piece
                recorder.note(int(name) - first, len(piece.tokens))
                done += piece.finish is not None
        self._asked += len(requests)
        return recorder.outcome(requests)

    def close(self) -> None:
        self._engine.close()


def _scheduler(name: str, loaded: Executor) -> AnswerScheduler:
    queues: Queues[Answer, AdapterRef] = MultiQueue(QueueClasses(_SLO_S)) if name == _OURS else Fifo()
    cache = AdapterCache[AdapterRef]("none" if name == _S_LORA else "joint")
    return Scheduler(queues, cache, loaded.arena_bytes, loads=_LOADS, slots=loaded.slots)


def _refs(loaded: Executor, population: workload.Population) -> list[AdapterRef]:
    paths = folders(SMALL, population.ranks, _DTYPE)
    return [read_adapter(path, loaded.shape).ref(path.name) for path in paths]


def _saturated(
    systems: dict[str, _System], population: workload.Population, refs: Sequence[AdapterRef], data: Path | None
) -> float:
    """Requests per second of S-LoRA's policy when all come at once; the other systems are warmed up alike."""
    at_once = _sent(_AT_ONCE / 1e-3, 1e-3, population, refs, data, seed=0)
    totals = {name: system.run(at_once).total_s for name, system in systems.items()}
    return len(at_once.requests) / totals[_S_LORA]


def _sent(
    rate: float,
    seconds: float,
    population: workload.Population,
    refs: Sequence[AdapterRef],
    data: Path | None,
    seed: int,
) -> _Sent:
    """Random tokens of the trace's lengths, scaled to the model."""
    lengths = workload.conversations(data).scaled(_SCALE)
    drawn = workload.poisson(rate, seconds, lengths, population, seed)
    tokens = np.random.default_rng(seed)
    requests = [Request(tokens.integers(SMALL.vocab, size=each.prompt), each.output, each.at_s) for each in drawn]
    return _Sent(requests, [refs[each.adapter] for each in drawn])


def _generation(id: int, request: Request, adapter: AdapterRef) -> Generation:
    return Generation(
        id=str(id),
        prompt=tuple(request.prompt.tolist()),
        max_tokens=request.tokens,
        sampling=GREEDY,
        ignore_eos=True,
        first_token_within_s=None,
        adapter=adapter,
    )
