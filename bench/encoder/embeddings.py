"""Embeddings: ours against sentence-transformers, in one process on one thread, without servers; tokenizing counts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from pliant import torchvision_ops
from pliant.bench import workloads
from pliant.bench.load import LoadError
from pliant.bench.report import Figure, ratio
from pliant.kernels.encoder import timed_runtime
from pliant.kernels.encoder.texts import Text
from pliant.models import sources
from pliant.policies.encoder.batching import Batcher, PackedTimes, Waiting

_MODEL = "zoo/topics-embedding"
_LONGEST = 512
_TEXTS = 96
_BATCHES = (8, 32)
"""Those of sentence-transformers, which sorts texts by length; the fastest counts."""
_ROUNDS = 5
_ALIKE = 0.999


def figures(data: Path | None) -> list[Figure]:
    """Texts per second, over interleaved rounds. Raises LoadError unless vectors point the same way."""
    torchvision_ops.declare()
    from sentence_transformers import SentenceTransformer

    folder = sources.fetch(_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    texts = workloads.tweets(data, tokenizer, _TEXTS, random.Random(0))
    torch.set_num_threads(1)
    theirs = SentenceTransformer(str(folder), device="cpu")
    runtime = timed_runtime.load(folder, _LONGEST)
    assert runtime.times
    batcher = Batcher(PackedTimes.fitted(runtime.times), _LONGEST)

    def ours() -> np.ndarray:
        left = [(place, encoding.ids) for place, encoding in enumerate(tokenizer.encode_batch(texts))]
        vectors: dict[int, np.ndarray] = {}
        while left:
            batch = batcher.next_batch(0.0, [Waiting(len(ids), 0.0, float("inf")) for _, ids in left]).texts
            found = runtime.run_all([Text(left[place][1], None) for place in batch])
            vectors |= {left[place][0]: output.logits for place, output in zip(batch, found, strict=True)}
            left = [text for place, text in enumerate(left) if place not in batch]
        return np.stack([vectors[place] for place in range(len(texts))])

    def with_batches(size: int) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(theirs.encode(texts, batch_size=size, show_progress_bar=False))

    systems = {"ours": ours, **{f"{size} texts": with_batches(size) for size in _BATCHES}}
    expected, *others = (_unit(system()) for system in systems.values())
    if any((expected * found).sum(axis=1).min() < _ALIKE for found in others):
        raise LoadError(f"{_MODEL}: ours and sentence-transformers' vectors differ")
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(_ROUNDS):
        for name, system in systems.items():
            started = time.perf_counter()
            system()
            speeds[name].append(len(texts) / (time.perf_counter() - started))
    mine = speeds.pop("ours")
    batch, best = max(speeds.items(), key=lambda each: float(np.median(each[1])))
    beside = f"{np.median(mine):.3g} against {np.median(best):.3g} texts/s, in batches of {batch}; no server"
    return [ratio("embeddings_throughput_vs_sentence_transformers", mine, best, ">= 1.5", beside)]


def _unit(vectors: np.ndarray) -> np.ndarray:
    unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
