"""Requests as the paper makes them: Azure's conversation lengths, Poisson arrivals, ranks by a power law (§5.1)."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pliant.simulation.arrivals import Floats, Integers
from pliant.simulation.llm.outcome import Request

RANKS = (8, 16, 32, 64, 128)
"""Of adapters; each has as many (§5.1)."""
EXPONENT = 1.0
"""Of the power law: the i-th rank is asked for in proportion to 1 / i, as in S-LoRA's workloads."""
LONGEST_PROMPT = 4096
"""Longer ones, 2% of the trace's, are cut."""

_CONVERSATIONS = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
_GENERATIONS = "alibaba_genai_2026/lora_request_trace.csv"
_PROBABILITIES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_PROMPTS = (7, 29, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050)
_OUTPUTS = (7, 16, 54, 85, 129, 395, 424, 451, 601, 1000)
_DRAWN = 20_000


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of their answers, to draw pairs from."""

    prompts: Integers
    outputs: Integers

    def scaled(self, factor: float) -> Lengths:
        """All lengths times `factor`, at least 1."""
        prompts, outputs = (
            np.maximum(1, np.rint(part * factor)).astype(np.int64) for part in (self.prompts, self.outputs)
        )
        return Lengths(prompts, outputs)


@dataclass(frozen=True)
class Population:
    """The adapters that there are: adapter i has rank ranks[i] and is asked for with probability shares[i]."""

    ranks: tuple[int, ...]
    shares: Floats


def conversations(data: Path | None) -> Lengths:
    """Of the trace in `data`; without it, drawn from a distribution through ten quantiles of each, log-linear between.

    Prompts and answers of the trace are all but uncorrelated (-0.11), and those drawn are independent.
    """
    if data is None:
        rng = np.random.default_rng(0)
        prompts, outputs = (_through(quantiles, rng) for quantiles in (_PROMPTS, _OUTPUTS))
    else:
        columns = np.loadtxt(_file(data, _CONVERSATIONS), np.int64, delimiter=",", skiprows=1, usecols=(1, 2))
        prompts, outputs = columns[:, 0], columns[:, 1]
    return Lengths(np.minimum(prompts, LONGEST_PROMPT), outputs)


def population(adapters: int, ranks: Sequence[int] = RANKS) -> Population:
    """Equally many of each rank; the rank by a power law, smaller ones more often, and uniform within a rank (§5.1)."""
    if adapters % len(ranks):
        raise ValueError(f"{adapters} adapters cannot have {len(ranks)} ranks equally often")
    each = adapters // len(ranks)
    weights = np.arange(1, len(ranks) + 1) ** -EXPONENT
    return Population(tuple(np.repeat(ranks, each).tolist()), np.repeat(weights / weights.sum() / each, each))


def recorded_population(data: Path, ranks: Sequence[int] = RANKS) -> Population:
    """As often as models are asked for in a trace of image generation; ranks by turns from the most popular on."""
    with _file(data, _GENERATIONS).open(newline="") as file:
        counts = Counter(row["checkpoint_model_version_id"] for row in csv.DictReader(file))
    numbers = np.array([count for _, count in counts.most_common()], dtype=np.float64)
    return Population(tuple(ranks[index % len(ranks)] for index in range(len(numbers))), numbers / numbers.sum())


def poisson(rate: float, seconds: float, lengths: Lengths, adapters: Population, seed: int) -> list[Request]:
    """Requests of `seconds` at `rate` per second. The same seed draws the same requests at another pace."""
    rng = np.random.default_rng(seed)
    gaps, pairs, chosen = (np.random.default_rng(stream) for stream in rng.integers(2**63, size=3))
    count = max(1, round(rate * seconds))
    at_s = np.cumsum(gaps.exponential(1.0, count)) / rate
    pair = pairs.integers(len(lengths.prompts), size=count)
    adapter = np.searchsorted(np.cumsum(adapters.shares), chosen.random(count) * adapters.shares.sum(), side="right")
    adapter = np.minimum(adapter, len(adapters.ranks) - 1)
    columns = (at_s, lengths.prompts[pair], lengths.outputs[pair], adapter)
    return [Request(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _through(quantiles: Sequence[int], rng: np.random.Generator) -> Integers:
    logarithms = np.interp(rng.random(_DRAWN), _PROBABILITIES, np.log(quantiles))
    tokens: Integers = np.rint(np.exp(logarithms)).astype(np.int64)
    return tokens


def _file(data: Path, name: str) -> Path:
    path = data / name
    if not path.exists():
        raise SystemExit(f"{data}: holds no {name}")
    return path
