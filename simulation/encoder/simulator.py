"""A serving cluster as discrete events: the live system's policy objects, driven by profiled service times (Arlo §5.2).

Replicas compute one request at a time, first come first served, so the finish of a request is known when it is
dispatched. What remains to be ordered in time are arrivals, completions, replicas that change over, and a tick each
second for those who watch and steer.
"""

from __future__ import annotations

import gc
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pliant.policies.cluster.autoscaling import HIGH, LOW
from pliant.policies.encoder.admission import DeadlineError
from pliant.simulation.arrivals import Arrivals, Floats
from pliant.simulation.encoder.fleet import Fleet
from pliant.simulation.encoder.outcome import Outcome


@dataclass(frozen=True)
class Second:
    """What those who steer see of one second: requests that arrived, and what was answered in it."""

    lengths: dict[int, int]
    """Length in tokens -> requests."""
    answered: int
    near_slo: int
    """Answered after at least 95% of the SLO."""
    above_half: int
    """Answered after at least half of the SLO."""
    shed: int
    work_s: float
    """Service time of the requests that were dispatched."""


class Controller(Protocol):
    """Steers a fleet: called at the end of each second."""

    def tick(self, now: float, fleet: Fleet, second: Second) -> None: ...


@dataclass(frozen=True)
class Service:
    """What holds for every request."""

    slo_s: float
    admission: bool = False
    """Refuse a request that no replica is predicted to answer within the SLO, as the live system does."""
    overhead_s: float = 0.0
    """Added to each latency; no replica is busy meanwhile."""
    variation: Sequence[float] = ()
    """Measured service times over those of the profile, to draw each computation's from; empty: exactly the profile."""
    hops_s: Sequence[float] = ()
    """Seconds measured between client and replica and back, to draw each request's from; none: `overhead_s` of each."""
    seed: int = 0

    @property
    def way_s(self) -> float:
        """From the dispatcher to a replica, and back: half of a hop. So old is what either knows of the other."""
        return float(np.mean(self.hops_s)) / 2 if self.hops_s else 0.0


