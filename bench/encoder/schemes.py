"""Who serves a stream: Arlo and what it is compared with, all on the same simulated fleet (§5, compared schemes).

ST pads every text to the longest length, and DT runs each at its exact length on a dynamic runtime; both send a request
to the replica with the fewest outstanding. INFaaS has static runtimes of all lengths like Arlo; it gives each length
replicas in proportion to the load that its replicas carried, and packs requests. ILB and IG are Arlo with another
dispatcher (Table 4); `even` and `global` are Arlo without a planner (Table 3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pliant.bench.encoder.baseline_dispatch import LeastBusy, Packing
from pliant.bench.encoder.profiles import Profile
from pliant.policies.cluster.autoscaling import TargetTracking
from pliant.policies.encoder.dispatch import Algorithm1, Dispatcher
from pliant.policies.encoder.planning import Planner, even_plan
from pliant.policies.encoder.runtime_allocation import allocate, runtime_class
from pliant.simulation.arrivals import Stream
from pliant.simulation.encoder.control import Planned, Scaled, reallocate, resize
from pliant.simulation.encoder.fleet import Dispatching, Fleet
from pliant.simulation.encoder.simulator import Controller, Second, Service, Simulation


class Proportional:
    """INFaaS's allocation: every `period_s`, replicas in proportion to the load of each length's replicas.

    It looks at the load that the dispatcher gave them, not at the lengths that arrived. The longest keeps one replica
    at least.
    """

    def __init__(self, dispatcher: Packing, lengths: Sequence[int], period_s: float) -> None:
        self._dispatcher = dispatcher
        self._lengths = lengths
        self._period_s = period_s
        self._planned_at = 0.0
        self._replicas = 0

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        resized = len(fleet.holds) != self._replicas
        if fleet.replacing or not (resized or now - self._planned_at >= self._period_s):
            return
        self._replicas = len(fleet.holds)
        load = [self._dispatcher.sent[length] * fleet.service_s(length) for length in self._lengths]
        if not any(load):
            return
        self._planned_at = now
        self._dispatcher.sent.clear()
        reallocate(now, fleet, proportional(self._lengths, load, self._replicas))


class Headroom:
    """INFaaS's autoscaling, also for ST and DT: as many replicas as leave `spare` of their time unused (§5).

    It follows the load of the last 10 seconds up at once, and down when it was lower for a minute.
    """

    def __init__(self, least: int, most: int, spare: float, longest: int) -> None:
        self._bounds = least, most
        self._spare = spare
        self._longest = longest
        self._work_s: deque[float] = deque(maxlen=10)
        self._wanted: deque[int] = deque(maxlen=60)

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        self._work_s.append(second.work_s)
        least, most = self._bounds
        load = sum(self._work_s) / len(self._work_s)
        self._wanted.append(min(most, max(least, math.ceil(load / (1 - self._spare)))))
        running = len(fleet.holds) + len(fleet.starting)
        if self._wanted[-1] > running or len(self._wanted) == self._wanted.maxlen:
            resize(now, fleet, max(self._wanted), self._longest)


@dataclass(frozen=True)
class Setting:
    """The cluster that every scheme gets."""

    profile: Profile
    replicas: int
    lengths: tuple[int, ...] = tuple(range(64, 513, 64))
    """Of the static runtimes."""
    overhead_s: float = 0.8e-3
    """The paper's, of each request: network, and copies to the GPU (§5.2)."""
    most: int = 0
    """Replicas that autoscaling may grow to; 0: their number is fixed."""
    spare: float = 0.0
    """The headroom that autoscaling keeps; 0: Arlo tracks its tail latency instead."""
    room_s: float = 0.0
    """How full INFaaS packs a replica."""
    packing_period_s: float = 10.0
    """Of INFaaS's allocation."""
    period_s: float = 120.0
    """Of Arlo's."""
    algorithm_1: Algorithm1 | None = None
    """The paper's dispatching; None: by predicted finish."""
    quantile: float | None = None
    """Of demand that Arlo allocates for; None: its mean."""
    demand: tuple[float, ...] = field(default=())
    """Requests per second by length that Arlo has allocated for at the start; empty: it starts evenly."""


def simulation(scheme: str, setting: Setting) -> Simulation:
    """A cluster run as `scheme`: arlo, st, dt, infaas, ilb, ig, even or global."""
    profile, lengths, longest = setting.profile, setting.lengths, setting.lengths[-1]
    service = Service(profile.slo_s, overhead_s=setting.overhead_s)
    controllers: list[Controller] = []
    held: Sequence[int] = _optimal(setting) if setting.demand else even_plan(lengths, setting.replicas)
    dispatcher: Dispatching = Dispatcher(profile.slo_s, setting.algorithm_1)
    table = profile.static_table
    match scheme:
        case "st" | "dt":
            held = [longest] * setting.replicas
            table = profile.static_table if scheme == "st" else profile.dynamic_table
        case "infaas":
            held = even_plan(lengths, setting.replicas)
            dispatcher = Packing(setting.room_s)
            controllers.append(Proportional(dispatcher, lengths, setting.packing_period_s))
        case "even":
            held = even_plan(lengths, setting.replicas)
        case "global":
            pass
        case "arlo" | "ilb" | "ig":
            if scheme == "ilb":
                dispatcher = Dispatcher(profile.slo_s, Algorithm1(peek=1))
            if scheme == "ig":
                dispatcher = LeastBusy()
            planner = Planner(longest, profile.slo_s, setting.period_s, setting.quantile)
            controllers.append(Planned(planner, lengths))
        case _:
            raise ValueError(f"no scheme is called {scheme}")
    if setting.most:
        if scheme == "arlo" and not setting.spare:
            controllers.append(Scaled(TargetTracking(1, setting.most), longest))
        else:
            controllers.append(Headroom(1, setting.most, setting.spare, longest))
    return Simulation(Fleet(dispatcher, held, table), service, controllers)


def arrived(lengths: Sequence[int], stream: Stream) -> tuple[float, ...]:
    """Requests per second of `stream`, over all of it, for which each of `lengths` is the shortest that fits."""
    counts = np.zeros(len(lengths), dtype=np.int64)
    for second in stream:
        counts += np.bincount(np.searchsorted(lengths, second.tokens), minlength=len(lengths))
    return tuple((counts / len(stream)).tolist())


def proportional(lengths: Sequence[int], load: Sequence[float], replicas: int) -> dict[int, int]:
    """`replicas` in proportion to `load`, by largest remainder, but at least one for the longest length."""
    counts = dict.fromkeys(lengths, 0)
    counts[lengths[-1]] = 1
    total = sum(load)
    quota = {length: replicas * share / total for length, share in zip(lengths, load, strict=True)}
    for _ in range(replicas - 1):
        counts[max(lengths, key=lambda length: quota[length] - counts[length])] += 1
    return counts


def _optimal(setting: Setting) -> list[int]:
    profile = setting.profile
    classes = [runtime_class(length, profile.static_s(length), profile.slo_s) for length in setting.lengths]
    allocation = allocate(classes, [rate * profile.slo_s for rate in setting.demand], setting.replicas)
    return [length for length, count in zip(setting.lengths, allocation.counts, strict=True) for _ in range(count)]
