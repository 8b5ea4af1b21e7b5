"""How much a figure would be another one on other texts of the same kind: bootstrap, paired text by text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pliant.bench.report import Figure
from pliant.policies.cascade.calibration import Integers

_DRAWS = 1000
_WITHIN = (0.025, 0.975)

Statistic = Callable[[int, Integers], float]
"""Of what one seed routed, on the texts of these rows: a row may be there several times."""


def over_texts(name: str, of: Statistic, texts: int, seeds: int = 1, target: str = "", beside: str = "") -> Figure:
    """The mean over seeds on all texts; low and high hold 95% of what other texts and another seed would give."""
    rng = np.random.default_rng(0)
    value = float(np.mean([of(seed, np.arange(texts)) for seed in range(seeds)]))
    drawn = [of(int(rng.integers(seeds)), rng.integers(texts, size=texts)) for _ in range(_DRAWS if texts else 0)]
    low, high = np.quantile(drawn, _WITHIN).tolist() if drawn else (value, value)
    error = f"standard error {np.std(drawn):.2g}" if drawn else ""
    return Figure(name, value, low, high, target, "; ".join(filter(None, (error, beside))))
