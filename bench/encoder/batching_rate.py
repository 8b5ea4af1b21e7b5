"""How long it takes to choose a replica's next batch, without a cluster."""

from __future__ import annotations

import time

import numpy as np

from pliant.bench.encoder.profiles import BASE, LONGEST, STEP
from pliant.bench.report import Figure, median
from pliant.policies.encoder.batching import Batcher, Waiting
from pliant.simulation.arrivals import tweet_lengths

_QUEUES = (2, 8, 32, 128)
_MOST = 32
_TIMES = 300


def figures() -> list[Figure]:
    """Microseconds by length of the queue; the spread is from the first to the last decile."""
    rng = np.random.default_rng(0)
    found = []
    for texts in _QUEUES:
        batcher = Batcher(BASE.padded_times(tuple(range(STEP, LONGEST + 1, STEP)), _MOST), LONGEST)
        microseconds = []
        for lengths in rng.choice(tweet_lengths(), (_TIMES, texts)).tolist():
            waiting = [Waiting(length, 0.0, BASE.slo_s) for length in lengths]
            started = time.perf_counter()
            batcher.next_batch(0.0, waiting)
            microseconds.append((time.perf_counter() - started) * 1e6)
        deciles = np.quantile(microseconds, (0.1, 0.5, 0.9)).tolist()
        found.append(median(f"batch_choice_microseconds_{texts}", deciles))
    return found
