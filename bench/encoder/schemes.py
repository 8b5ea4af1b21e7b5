"""Who serves a stream: Arlo and what it is compared with, all on the same simulated fleet (§5, compared schemes).

ST pads every text to the longest length, and DT runs each at its exact length on a dynamic runtime; both send a request
to the replica with the fewest outstanding. INFaaS has static runtimes of all lengths like Arlo; it gives each length
replicas in proportion to the load that its replicas carried, and packs requests. ILB and IG are Arlo with another
dispatcher (Table 4); `even` and `global` are Arlo without a planner (Table 3).

`sets` is what is served here: each replica holds all lengths, and has texts that it is to have first. `no_homes` is the
same without that. Where batches are allowed, these two cut their queues by what batches take, and the others take what
waits in order of arrival, as servers with dynamic batching do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pliant.bench.encoder.baseline_dispatch import LeastBusy, Packing
from pliant.bench.encoder.profiles import Profile
from pliant.policies.cluster.autoscaling import TargetTracking
from pliant.policies.encoder.batching import Batch, Batcher, Waiting, shares
from pliant.policies.encoder.configurations import ResidentRuntime, place
from pliant.policies.encoder.dispatch import Algorithm1, Dispatcher
from pliant.policies.encoder.planning import Planner, Residency, even_plan
from pliant.policies.encoder.residency import ResidentTimes
from pliant.policies.encoder.runtime_allocation import allocate, runtime_class
from pliant.simulation.arrivals import Stream, Thinned
from pliant.simulation.encoder.batched import BatchedSimulation, Batching
from pliant.simulation.encoder.control import Planned, Scaled, reallocate, resize
from pliant.simulation.encoder.fleet import Dispatching, Fleet, ResidentFleet
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
    batch: int = 1
    """The most texts that are computed together."""
    admission: bool = False
    """Refuse what no replica is predicted to answer within the SLO. INFaaS and IG never do."""
    algorithm_1: Algorithm1 | None = None
    """The paper's dispatching; None: by predicted finish."""
    quantile: float | None = None
    """Of demand that Arlo allocates for; None: its mean."""
    demand: tuple[float, ...] = field(default=())
    """Requests per second by length that all who allocate know at the start; empty: they start evenly."""


def simulation(scheme: str, setting: Setting) -> Simulation | BatchedSimulation:
    """A cluster run as `scheme`: sets, no_homes, arlo, st, dt, infaas, ilb, ig, even or global."""
    profile, longest = setting.profile, setting.lengths[-1]
    fleet, controllers = _fleet(scheme, setting)
    if setting.most:
        if scheme in ("sets", "arlo") and not setting.spare:
            controllers.append(Scaled(TargetTracking(1, setting.most), longest))
        else:
            controllers.append(Headroom(1, setting.most, setting.spare, longest))
    service = Service(profile.slo_s, setting.admission, setting.overhead_s)
    if setting.batch == 1:
        return Simulation(fleet, service, controllers)
    return BatchedSimulation(fleet, service, lambda held: _batcher(scheme, setting, held), controllers)


def _fleet(scheme: str, setting: Setting) -> tuple[Fleet, list[Controller]]:
    """The replicas, and who steers them."""
    profile, lengths, longest = setting.profile, setting.lengths, setting.lengths[-1]
    planner = Planner(longest, profile.slo_s, setting.period_s, setting.quantile)
    dispatcher: Dispatcher[int] = Dispatcher(profile.slo_s, setting.algorithm_1)
    even = even_plan(lengths, setting.replicas)
    known = _optimal(setting) if setting.demand else even
    match scheme:
        case "st":
            return Fleet(dispatcher, [longest] * setting.replicas, profile.padded_table), []
        case "dt":
            return Fleet(dispatcher, [longest] * setting.replicas, profile.dynamic_table), []
        case "infaas":
            packing = Packing(setting.room_s)
            proportion = Proportional(packing, lengths, setting.packing_period_s)
            held = _in_proportion(setting) if setting.demand else even
            return Fleet(packing, held, profile.padded_table), [proportion]
        case "even" | "global":
            return Fleet(dispatcher, even if scheme == "even" else known, profile.padded_table), []
        case "arlo" | "ilb" | "ig":
            if scheme == "ilb":
                dispatcher = Dispatcher(profile.slo_s, Algorithm1(peek=1))
            chosen: Dispatching = LeastBusy() if scheme == "ig" else dispatcher
            return Fleet(chosen, known, profile.padded_table), [Planned(planner, lengths)]
        case "sets" | "no_homes":
            together = shares(profile.padded_times(lengths, setting.batch), lengths) if setting.batch > 1 else None
            times = ResidentTimes.constant({length: profile.static_s(length) for length in lengths}, together)
            if scheme == "no_homes":
                return ResidentFleet(dispatcher, [longest] * setting.replicas, times, longest), []
            residency = Residency(dict.fromkeys(lengths, 0.0), 0.0)
            planner = Planner(longest, profile.slo_s, setting.period_s, setting.quantile, residency)
            homes = _homes(setting) if setting.demand else even
            return ResidentFleet(dispatcher, homes, times, longest), [Planned(planner, lengths)]
    raise ValueError(f"no scheme is called {scheme}")


def _batcher(scheme: str, setting: Setting, held: int) -> Batching:
    """Of a replica whose longest text has `held` tokens."""
    profile = setting.profile
    if scheme in ("sets", "no_homes"):
        return Batcher(profile.padded_times(setting.lengths, setting.batch), held)
    if scheme == "dt":
        return InOrder(lambda texts, longest: profile.dynamic_s(longest, texts), setting.batch)
    return InOrder(lambda texts, _: profile.batch_s(texts, held), setting.batch)


class InOrder:
    """Dynamic batching as servers have it: what waits when a replica gets free, in order of arrival, at most `most`."""

    def __init__(self, seconds: Callable[[int, int], float], most: int) -> None:
        self._seconds = seconds
        self._most = most

    def next_batch(self, now: float, waiting: Sequence[Waiting]) -> Batch:
        texts = min(len(waiting), self._most)
        return Batch(tuple(range(texts)), self._seconds(texts, max(text.length for text in waiting[:texts])))


def arrived(lengths: Sequence[int], stream: Stream | Thinned) -> tuple[float, ...]:
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


def _work(setting: Setting) -> list[float]:
    """Seconds per second that the demand of each length needs."""
    pairs = zip(setting.lengths, setting.demand, strict=True)
    return [setting.profile.static_s(length) * rate for length, rate in pairs]


def _in_proportion(setting: Setting) -> list[int]:
    counts = proportional(setting.lengths, _work(setting), setting.replicas)
    return [length for length, count in counts.items() for _ in range(count)]


def _homes(setting: Setting) -> list[int]:
    runtimes = [ResidentRuntime(length, setting.profile.static_s(length)) for length in setting.lengths]
    placement = place(runtimes, setting.demand, setting.replicas, 0.0)
    return [configuration.home for configuration, count in placement.replicas.items() for _ in range(count)]


def _optimal(setting: Setting) -> list[int]:
    profile = setting.profile
    classes = [runtime_class(length, profile.static_s(length), profile.slo_s) for length in setting.lengths]
    allocation = allocate(classes, [rate * profile.slo_s for rate in setting.demand], setting.replicas)
    return [length for length, count in zip(setting.lengths, allocation.counts, strict=True) for _ in range(count)]
