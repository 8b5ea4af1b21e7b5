"""How many replicas should hold each runtime (Arlo §3.3, equations 1-7): the counts with the least latency, proven.

Demand that a runtime's replicas cannot take within the SLO is carried on to the next longer runtime; the longest takes
all that reaches it. Loads are real numbers here, where the paper counts requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pliant.policies.encoder.allocation_solver import Floats, Program, solve

_STEPS = 64
_KNEE = 0.95
"""Load up to which a queue's mean wait is believed; from there it rises along its tangent, so that it stays finite."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RuntimeClass:
    """A model compiled for texts of at most `max_length` tokens, as one replica runs it.

    Raises ValueError for values that make no sense.
    """

    max_length: int
    capacity: float
    """Requests per SLO period that a replica can compute (the paper's M)."""
    latency_s: tuple[float, ...]
    """Mean latency of a request by load (the paper's L): at loads evenly spaced from 0 to `capacity` requests per SLO
    period, linear in between, and beyond capacity along the last slope (level where that falls)."""

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 < self.capacity < np.inf:
            raise ValueError(
                "max_length and capacity must be positive and finite, "
                f"got {self.max_length} tokens and {self.capacity} requests"
            )
        if len(self.latency_s) < 2 or not all(0 < latency < np.inf for latency in self.latency_s):
            raise ValueError(f"latency_s needs at least two positive, finite values, got {self.latency_s}")


@dataclass(frozen=True)
class Allocation:
    """How many replicas hold each runtime, in rising length, and what is predicted of that."""

    counts: tuple[int, ...]
    latency_s: float
    """Mean over all requests; 0 with no demand."""
    feasible: bool
    """Whether the least counts of equation 3 fit; else they were left out."""
    overload: float
    """Requests per SLO period that are more than the longest runtime's replicas can compute."""
    proven: bool
    """Whether it is certain that no other counts have a lower mean latency."""


def runtime_class(max_length: int, service_s: float, slo_s: float) -> RuntimeClass:
    """A runtime that takes `service_s` seconds for each request, one after another.

    Raises ValueError unless all three are positive.
    """
    if not (service_s > 0 and slo_s > 0):
        raise ValueError(f"service_s and slo_s must be positive, got {service_s} and {slo_s}")
    latency_s = _queueing_latency_s(service_s, np.linspace(0, 1, _STEPS + 1))
    return RuntimeClass(max_length, slo_s / service_s, tuple(latency_s.tolist()))


def _queueing_latency_s(service_s: float, load: Floats) -> Floats:
    """Mean time in a queue with random arrivals and fixed service times (M/D/1) by its utilisation, 0 to 1."""
    believed = np.minimum(load, _KNEE)
    wait = believed / (2 * (1 - believed)) + (load - believed) / (2 * (1 - _KNEE) ** 2)
    latency_s: Floats = service_s * (1 + wait)
    return latency_s


def allocate(classes: Sequence[RuntimeClass], demand: Sequence[float], replicas: int) -> Allocation:
    """The counts with the least mean latency for `replicas` in all, at least one of them on the longest runtime.

    `demand[i]` is the requests per SLO period for which the i-th runtime is the shortest that fits. Of equally good
    counts those with most on the longest runtime are taken, which serves any text; without demand, replicas are spread
    evenly. The same arguments always give the same counts.

    Capacities and latencies may be any (see `allocation_solver`). Where latencies never fall as load rises, more
    replicas never make the optimum worse, unless they are what makes equation 3 feasible.

    Raises ValueError for lengths that do not rise, tables of unequal size, or demand or replicas that make no sense.
    """
    _check(classes, demand, replicas)
    capacity = np.array([runtime.capacity for runtime in classes])
    latency = np.array([runtime.latency_s for runtime in classes])
    requests = np.array(demand, dtype=np.float64)
    least = np.floor(requests / capacity + _ROUNDING)
    least[-1] = max(1, least[-1])
    feasible = bool(least.sum() <= replicas)
    if not feasible:
        least[:-1], least[-1] = 0, 1
    total = float(requests.sum())
    if total <= _ROUNDING * capacity.min():
        return Allocation(_even(len(classes), replicas), 0.0, feasible, 0.0, True)

    program = Program(capacity, latency, requests, least.astype(np.int64), replicas)
    solution = solve(program)
    cost, overload = program.cost(solution.counts)
    return Allocation(
        counts=tuple(solution.counts.tolist()),
        latency_s=cost / total,
        feasible=feasible,
        overload=overload if overload > _ROUNDING * total else 0.0,
        proven=solution.proven,
    )


def _even(runtimes: int, replicas: int) -> tuple[int, ...]:
    """As even as can be, the longest first."""
    share, rest = divmod(replicas, runtimes)
    return tuple(share + (runtime >= runtimes - rest) for runtime in range(runtimes))


def _check(classes: Sequence[RuntimeClass], demand: Sequence[float], replicas: int) -> None:
    lengths = [runtime.max_length for runtime in classes]
    if not lengths or any(after <= before for before, after in pairwise(lengths)):
        raise ValueError(f"needs at least one runtime, in rising max_length, got {lengths}")
    if len({len(runtime.latency_s) for runtime in classes}) > 1:
        raise ValueError("the latencies of all runtimes must be sampled at equally many loads")
    if len(demand) != len(classes) or not all(0 <= requests < np.inf for requests in demand):
        raise ValueError(f"needs a finite demand of at least 0 for each of {len(classes)} runtimes, got {list(demand)}")
    if replicas < 1:
        raise ValueError(f"needs at least one replica, got {replicas}")
