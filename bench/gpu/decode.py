"""Decode steps against what memory allows: by model, rows and length of texts, and by the adapters in a step.

Company too: what 32 requests at once cost each of them (Flover §VI-B).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pliant.bench.gpu import decoders
from pliant.bench.gpu.probe import bandwidth
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.bench.llm.our_kernels import GREEDY
from pliant.kernels.decoder.decode_step import Launched, Prefill, Step
from pliant.kernels.decoder.executor import Executor, kernels_for
from pliant.kernels.decoder.kv_pages import KVPages, pages_of
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.sampling import Sampler
from pliant.kernels.decoder.weights import RandomWeights
from pliant.models.decoder_shape import DecoderShape, Quantize
from pliant.models.lora_layout import MODULES, LoraLayout

_NO_INDICES: NDArray[np.int64] = np.empty(0, np.int64)
_MEMORY_SHARE = 0.85
"""Of what is free that weights, pages and adapters take; graphs and activations have the rest."""
_DRY_BYTES = 2**26


@dataclass(frozen=True)
class Grid:
    """What is measured. Lengths are in tokens."""

    models: tuple[tuple[str, Quantize | None], ...] = (("8B", None), ("8B_fp8", "fp8"), ("1B", None), ("14B", None))
    rows: tuple[int, ...] = (1, 8, 32, 64, 128)
    texts: tuple[int, ...] = (512, 2048, 8192, 32768)
    steps: int = 16
    repetitions: int = 3
    adapters: tuple[int, ...] = (0, 16, 64)
    rank: int = 16
    prompt: int = 128
    answer: int = 128


_DRY = Grid(
    models=(("8B", None), ("8B_fp8", "fp8")),
    rows=(1, 3),
    texts=(20, 70),
    steps=2,
    repetitions=1,
    adapters=(0, 1, 2),
    prompt=8,
    answer=4,
)


def run(record: Record, scale: Scale) -> None:
    """The 8B model first, which the goals are about."""
    grid = _DRY if scale.dry else Grid()
    moved = bandwidth(scale)
    record.figures["bytes_per_s"] = moved
    for name, quantize in grid.models:
        with record.part(name):
            executor = _executor(decoders.shape(name.partition("_")[0], scale.dry), scale, grid, quantize)
            _roofline(record, name, executor, grid, moved, scale, quantize)
            if name == "8B":
                _company(record, executor, grid)
                _adapters(record, executor, grid, scale.dtype)
            del executor


@torch.inference_mode()
def _executor(shape: DecoderShape, scale: Scale, grid: Grid, quantize: Quantize | None = None) -> Executor:
    """With room for the most pages that the device has memory for; keys and values are random, as zeros compute
    faster."""
    kernels, kind = kernels_for(scale.device, threads=1, quantize=quantize)
    weights = RandomWeights(shape, scale.dtype, scale.device, quantize=quantize)
    budget = _DRY_BYTES
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later is not free
        budget = int(_MEMORY_SHARE * torch.cuda.mem_get_info(scale.device)[0]) - weights.nbytes
    slots, longest = max(grid.rows), max(grid.texts) + grid.steps + 8
    kv = KVPages(shape, slots, longest, scale.dtype, scale.device, kernels, budget, budget, weights.kv_dtype)
    decoder = Decoder(weights, kernels, kv)
    for layer in range(shape.layers):
        for values in kv.layer(layer):
            values.copy_(torch.randn_like(values, dtype=scale.dtype))
    return kind(decoder, Sampler(slots, shape.vocab, scale.device, longest), grid.rank)


def _roofline(
    record: Record,
    name: str,
    executor: Executor,
    grid: Grid,
    moved: float,
    scale: Scale,
    quantize: Quantize | None = None,
) -> None:
    """Fractions of the floor, bytes that a step must read over bytes that memory moves, by rows and length."""
    table: list[dict[str, float]] = []
    record.tables[f"steps of {name}"] = table
    itemsize = 1 if quantize == "fp8" else scale.dtype.itemsize
    for text in grid.texts:
        for rows in grid.rows:
            if not _fits(executor, rows, text + grid.steps):
                record.skipped[f"{name}, {rows} rows of {text:,}"] = "its pages are more than the memory holds"
                continue
            took = statistics.median(step_s(executor, rows, text, grid.steps) for _ in range(grid.repetitions))
            floor = step_bytes(executor.shape, rows, text, itemsize) / moved
            table.append({"rows": rows, "text": text, "seconds": took, "floor_s": floor})
            if text == grid.texts[0]:
                record.figures[f"roofline_fraction_{name}_b{rows}"] = floor / took
            record.save()


def _company(record: Record, executor: Executor, grid: Grid) -> None:
    """Mean latency of requests at once over that of one alone."""

    def mean_s(count: int) -> float:
        runs = (at_once_s(executor, count, grid.prompt, grid.answer) for _ in range(grid.repetitions))
        return statistics.median(runs)

    mean_s(1)
    alone = mean_s(1)
    for count in grid.rows[1:]:
        record.figures[f"latency_inflation_{count}"] = mean_s(count) / alone


def _adapters(record: Record, executor: Executor, grid: Grid, dtype: torch.dtype) -> None:
    """Steps whose rows share so many adapters, over steps without any."""
    text, most = grid.texts[0], max(grid.adapters)
    rows = min(64, max(grid.rows))
    ranks = [grid.rank] * len(MODULES)
    executor.keep_pages(rows * pages_of(text + grid.steps + 1))
    blob = torch.randn(LoraLayout(executor.shape, ranks).values).to(dtype) / 64
    base = 0.0
    for index in range(most):
        executor.install(str(index), ranks, blob)
    for count in grid.adapters:
        adapters = [str(row % count) if count else None for row in range(rows)]
        runs = (step_s(executor, rows, text, grid.steps, adapters) for _ in range(grid.repetitions))
        took = statistics.median(runs)
        base = base or took
        record.figures[f"adapters_{count}_of_rank_{grid.rank}"] = took / base


def _tables(rows: int, text: int) -> NDArray[np.int32]:
    """Pages for `rows` texts of so many tokens, one behind the other, [rows, pages]."""
    pages = pages_of(text)
    return np.arange(1, rows * pages + 1, dtype=np.int32).reshape(rows, pages)


def _fits(executor: Executor, rows: int, text: int) -> bool:
    return rows * pages_of(text + 1) <= executor.arena_bytes // executor.page_bytes


def step_s(executor: Executor, rows: int, text: int, steps: int, adapters: Sequence[str | None] | None = None) -> float:
    """Seconds of a step of `rows` texts of about `text` tokens, each launched before the one before it is read."""
    for row in range(rows):
        executor.admit(row, GREEDY, adapters[row] if adapters else None)
    tables = _tables(rows, text + steps + 1)
    lengths, indices = np.full(rows, text - steps // 2, np.int32), np.zeros(rows, np.int64)

    def launch(step: int) -> Launched:
        return executor.launch(Step((), 0, lengths + np.int32(step), tables, indices, _NO_INDICES))

    under_way, start = launch(0), 0.0
    for step in range(1, steps + 1):
        following = launch(step)
        under_way.result()
        start = start or time.perf_counter()
        under_way = following
    under_way.result()
    return (time.perf_counter() - start) / steps


def step_bytes(shape: DecoderShape, rows: int, text: int, itemsize: int) -> int:
    """What a step must read: all weights but the embedding, of which a row for each text, and all texts."""
    looked_up = 0 if shape.tied else (shape.vocab - rows) * shape.hidden
    return itemsize * (shape.parameters() - looked_up) + shape.kv_bytes(rows * text, itemsize)


def at_once_s(executor: Executor, count: int, prompt: int, answer: int) -> float:
    """From the start to the last token of `count` requests that come at once, with prompts and answers of one length.

    All end in the same step, so that this is what each of them takes.
    """
    rng = np.random.default_rng(count)
    tables = _tables(count, prompt + answer)
    for slot in range(count):
        executor.admit(slot, GREEDY)
    ids = rng.integers(executor.vocabulary, size=(count, prompt), dtype=np.int32)
    prefills = tuple(Prefill(slot, 0, ids[slot], True, tables[slot]) for slot in range(count))
    indices: Any = np.zeros(count, np.int64)
    begin = time.perf_counter()
    under_way = executor.launch(Step(prefills, 0, np.empty(0, np.int32), tables[:0], _NO_INDICES, indices))
    for step in range(answer - 1):
        lengths = np.full(count, prompt + step, np.int32)
        following = executor.launch(Step((), 0, lengths, tables, indices + step + 1, _NO_INDICES))
        under_way.result()
        under_way = following
    under_way.result()
    return time.perf_counter() - begin
