"""What a text classifier earns by its number of replicas: texts per second that are answered within the SLO.

Arlo's allocation says which runtimes n replicas would hold and what is carried on to longer ones; how many of a group's
texts are in time follows from its queue (`policies.cluster.attainment`). Where the dispatcher lets groups help each
other out at any moment, more are: the curve is a cautious one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pliant.policies.cluster.attainment import Floats, in_time, mixed
from pliant.policies.encoder.runtime_allocation import allocate, runtime_class

_EACH = 12
_STEP = 1.2
"""Beyond, each number that is computed is so many times the last; between them the curve is straight."""


def value_curve(
    service_s: Mapping[int, float],
    rates: Mapping[int, float],
    slo_s: float,
    most: int,
    spread: float = 0.0,
    variation: float = 0.5,
) -> Floats:
    """Texts per second in time, with 0 to `most` replicas.

    `service_s` is the seconds of a text by max_length, `rates` the texts per second for which each is the shortest that
    fits; `spread` is the standard deviation of rates over their forecast, `variation` as for `in_time`.
    """
    lengths = sorted(service_s)
    total = sum(rates.values())
    curve = np.zeros(most + 1)
    if total <= 0:
        return curve
    classes = tuple(runtime_class(length, service_s[length], slo_s) for length in lengths)
    known = [0]
    while known[-1] < most:
        known.append(min(most, max(known[-1] + 1, round(known[-1] * (_STEP if known[-1] >= _EACH else 1)))))
    for replicas in known[1:]:
        counts = allocate(classes, [rates.get(length, 0.0) * slo_s for length in lengths], replicas).counts
        scaled = mixed(1.0, spread)
        curve[replicas] = np.mean(
            [_answered(lengths, service_s, rates, counts, slo_s, factor, variation) for factor in scaled.tolist()]
        )
    curve = np.interp(np.arange(most + 1), known, curve[known])
    rising: Floats = np.maximum.accumulate(curve)
    return rising


def _answered(
    lengths: list[int],
    service_s: Mapping[int, float],
    rates: Mapping[int, float],
    counts: tuple[int, ...],
    slo_s: float,
    factor: float,
    variation: float,
) -> float:
    """Texts per second in time; what a group refuses is tried by the next longer one."""
    answered = carried = 0.0
    for length, count in zip(lengths, counts, strict=True):
        rate = carried + factor * rates.get(length, 0.0)
        taken = rate * in_time(rate, count, service_s[length], slo_s - service_s[length], variation)
        answered, carried = answered + taken, rate - taken
    return answered