class Noise:
    """What is drawn for each computation and each request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rng = np.random.default_rng(service.seed)

    def factors(self, count: int) -> list[float]:
        """Of the service times of so many computations."""
        variation = self._service.variation
        return self._rng.choice(variation, count).tolist() if variation else [1.0] * count

    def overheads(self, count: int) -> Floats | float:
        """Seconds to be added to so many latencies, which have the way to the replica already."""
        hops_s = self._service.hops_s
        return self._rng.choice(hops_s, count) - self._service.way_s if hops_s else self._service.overhead_s


class Simulation:
    """Runs streams of requests through a fleet."""

    def __init__(self, fleet: Fleet, service: Service, controllers: Sequence[Controller] = ()) -> None:
        self._fleet = fleet
        self._service = service
        self._controllers = controllers
        self._pending: list[tuple[float, int, int]] = [(math.inf, -1, 0)]
        """Of requests that the dispatcher does not know to be finished: when it will, replica and work, as a heap."""
        self._ahead: dict[int, np.ndarray] = {}
        """Second -> answered, near the SLO, and above half of it, among the requests that finish in it."""
        self._noise = Noise(service)

    def run(self, stream: Iterable[Arrivals], warmup: int = 0) -> Outcome:
        """Serve a stream: one item for each second of it, in order; the outcome leaves out the first `warmup` items."""
        outcome = Outcome()
        collecting = gc.isenabled()
        gc.disable()
        try:
            for number, arrivals in enumerate(stream):
                if number == warmup:
                    outcome = Outcome()
                self._second(number, arrivals, outcome)
        finally:
            if collecting:
                gc.enable()
        return outcome

    def _second(self, number: int, arrivals: Arrivals, outcome: Outcome) -> None:
        fleet, slo_s = self._fleet, self._service.slo_s
        times, tokens = arrivals.seconds.tolist(), arrivals.tokens.tolist()
        factors = self._noise.factors(len(times))
        latencies: list[float] = []
        work_s = 0.0
        begin, end_of_second = 0, number + 1.0
        since = float(number)
        while (change := fleet.next_change) < end_of_second:
            end = bisect_right(times, change, begin)
            work_s += self._serve(times[begin:end], tokens[begin:end], factors[begin:end], latencies)
            self._complete(change)
            outcome.gpu_s += fleet.running * max(0.0, change - since)
            since = max(since, change)
            fleet.settle(change)
            begin = end
        work_s += self._serve(times[begin:], tokens[begin:], factors[begin:], latencies)
        self._complete(end_of_second)
        outcome.gpu_s += fleet.running * (end_of_second - since)

        seconds = np.array(latencies)
        taken = ~np.isnan(seconds)
        seconds = seconds[taken]
        seconds = seconds + self._noise.overheads(len(seconds))
        shed = len(latencies) - len(seconds)
        self._foresee(arrivals.seconds[taken] + seconds, seconds)
        outcome.latencies.add(seconds)
        in_time = int((seconds <= slo_s).sum())
        outcome.requests += len(latencies)
        outcome.shed += shed
        outcome.within_slo += in_time
        outcome.arrived.append(len(latencies))
        outcome.missed.append(len(latencies) - in_time)
        outcome.busy_s += work_s
        outcome.seconds += 1
        if self._controllers:
            numbers = np.bincount(arrivals.tokens)
            lengths = np.flatnonzero(numbers)
            answered, near, above = self._ahead.pop(number, np.zeros(3, dtype=np.int64)).tolist()
            by_length = dict(zip(lengths.tolist(), numbers[lengths].tolist(), strict=True))
            second = Second(by_length, answered, near, above, shed, work_s)
            for controller in self._controllers:
                controller.tick(end_of_second, fleet, second)
        outcome.counts.append(fleet.counts())
        outcome.running.append(fleet.running)

    def _serve(
        self, times: Sequence[float], tokens: Sequence[int], factors: Sequence[float], latencies: list[float]
    ) -> float:
        """Dispatch requests in order of arrival; append their latencies, NaN when refused; return their service time.

        Nearly all of a simulation's time is spent here: hence the local names.
        """
        fleet = self._fleet
        dispatch, complete, record = fleet.dispatcher.dispatch, fleet.dispatcher.complete, latencies.append
        free_at, tables = fleet.free_at, fleet.tables
        pending, push, pop = self._pending, heapq.heappush, heapq.heappop
        budget_s = self._service.slo_s if self._service.admission else None
        way_s = self._service.way_s
        next_known = pending[0][0]
        work_s = 0.0
        for time, length, factor in zip(times, tokens, factors, strict=True):
            while next_known <= time:
                _, done, work = pop(pending)
                complete(done, work)
                next_known = pending[0][0]
            try:
                replica, _, work = dispatch(length, budget_s)
            except DeadlineError:
                record(math.nan)
                continue
            seconds = tables[replica][length] * factor
            work_s += seconds
            free = free_at[replica]
            there = time + way_s
            finish = (free if free > there else there) + seconds
            free_at[replica] = finish
            known = finish + way_s
            push(pending, (known, replica, work))
            if known < next_known:
                next_known = known
            record(finish - time)
        return work_s

    def _complete(self, now: float) -> None:
        """Tell the dispatcher of all that it knows by `now` to be finished."""
        pending, complete = self._pending, self._fleet.dispatcher.complete
        while pending[0][0] <= now:
            _, replica, work = heapq.heappop(pending)
            complete(replica, work)

    def _foresee(self, finishes: Floats, latencies: Floats) -> None:
        """Note in which second each request will be seen as answered, so that nobody steers by what is yet to come."""
        if not self._controllers or not len(finishes):
            return
        slo_s = self._service.slo_s
        seconds = finishes.astype(np.int64)
        first = int(seconds.min())
        for column, chosen in enumerate((latencies >= 0, latencies >= HIGH * slo_s, latencies >= LOW * slo_s)):
            for offset, count in enumerate(np.bincount(seconds[chosen] - first).tolist()):
                if count:
                    self._ahead.setdefault(first + offset, np.zeros(3, dtype=np.int64))[column] += count
