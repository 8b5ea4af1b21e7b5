"""Services of all kinds on one budget, second by second: what the policy for the budget decides, and what comes of it.

A service is a queue of requests that arrive at random and are refused once they would wait longer than they may. That
is coarser than the simulators of each kind, and so a day of a cluster takes seconds. Its queues are not the formulas
of value curves, but it takes speeds, accuracies and capacities from the same place: where these are wrong, both are.
Replicas serve when they have started, and stop at once. Nodes may go, with notice or without, and come back: nobody
knows here which replicas are where, so each is on one of them with the same probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pliant.policies.cluster.budget import BudgetError, Nodes, Shape
from pliant.policies.cluster.control import Decision, Offer, Policy, Service, price
from pliant.policies.cluster.forecast import LOOK_S, Forecast, excess, surges

Floats = NDArray[np.float64]

PERIOD_S = 10
"""Between two decisions, as in the live planner, and of a bin of what was before the trace."""
_MOST_SPREAD = 1.0


@dataclass(frozen=True)
class Served:
    """One service of the cluster."""

    name: str
    shape: Shape
    least: int
    most: int
    start_s: float
    each: float
    """Requests per second that a replica can do."""
    patience_s: float
    """How long a request may wait."""
    rates: Floats
    """Requests per second, for each second."""
    history: Floats
    """The same of the days before, in bins of `PERIOD_S`."""
    worth: float
    """Of a request in time."""
    curve: Callable[[float, float], Floats]
    """By rate and spread: requests per second in time, or their utility, with 0 to `most` replicas."""
    elastic: tuple[Floats, Floats] | None = None
    """Of a service that trades quality for time: replicas per request and second, and the utility of a request."""
    weight: float | None = None
    """Of the share of its requests in time, as the live planner counts it, which has a price for replicas, too; None:
    each request counts its `worth`."""
    batch: bool = False


@dataclass(frozen=True)
class Cascaded:
    """Requests that ask `first`, and a share of them `then`; each choice is (share that goes on, accuracy)."""

    name: str
    first: str
    then: str
    first_accuracy: float
    choices: tuple[tuple[float, float], ...]
    """The most accurate one first."""
    rates: Floats
    history: Floats
    worth: float
    """Of a request that is answered as accurately as can be."""


@dataclass(frozen=True)
class Outage:
    """Nodes that are away for a while. Within the notice replicas on them serve on, and others start elsewhere."""

    nodes: Nodes
    second: int
    lasts_s: int
    notice_s: int = 0

    def avoided(self, now: int) -> bool:
        """Whether nothing is to be started there."""
        return self.second - self.notice_s <= now < self.second + self.lasts_s


@dataclass
class Outcome:
    """What came of a run."""

    earned: dict[str, float] = field(default_factory=dict)
    possible: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    """Requests."""
    answered: dict[str, float] = field(default_factory=dict)
    """Of these, in time; the others were refused."""
    moves: dict[str, int] = field(default_factory=dict)
    gpu_s: float = 0.0
    seconds: int = 0
    reasons: list[tuple[float, str]] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Weighted: what was earned of what could have been."""
        return sum(self.earned.values()) / sum(self.possible.values())

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    @property
    def moves_per_hour(self) -> float:
        """Of a service, on average."""
        return sum(self.moves.values()) / len(self.moves) / (self.seconds / 3600)


class _Pool:
    """The replicas of a service, and who waits for them."""

    def __init__(self, served: Served, replicas: int) -> None:
        self.served = served
        self.ready = replicas
        self.starting: list[float] = []
        self.leaving: list[float] = []
        """Until when those serve that are on nodes which go."""
        self.waiting = 0.0
        self.asked = 0.0
        """Requests in this period."""

    @property
    def running(self) -> int:
        """Those that stay."""
        return self.ready + len(self.starting)

    @property
    def serving(self) -> int:
        return self.ready + len(self.leaving)

    def lose(self, share: float, until: float, rng: np.random.Generator) -> None:
        """Of the replicas each is on one of the nodes that go with probability `share`."""
        gone = int(rng.binomial(self.ready, share))
        self.ready -= gone
        self.leaving += [until] * gone
        self.starting = [ready for ready in self.starting if rng.random() >= share]

    def resize(self, now: float, replicas: int) -> None:
        while self.running > replicas:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
        self.starting += [now + self.served.start_s] * (replicas - self.running)

    def second(self, now: float, arrivals: float) -> tuple[float, float]:
        """The share of a second's requests that are answered in time, and their utility as a share of the best."""
        self.ready += sum(ready <= now for ready in self.starting)
        self.starting = [ready for ready in self.starting if ready > now]
        self.leaving = [until for until in self.leaving if until > now]
        self.asked += arrivals
        if self.served.elastic:
            if not arrivals:
                return 1.0, 1.0
            taken, earned = self.served.elastic
            each = self.serving / arrivals
            return min(1.0, each / float(taken[taken > 0].min())), float(np.interp(each, taken, earned))
        can = self.serving * self.served.each
        self.waiting += arrivals
        refused = max(0.0, self.waiting - can * (1 + self.served.patience_s))
        refused = min(refused, arrivals)
        self.waiting = max(0.0, self.waiting - refused - can)
        share = 1 - refused / arrivals if arrivals else 1.0
        return share, share

    def load(self, seconds: float) -> float:
        return self.asked / seconds / self.served.each / max(self.running, 1)


