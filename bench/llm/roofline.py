"""A decode step against the time that memory needs for its bytes, measured beside it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np
import torch

from pliant.bench.llm.our_kernels import decode
from pliant.bench.llm.workload import prompts
from pliant.bench.report import Figure, median
from pliant.kernels import huge_pages
from pliant.kernels.decoder.executor import Executor
from pliant.models.decoder_shape import DecoderShape

_TARGETS = {1: ">= 0.75"}
_READS = 5


def fractions(
    executor: Executor, dtype: torch.dtype, batches: tuple[int, ...], context: int, steps: int, repetitions: int
) -> list[Figure]:
    """For each batch: the floor, bytes that a step must read over what memory reads in a second, over the step's time.

    Texts are `context` tokens long on average. A step reads all weights but the embedding, of which it needs a row for
    each text, and the keys and values of all texts. Bandwidth is that of reading as many bytes on as many threads, in
    turn with the steps.
    """
    floors: dict[int, list[float]] = {batch: [] for batch in batches}
    took: dict[int, list[float]] = {batch: [] for batch in batches}
    buffers = {batch: _buffer(_bytes(executor.shape, dtype, batch, context)) for batch in batches}
    for repetition in range(repetitions):
        for batch in random.Random(repetition).sample(batches, len(batches)):
            floors[batch].append(_read_s(buffers[batch]))
            took[batch].append(step_s(executor, batch, context, steps))
    return [
        median(
            f"roofline_fraction_b{batch}",
            [floor / step for floor, step in zip(floors[batch], took[batch], strict=True)],
            _TARGETS.get(batch, ""),
            _beside(buffers[batch], floors[batch], took[batch]),
        )
        for batch in batches
    ]


def _bytes(shape: DecoderShape, dtype: torch.dtype, batch: int, context: int) -> int:
    """What a step must read."""
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    weights = (shape.parameters() - looked_up + batch * shape.hidden) * dtype.itemsize
    return weights + shape.kv_bytes(batch * context, dtype.itemsize)


def _buffer(size: int) -> torch.Tensor:
    """`size` bytes in memory of the kind that our weights lie in."""
    return torch.from_numpy(huge_pages.zeros([size // 4], np.float32)).fill_(1)


def _read_s(buffer: torch.Tensor) -> float:
    """The least time in which all of `buffer` was read on torch's threads, in one of three ways."""
    reads = (buffer.sum, buffer.amax, partial(buffer.dot, buffer))
    return min(_timed(read) for _ in range(_READS) for read in reads)


def step_s(executor: Executor, batch: int, context: int, steps: int) -> float:
    """The median time of a step, over `steps` steps around a text length of `context`."""
    texts = prompts(batch, context - steps // 2, executor.shape.vocab, seed=batch)
    tokens = decode(executor, texts, steps + 2)
    list(islice(tokens, 2))
    return statistics.median(_timed(lambda: next(tokens)) for _ in range(steps))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _beside(buffer: torch.Tensor, floors: list[float], took: list[float]) -> str:
    size = buffer.numel() * buffer.element_size()
    floor = statistics.median(floors)
    return (
        f"{size / 2**20:,.0f} MiB at {size / floor / 1e9:.3g} GB/s; a step takes {statistics.median(took) * 1e3:.3g} ms"
    )
