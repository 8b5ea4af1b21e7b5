"""What every system answers: prompts, how long the answers are, and when the requests arrive (Flover §VI-B to D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

PAPER_SOLO_MS = 5800
"""What one request takes on the paper's server (Fig. 5); its intervals mean something only against that."""
PAPER_INTERVAL_MS = 500
"""Between two arrivals (§VI-B)."""
PAPER_LAMBDAS_MS = (20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 2000, 3000, 4000, 5000)
"""Mean time between two arrivals (Fig. 5)."""


@dataclass(frozen=True)
class Request:
    """A prompt, when it arrives, in seconds from the start, and how many tokens its answer has."""

    prompt: Integers
    tokens: int
    at_s: float = 0.0


Workload = Sequence[Request]
"""Requests in order of arrival."""


def prompts(count: int, length: int, vocab: int, seed: int) -> list[Integers]:
    """Random token ids, which no two requests share, so that nobody gains by keeping prefixes."""
    return list(np.random.default_rng(seed).integers(vocab, size=(count, length)))


def at_once(prompts: Sequence[Integers], tokens: Sequence[int]) -> list[Request]:
    """All requests at the start; request i has an answer of tokens[i]."""
    return [Request(prompt, length) for prompt, length in zip(prompts, tokens, strict=True)]


def every(interval_s: float, workload: Workload) -> list[Request]:
    """The requests a constant time apart (§VI-B)."""
    return [replace(request, at_s=index * interval_s) for index, request in enumerate(workload)]


def poisson(mean_s: float, workload: Workload, seed: int) -> list[Request]:
    """The requests as a Poisson process (§VI-C): exponential times between them, `mean_s` on average.

    The same seed gives the same process at another pace.
    """
    gaps = np.random.default_rng(seed).exponential(mean_s, len(workload))
    arrivals = np.cumsum(gaps) - gaps[0]
    return [replace(request, at_s=float(at)) for request, at in zip(workload, arrivals, strict=True)]


def uniform_lengths(count: int, low: int, high: int, seed: int) -> list[int]:
    """Lengths of answers drawn from U(low, high), both included (§VI-D).

    The same seed draws the same quantiles, so that a wider range stretches the lengths and does not shuffle them.
    """
    quantiles = np.random.default_rng(seed).random(count)
    return [low + int(quantile * (high - low + 1)) for quantile in quantiles]


def scaled(paper_ms: float, solo_s: float) -> float:
    """A time of the paper in seconds here, where one request alone takes `solo_s` instead of the paper's 5.8 s."""
    return paper_ms / PAPER_SOLO_MS * solo_s