class Simulation:
    """Runs one policy. `known`: it is given the rates to come in place of forecasts, as an oracle is. `recorded`: rates
    are counts of requests, and are replayed as they are. Of `outages` the policy hears in the next period.
    """

    def __init__(
        self,
        services: Sequence[Served],
        cascades: Sequence[Cascaded],
        nodes: Sequence[Nodes],
        seed: int = 0,
        known: bool = False,
        recorded: bool = False,
        outages: Sequence[Outage] = (),
    ) -> None:
        self._services = services
        self._cascades = cascades
        self._nodes = nodes
        self._known = known
        self._outages = outages
        self._seed = seed
        self._seconds = len(services[0].rates)
        self._every: list[Served | Cascaded] = [*services, *cascades]
        self._forecasts: dict[int, dict[str, Forecast]] = {}
        """By period and name, as they are before the first second."""
        rng = np.random.default_rng(seed)
        self._arrivals = {
            each.name: each.rates if recorded else rng.poisson(each.rates).astype(np.float64) for each in self._every
        }

    def run(self, policy: Policy, replicas: Mapping[str, int], period_s: int = PERIOD_S) -> Outcome:
        """From so many replicas of each service on."""
        pools = {each.name: _Pool(each, replicas[each.name]) for each in self._services}
        if period_s not in self._forecasts:
            self._forecasts[period_s] = {each.name: self._forecast(each, period_s) for each in self._every}
        forecasts = deepcopy(self._forecasts[period_s])
        outcome = Outcome(
            dict.fromkeys(forecasts, 0.0),
            {each.name: each.worth * float(self._arrivals[each.name].sum()) for each in self._every},
            {each.name: float(self._arrivals[each.name].sum()) for each in self._every},
            dict.fromkeys(forecasts, 0.0),
            dict.fromkeys(pools, 0),
            seconds=self._seconds,
        )
        chosen = dict.fromkeys((each.name for each in self._cascades), 0)
        rng = np.random.default_rng(self._seed)
        for now in range(self._seconds):
            self._lose(now, pools, rng, outcome)
            surges = self._surges(now, forecasts) if now % period_s and now % LOOK_S == 0 else {}
            due = now % period_s == 0 or surges
            if due and (decision := self._decide(policy, now, period_s, pools, forecasts, surges)):
                for index, cascade in enumerate(self._cascades):
                    chosen[cascade.name] = decision.choices[index]
                for name, pool in pools.items():
                    outcome.moves[name] += decision.replicas[name] != pool.running
                    pool.resize(now, decision.replicas[name])
                outcome.reasons += [(now, str(change)) for change in decision.changes]
            self._second(now, pools, chosen, outcome)
        return outcome

    def _lose(self, now: int, pools: Mapping[str, _Pool], rng: np.random.Generator, outcome: Outcome) -> None:
        """What is on nodes of which it is known from this second on that they go."""
        for outage in self._outages:
            if now == max(0, outage.second - outage.notice_s):
                there = sum(each.count * each.gpus for each in self._there(now, but=outage))
                share = min(1.0, outage.nodes.count * outage.nodes.gpus / max(there, 1))
                for pool in pools.values():
                    pool.lose(share, outage.second, rng)
                outcome.reasons.append((now, f"{outage.nodes.count} nodes go at {outage.second} s"))

    def _there(self, now: int, but: Outage | None = None) -> list[Nodes]:
        """The nodes on which something may be started."""
        there = list(self._nodes)
        for outage in self._outages:
            if outage is not but and outage.avoided(now):
                away = outage.nodes
                at = next(at for at, each in enumerate(there) if (each.gpus, each.cpus) == (away.gpus, away.cpus))
                there[at] = replace(there[at], count=max(0, there[at].count - away.count))
        return [each for each in there if each.count]

    def _second(self, now: int, pools: Mapping[str, _Pool], chosen: Mapping[str, int], outcome: Outcome) -> None:
        asked = {each.name: float(self._arrivals[each.name][now]) for each in self._services}
        for cascade in self._cascades:
            count = float(self._arrivals[cascade.name][now])
            asked[cascade.first] += count
            asked[cascade.then] += count * cascade.choices[chosen[cascade.name]][0]
        done = {name: pool.second(now, asked[name]) for name, pool in pools.items()}
        shares = {name: utility for name, (_, utility) in done.items()}
        for each in self._every:
            answered, _ = done[each.name if isinstance(each, Served) else each.first]
            outcome.answered[each.name] += float(self._arrivals[each.name][now]) * answered
        for each in self._services:
            outcome.earned[each.name] += each.worth * float(self._arrivals[each.name][now]) * shares[each.name]
            pool = pools[each.name]
            outcome.gpu_s += (pool.running + len(pool.leaving)) * each.shape.gpus
        for cascade in self._cascades:
            accuracy = cascade.choices[chosen[cascade.name]][1]
            gained = cascade.first_accuracy + (accuracy - cascade.first_accuracy) * shares[cascade.then]
            best = cascade.choices[0][1]
            count = float(self._arrivals[cascade.name][now])
            outcome.earned[cascade.name] += cascade.worth * count * shares[cascade.first] * gained / best

    def _forecast(self, each: Served | Cascaded, period_s: int) -> Forecast:
        start_s = each.start_s if isinstance(each, Served) else 0.0
        forecast = Forecast(period_s, 1 + math.ceil(start_s / period_s))
        bins = max(1, period_s // PERIOD_S)
        before = each.history[: len(each.history) // bins * bins].reshape(-1, bins).mean(axis=1)
        for rate in before.tolist():
            forecast.observe(rate)
        return forecast

    def _surges(self, now: int, forecasts: Mapping[str, Forecast]) -> dict[str, float]:
        """Requests per second that have just been more than was planned for."""
        return surges({name: counts[now - LOOK_S : now] for name, counts in self._arrivals.items()}, forecasts)

    def _decide(
        self,
        policy: Policy,
        now: int,
        period_s: int,
        pools: Mapping[str, _Pool],
        forecasts: Mapping[str, Forecast],
        surges: Mapping[str, float],
    ) -> Decision | None:
        """At a period's end, or where there are `surges` before. None where nodes are away, and the least replicas of
        all have no room on the others."""
        since_s = now % period_s or period_s
        rates, spreads = {}, {}
        for each in self._every:
            if now and not surges:
                before = self._arrivals[each.name][now - period_s : now]
                forecasts[each.name].observe(float(before.mean()), excess(before))
            rates[each.name] = max(forecasts[each.name].planned, surges.get(each.name, 0.0))
            spreads[each.name] = min(forecasts[each.name].spread, _MOST_SPREAD)
            if self._known:
                coming = each.rates[now : now + 2 * period_s]
                rates[each.name] = float(coming.mean())
                spreads[each.name] = float(coming.std() / max(coming.mean(), 1e-9))
        offers = [self._levels(cascade, since_s, pools, rates, spreads) for cascade in self._cascades]
        levels = {name for cascade in self._cascades for name in (cascade.first, cascade.then)}
        for served in self._services:
            if served.name not in levels:
                rate, service = rates[served.name], self._service(served, since_s, pools)
                worth = served.worth * served.curve(rate, spreads[served.name])
                if served.weight is not None:
                    worth *= served.weight / served.worth / rate if rate > 0 else 0.0
                    service = replace(service, price=price(worth, served.weight))
                offers.append(Offer((service,), ((worth,),), batch=served.batch))
        try:
            decision = policy.decide(float(now), offers, self._there(now))
        except BudgetError:
            if not any(outage.avoided(now) for outage in self._outages):
                raise
            decision = None
        if not surges:
            for pool in pools.values():
                pool.asked = 0.0
        return decision

    def _levels(
        self,
        cascade: Cascaded,
        since_s: int,
        pools: Mapping[str, _Pool],
        rates: Mapping[str, float],
        spreads: Mapping[str, float],
    ) -> Offer:
        first, then = pools[cascade.first].served, pools[cascade.then].served
        rate, best = rates[cascade.name], cascade.choices[0][1]
        alternatives = []
        for share, accuracy in cascade.choices:
            added = (accuracy - cascade.first_accuracy) / share if share else 0.0
            alternatives.append(
                (
                    _shared(first, rates, spreads, rate, cascade.worth * cascade.first_accuracy / best),
                    _shared(then, rates, spreads, rate * share, cascade.worth * added / best),
                )
            )
        services = tuple(self._service(each, since_s, pools) for each in (first, then))
        return Offer(services, tuple(alternatives))

    def _service(self, served: Served, since_s: int, pools: Mapping[str, _Pool]) -> Service:
        pool = pools[served.name]
        return Service(
            served.name, served.shape, served.least, served.most, pool.running, served.start_s, pool.load(since_s)
        )


def _shared(
    level: Served, rates: Mapping[str, float], spreads: Mapping[str, float], more: float, worth: float
) -> Floats:
    """What a level earns of its own requests and of `more` that are worth something else: both are answered alike."""
    own = rates[level.name]
    total = max(own + more, 1e-12)
    curve: Floats = level.curve(total, spreads[level.name]) * (own * level.worth + more * worth) / total
    return curve
