"""Which share of requests a pool of servers answers in time: queueing and bursts, on average over what may come.

Those that would not be served in time are refused on arrival, as live admission control does: a queue with patience.
For Poisson arrivals and exponential service (M/M/n+D, Barrer 1957) the virtual wait has the density p exp(-k v) up to
the patience T, k = n / s - rate. For other variations the wait's scale changes by their mean square, as in heavy
traffic (Kingman, Allen and Cunneen). What varies over longer than a wait, such as a forecast's error, is averaged over.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_POINTS = 9
_LEAST = 1e-12
_GRID = np.array([NormalDist().inv_cdf((at + 0.5) / _POINTS) for at in range(_POINTS)])


def in_time(rate: float, servers: int, service_s: float, patience_s: float, variation: float = 0.5) -> float:
    """The share of requests, `rate` per second, that begin service within `patience_s`.

    `variation`: the mean of the squared coefficients of variation of intervals and of service: 0.5 for Poisson arrivals
    and equal services, 1 for exponential ones, more in bursts.
    """
    if rate <= 0:
        return 1.0
    if servers < 1 or patience_s < 0:
        return 0.0
    load = rate * service_s
    limit = max(0.0, patience_s / max(variation, _LEAST))
    # Erlang's B, then the share of the time at which a request finds n - 1 busy servers or waits
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    below = 1 - blocked  # of the loss system: fewer than n busy
    last = blocked * servers / load  # n - 1 busy
    drift = (servers - load) / service_s
    exponent = min(-drift * limit, 700.0)
    waits = rate * last * (limit if abs(drift * limit) < 1e-9 else -math.expm1(exponent) / drift)
    beyond = rate * last * math.exp(exponent) * service_s / servers
    return (below + waits) / (below + waits + beyond)


def mixed(rate: float, spread: float) -> Floats:
    """Equally likely rates of this mean, and of a standard deviation of `spread` of it: log-normal."""
    sigma = math.sqrt(math.log1p(spread * spread))
    factors = np.exp(sigma * _GRID)
    rates: Floats = rate * factors / factors.mean()
    return rates
