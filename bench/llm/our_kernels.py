"""The paper's baselines over our kernels: what their policies cost, apart from what kernels gain (Flover §III)."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from pliant.bench.llm.outcome import Recorder
from pliant.bench.llm.systems import Batch
from pliant.bench.llm.workload import Integers
from pliant.kernels.decoder import cpu_kernels
from pliant.kernels.decoder.cpu_kernels import CpuKernels
from pliant.kernels.decoder.decode_step import Prefill, Step
from pliant.kernels.decoder.executor import DTYPES, Executor
from pliant.kernels.decoder.kv_pages import KVPages, pages_of
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.sampling import Sampler
from pliant.kernels.decoder.weights import SavedWeights
from pliant.kernels.huge_pages import Arena
from pliant.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
_NO_INDICES = np.empty(0, np.int64)
_NO_ROWS = np.empty(0, np.int32)


class StaticBatch:
    """Our kernels on a batch that nobody joins or leaves before its longest answer is there."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __call__(self, batch: Batch, recorder: Recorder) -> None:
        steps = max(request.tokens for _, request in batch)
        for step, _ in enumerate(decode(self._executor, [request.prompt for _, request in batch], steps)):
            recorder.note_all((index, 1) for index, request in batch if step < request.tokens)
            recorder.passes += 1


class Instances:
    """Our kernels for many threads at once: each call takes an executor that is free."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._free: queue.SimpleQueue[StaticBatch] = queue.SimpleQueue()
        for executor in executors:
            self._free.put(StaticBatch(executor))

    def __call__(self, batch: Batch, recorder: Recorder) -> None:
        instance = self._free.get()
        try:
            instance(batch, recorder)
        finally:
            self._free.put(instance)


def instances(folder: Path, count: int, max_length: int, dtype: str) -> list[Executor]:
    """Executors of one slot and one thread each, which share the packed weights and nothing else."""
    kind, device = DTYPES[dtype], torch.device("cpu")
    weights = SavedWeights(folder, kind, device)
    arena = _SameTensors()
    executors = []
    for _ in range(count):
        kernels = cpu_kernels.best(threads=1)
        if isinstance(kernels, CpuKernels):
            kernels.arena = arena.again()
        with torch.inference_mode():
            kv = KVPages(weights.shape, 1, max_length, kind, device, kernels)
            decoder = Decoder(weights, kernels, kv)
        executors.append(Executor(decoder, Sampler(1, weights.shape.vocab, device, kv.max_length)))
    return executors


class _SameTensors(Arena):
    """Memory for packed weights that gives every decoder the arrays of the first, which the others fill alike."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[np.ndarray] = []
        self._next = 0

    def again(self) -> _SameTensors:
        """From the first array on."""
        self._next = 0
        return self

    def zeros(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        if self._next == len(self._given):
            self._given.append(super().zeros(shape, dtype))
        array = self._given[self._next]
        self._next += 1
        assert array.shape == tuple(shape)
        return array


def decode(executor: Executor, prompts: Sequence[Integers], steps: int, offset: int = 0) -> Iterator[NDArray[np.int64]]:
    """Greedy tokens of a batch in the slots from `offset` on, [batch] for each step; prompts may differ in length."""
    count = len(prompts)
    for slot in range(offset, offset + count):
        executor.admit(slot, GREEDY)
    tables = tables_of(executor)[offset : offset + count]
    whole = zip(range(offset, offset + count), prompts, tables, strict=True)
    prefills = tuple(Prefill(slot, 0, prompt.astype(np.int32), True, table) for slot, prompt, table in whole)
    step = Step(prefills, 0, _NO_ROWS, tables[:0], _NO_INDICES, np.zeros(count, np.int64))
    yield executor.launch(step).result().first
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for index in range(1, steps):
        step = Step((), offset, lengths + np.int32(index - 1), tables, np.full(count, index), _NO_INDICES)
        yield executor.launch(step).result().tokens


def tables_of(executor: Executor) -> NDArray[np.int32]:
    """Pages for the longest text in every slot, one slot behind the other, [slots, pages]."""
    pages = pages_of(executor.max_length)
    return np.arange(1, executor.slots * pages + 1, dtype=np.int32).reshape(-1, pages)
