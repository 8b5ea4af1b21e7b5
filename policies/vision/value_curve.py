"""What a vision service earns by its number of replicas: OTAS's utility per second, by linear program over gamma.

With n replicas there are n seconds per second. A query of task j at gamma g takes the seconds of a row in a batch that
can still be in time, and earns its utility times the accuracy. The program has one constraint that couples tasks, so
its optimum takes the steps of each task's upper hull in falling gain per second. Demand that varies faster than
replicas start is averaged over: gamma follows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from pliant.policies.cluster.attainment import Floats, mixed
from pliant.policies.vision.token_profile import TokenProfile

USED = 0.9
"""Of a replica's time, the share in which it computes full batches."""


class Asked(NamedTuple):
    """A query, as it came."""

    task: Hashable
    utility: float
    """Of a right answer in time."""
    slo_s: float


def earnings(profile: TokenProfile, asked: Collection[Asked]) -> list[tuple[float, float]]:
    """Seconds of a query, and what it earns of one like those `asked`, by gamma in rising order of seconds.

    For the median SLO; of gammas that are too slow for it nothing is said. A task that lacks a gamma earns what it does
    with the best of those that take no longer.
    """
    if not asked:
        return []
    row_s = row_seconds(profile, median(each.slo_s for each in asked))
    order = [int(at) for at in np.argsort(row_s, kind="stable") if np.isfinite(row_s[at])]
    utilities: defaultdict[Hashable, float] = defaultdict(float)
    for each in asked:
        utilities[each.task] += each.utility
    gains = np.nan_to_num(profile.utility([[one] for one in utilities.items()])[:, order], nan=0.0)
    earned = np.maximum.accumulate(gains, axis=1).sum(axis=0) / len(asked)
    return list(zip(row_s[order].tolist(), earned.tolist(), strict=True))


def row_seconds(profile: TokenProfile, slo_s: float) -> Floats:
    """Seconds of a query by gamma, in the best batches of which two fit into the SLO; infinite where none does."""
    rows = np.arange(1, profile.most_rows + 1)
    seconds = np.where(2 * profile.latency_s <= slo_s, profile.latency_s / rows, np.inf)
    least: Floats = seconds.min(axis=1)
    return least


def steps(row_s: Floats, demand: Mapping[Hashable, tuple[float, Floats]]) -> tuple[Floats, Floats]:
    """The program's optimum as a curve: seconds per second, and the utility per second that they earn, from 0, 0.

    `demand` is the queries per second of each task, and what one earns by gamma; NaN where the task lacks it.
    """
    parts: list[tuple[float, float, float]] = []
    for rate, gains in demand.values():
        seconds, gain = 0.0, 0.0
        while True:
            with np.errstate(invalid="ignore", divide="ignore"):
                slope = np.where(row_s > seconds, (gains - gain) / (row_s - seconds), -np.inf)
            slope[~np.isfinite(row_s) | np.isnan(slope)] = -np.inf
            best = int(slope.argmax())
            if slope[best] <= 0:
                break
            parts.append((float(slope[best]), rate * (row_s[best] - seconds), rate * (gains[best] - gain)))
            seconds, gain = float(row_s[best]), float(gains[best])
    parts.sort(key=lambda part: -part[0])
    taken, earned = (np.cumsum([0.0, *(part[at] for part in parts)]) for at in (1, 2))
    return taken, earned


def value_curve(
    row_s: Floats,
    demand: Mapping[Hashable, tuple[float, Floats]],
    most: int,
    spread: float = 0.0,
    window_s: float | None = None,
) -> Floats:
    """Utility per second with 0 to `most` replicas.

    `spread` is the standard deviation of rates over their forecast; within `window_s`, such as the SLO, arrivals vary
    as Poisson's do.
    """
    total = sum(rate for rate, _ in demand.values())
    if total <= 0:
        return np.zeros(most + 1)
    poisson = 1 / (total * window_s) if window_s else 0.0
    taken, earned = steps(row_s, demand)
    there = USED * np.arange(most + 1)
    curves = [
        factor * np.interp(there / factor, taken, earned)
        for factor in mixed(1.0, float(np.hypot(spread, poisson**0.5)))
    ]
    curve: Floats = np.mean(curves, axis=0)
    return curve
