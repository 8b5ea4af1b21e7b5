"""A live decode step whose rows use adapters of mixed ranks, against the same step of the base model alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from pliant.bench.adapters import workload
from pliant.bench.adapters.folders import folders
from pliant.bench.llm.checkpoints import LARGE, Size, checkpoint
from pliant.bench.llm.our_kernels import GREEDY, decode, tables_of
from pliant.bench.llm.workload import prompts
from pliant.bench.report import Figure, ratio
from pliant.formats.adapter_info import AdapterInfo, read_adapter
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.decode_step import Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.kv_pages import pages_of

_BATCHES = (1, 8, 32)
_CONTEXT = 128
_ADAPTERS = 20
_DTYPE = "bfloat16"
_NO_INDICES = np.empty(0, np.int64)


def measure(threads: int, steps: int, repetitions: int, size: Size = LARGE) -> list[Figure]:
    """A figure for each batch; the greatest, of 32 rows, is `lora_overhead_vs_base`.

    Rows use adapters for q, k, v and o drawn by the paper's popularity. With and without take turns on the same
    texts. How much an adapter costs depends on its rank over the model's width: of a 7B model's it is a fifth of what
    it is here.
    """
    population = workload.population(_ADAPTERS)
    model = checkpoint(size, _DTYPE)
    slots, arena = _BATCHES[-1], 2**30
    loaded = executor.load(model, slots, 2 * _CONTEXT, _DTYPE, "cpu", threads, None, arena, max(workload.RANKS))
    loaded.keep_pages(slots * pages_of(2 * _CONTEXT))
    infos = [read_adapter(folder, loaded.shape) for folder in folders(size, population.ranks, _DTYPE)]
    for index, info in enumerate(infos):
        loaded.install(str(index), info.ranks, loaded.stage(info))
    return [_ratio(loaded, population, infos, batch, steps, repetitions) for batch in _BATCHES]


def _ratio(
    loaded: Executor,
    population: workload.Population,
    infos: Sequence[AdapterInfo],
    batch: int,
    steps: int,
    repetitions: int,
) -> Figure:
    list(decode(loaded, prompts(batch, _CONTEXT, loaded.shape.vocab, seed=batch), 2))
    took: dict[bool, list[float]] = {True: [], False: []}
    used = set()
    for repetition in range(repetitions):
        rng = np.random.default_rng(repetition)
        chosen = rng.choice(len(infos), batch, p=population.shares)
        used.add(len(set(chosen.tolist())))
        for adapted in random.Random(repetition).sample((True, False), 2):
            for slot, index in enumerate(chosen):
                loaded.admit(slot, GREEDY, str(index) if adapted else None)
            took[adapted].append(_step_s(loaded, batch, steps))
    name = "lora_overhead_vs_base" + ("" if batch == _BATCHES[-1] else f"_b{batch}")
    with_ms, without_ms = (statistics.median(took[adapted]) * 1e3 for adapted in (True, False))
    adapters = f"{min(used)} to {max(used)}" if len(used) > 1 else str(*used)
    beside = f"{with_ms:.3g} against {without_ms:.3g} ms; {batch} rows, {adapters} adapters"
    return ratio(name, took[True], took[False], "", beside)


def _step_s(loaded: Executor, batch: int, steps: int) -> float:
    """The median time of a step that computes the same token again."""
    lengths, indices = np.full(batch, _CONTEXT, np.int32), np.ones(batch, np.int64)
    tables, times = tables_of(loaded)[:batch], []
    for _ in range(steps):
        start = time.perf_counter()
        loaded.launch(Step((), 0, lengths, tables, indices, _NO_INDICES)).result()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
