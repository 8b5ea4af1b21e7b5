"""One budget for all services: what was measured of each becomes what its replicas earn, and the program shares out.

Plain asyncio, without Ray. Nothing here is needed to answer requests, and nothing is remembered that replicas do not
show: a planner that starts anew takes over what runs, and changes nothing until it has seen a minute of demand.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from pliant.config.base import ElasticServiceConfig
from pliant.config.budget import BudgetConfig
from pliant.config.cluster import PLANNER_CPUS, ServingConfig
from pliant.deployments.serving.budget_policies import by_name, checked
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.plans import corrected
from pliant.deployments.serving.starting_replicas import StartingReplicas
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.valuer import Value, Valuer
from pliant.policies.cluster.budget import BudgetError, Nodes, Shape
from pliant.policies.cluster.control import Decision, Offer, Service, price
from pliant.policies.cluster.correction import Correction
from pliant.policies.cluster.forecast import LOOK_S, Forecast, excess, surges
from pliant.policies.cluster.latest_seconds import LatestSeconds
from pliant.policies.cluster.room import counted, free, has_gpus, shape_of

logger = logging.getLogger("pliant")

PERIOD_S = 10.0
SETTLED_S = 60.0
SLEEPS_AFTER_S = 300.0
"""Without a request, a service that may."""
_MOST_SPREAD = 1.0
_LASTING = 6
"""Periods, on average of which it is said who asks how much."""


class JointBudget:
    """`step` every `PERIOD_S`, and `look` every `LOOK_S` in between. `nodes` says what there is to share, beside so
    many `gateways`; `valuers` are of those services that can be judged.

    Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        config: ServingConfig,
        valuers: Mapping[str, Valuer[Any]],
        tables: Mapping[str, ReplicaTable[Any, Any]],
        starting: StartingReplicas,
        nodes: Callable[[], Awaitable[Sequence[Nodes]]],
        gateways: Callable[[], int],
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        assert config.budget
        self._budget: BudgetConfig = config.budget
        self._config = config
        self._sizes = {name: sizes for name, service in config.services.items() if (sizes := service.replica_range())}
        self._valuers = {name: valuer for name, valuer in valuers.items() if not self._sizes[name].fixed}
        self._tables = tables
        self._starting = starting
        self._nodes = nodes
        self._gateways = gateways
        self._clock = clock
        self._began = self._binned = clock()
        self._arrived: Counter[str] = Counter()
        self._seconds = {name: LatestSeconds() for name in self._valuers}
        self._surges: dict[str, float] = {}
        """Requests per second that are more than was planned for, as they have just been."""
        self._met: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._asked_rates: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=_LASTING))
        """By service and the other one, a cascade, whose requests it is asked for."""
        self._forecasts = {name: Forecast(PERIOD_S, self._ahead(name)) for name in self._valuers}
        self._corrections = {name: Correction() for name in self._valuers}
        self._served_by: dict[str, frozenset[str]] = {}
        """Replicas that there were when it was last looked."""
        self._policy = by_name(config.budget.policy)
        self._wanted: dict[str, int] = {}
        self._asked_at = dict.fromkeys(self._valuers, self._began)
        self._because: dict[str, str] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._problem = ""

    def hear(self, service: str, news: News) -> None:
        """Take in what a gateway saw."""
        for part, count in news.asked.items():
            self._asked[part, service] += count
            self.wake(part)
        if valuer := self._valuers.get(service):
            self._arrived[service] += (arrived := news.arrived.total())
            self._seconds[service].add(news.seconds, self._clock())
            self._met[service] += news.answered - news.late
            self._missed[service] += news.shed + news.late
            valuer.hear(news)
            if arrived:
                self.wake(service)

    def wake(self, service: str) -> None:
        """Have a replica of `service` start if it sleeps, whatever that earns; one that does not stays awake."""
        if service not in self._valuers:
            return
        self._asked_at[service] = self._clock()
        if not (self._sizes[service].min or self._running(service)):
            self._wanted[service] = 1
            self._because[service] = "it was asleep, and is asked for something"
            logger.info("%s 0 → 1: %s", service, self._because[service])

    def wanted(self) -> Mapping[str, int]:
        """By service: how many replicas there should be, once that was decided."""
        return self._wanted

    def facts(self, service: str) -> dict[str, Any]:
        """What /stats says of the service's plan."""
        if service not in self._valuers:
            return {}
        facts: dict[str, Any] = {
            "wanted_replicas": max(self._running(service), self._sizes[service].min),
            "wanted_because": self._problem or self._because.get(service, "nothing has called for another number yet"),
        }
        if service in self._facts:
            facts["budget"] = self._facts[service]
        return facts

    async def run(self) -> None:
        """Step and look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await (self.step() if self._clock() - self._binned >= PERIOD_S else self.look())
            except Exception:
                logger.exception("the budget could not be shared out; trying again")

    async def step(self) -> None:
        """Look at the demand since the last step, and decide, unless the planner has only begun."""
        now = self._clock()
        seconds, self._binned = now - self._binned, now
        for name, forecast in self._forecasts.items():
            rate = self._arrived.pop(name, 0) / seconds
            forecast.look(self._ahead(name))
            forecast.observe(rate, excess(self._seconds[name].over(round(PERIOD_S), now)) if rate else 0.0)
            self._correct(name, rate, seconds)
        for pair in self._asked_rates.keys() | self._asked.keys():
            self._asked_rates[pair].append(self._asked.pop(pair, 0) / seconds)
        self._surges = {}
        await self._decide(now)

    async def look(self) -> None:
        """Decide anew where more is asked in these seconds than was planned for."""
        now = self._clock()
        lately = {name: seconds.over(LOOK_S, now) for name, seconds in self._seconds.items()}
        self._surges = surges(lately, self._forecasts)
        if self._surges:
            await self._decide(now)

    async def _decide(self, now: float) -> None:
        self._give_up()
        nodes = await self._nodes()
        values = {name: value for name in self._valuers if (value := self._value(name)) is not None}
        if not values or now - self._began < SETTLED_S:
            return
        left = free(nodes, self._unchanging(values))
        offers = [self._offer(name, value, nodes) for name, value in values.items()]
        reserve = self._budget.reserve if has_gpus(nodes) else 0
        try:
            decision = checked(
                await asyncio.to_thread(self._policy.decide, now, offers, counted(left, nodes), reserve), offers
            )
        except BudgetError as error:
            self._problem = f"{error}; nothing changes. Add nodes, or lower min replicas"
            logger.warning("%s", self._problem)
            return
        except Exception as error:  # whatever a policy of somebody else's raises
            self._problem = f"policy {self._budget.policy} failed: {error}; nothing changes. The planner's log has more"
            logger.exception("policy %s failed; nothing changes", self._budget.policy)
            return
        self._problem = ""
        self._adopt(decision, values)

    def _give_up(self) -> None:
        """Have services sleep that were woken, but never came, once nobody asks for them any more."""
        for name in self._valuers:
            if self._wanted.get(name) and self._silent(name) and not self._tables[name].reports():
                self._because[name] = "it has not started, and is not asked for any more"
                logger.info("%s %d → 0: %s", name, self._wanted[name], self._because[name])
                self._wanted[name] = 0

    def _correct(self, name: str, rate: float, seconds: float) -> None:
        """Learn from what the replicas of `name` did of `rate` requests per second in the last `seconds`."""
        reports = self._tables[name].reports()
        replicas = frozenset(reports)
        same, self._served_by[name] = replicas == self._served_by.get(name), replicas
        count = min(len(replicas), self._sizes[name].max)

        def foreseen(asked: float) -> float:
            value = self._judged(name, asked)
            return 1.0 if value is None else float(value.in_time[count])

        met, missed = self._met.pop(name, 0), self._missed.pop(name, 0)
        self._corrections[name].observe(met, missed, rate, seconds, foreseen if same and rate > 0 else None)

    def _adopt(self, decision: Decision, values: Mapping[str, Value]) -> None:
        for change in decision.changes:
            correction = self._corrections[change.name]
            reasons = change.reason, corrected(correction.measured, correction.value)
            reason = self._because[change.name] = "; ".join(filter(None, reasons))
            logger.info("%s", replace(change, reason=reason))
        for name, (curve, _) in values.items():
            count = self._wanted[name] = int(decision.replicas[name])
            more = float(curve[count + 1] - curve[count]) if count < self._sizes[name].max else 0.0
            self._facts[name] = {
                "demand_per_s": round(self._rate(name), 3),
                "of_these_by": {
                    other: round(fmean(rates), 3) for (part, other), rates in self._asked_rates.items() if part == name
                },
                "in_time": round(float(curve[count]), 4),
                "measured_in_time": self._corrections[name].measured,
                "correction": round(self._corrections[name].value, 3),
                "one_more": round(more, 4),
                "start_s": round(self._starting.seconds(name), 1),
                "start_measured": self._starting.measured(name),
            }

    def _value(self, name: str) -> Value | None:
        """Of what is asked; None if that cannot be said yet."""
        rate = self._rate(name)
        if (rate <= 0 or self._silent(name)) and self._tables[name].reports():
            return Value(np.zeros(self._sizes[name].max + 1), 0.0)
        return self._judged(name, rate * self._corrections[name].value)

    def _silent(self, name: str) -> bool:
        """Whether it may sleep, whatever forecasts say."""
        return not self._sizes[name].min and self._clock() - self._asked_at[name] >= SLEEPS_AFTER_S

    def _judged(self, name: str, rate: float) -> Value | None:
        reports, spread = list(self._tables[name].reports().values()), min(self._forecasts[name].spread, _MOST_SPREAD)
        return self._valuers[name].value(reports, rate, spread, self._sizes[name].max) if reports else None

    def _rate(self, name: str) -> float:
        """What is planned for, per second."""
        return max(self._forecasts[name].planned, self._surges.get(name, 0.0))

    def _ahead(self, name: str) -> int:
        """Periods that forecasts look ahead: what is decided now serves after a start."""
        return 1 + math.ceil(self._starting.seconds(name) / PERIOD_S)

    def _running(self, name: str) -> int:
        """Replicas that were decided on, or that serve or start."""
        if name in self._wanted:
            return self._wanted[name]
        reports = self._tables[name].reports()
        starting = [
            replica
            for replica, step in self._starting.now().get(name, {}).items()
            if not step.failed and replica not in reports
        ]
        return min(len(reports) + len(starting), self._sizes[name].max)

    def _offer(self, name: str, value: Value, nodes: Sequence[Nodes]) -> Offer:
        sizes, config = self._sizes[name], self._config.services[name]
        assert isinstance(config, ElasticServiceConfig)
        worth = config.weight * value.in_time
        shape, start_s = shape_of(*self._reserved(name), nodes), self._starting.seconds(name)
        running = self._running(name)
        load = value.busy / max(1, running)
        least = sizes.min if self._silent(name) else max(1, sizes.min)
        service = Service(name, shape, least, sizes.max, running, start_s, load, price(worth, config.weight))
        return Offer((service,), ((worth,),), batch=config.class_ == "batch")

    def _unchanging(self, values: Mapping[str, Value]) -> list[Shape]:
        """What is not decided on: gateways, the planner, and services that are fixed or not measured yet."""
        taken = [(0.0, self._config.gateway.cpus)] * self._gateways() + [(0.0, PLANNER_CPUS)]
        for name, sizes in self._sizes.items():
            if name not in values:
                taken += [self._reserved(name)] * max(sizes.min, self._running(name))
        return [Shape(gpus, cpus) for gpus, cpus in taken if gpus or cpus]

    def _reserved(self, name: str) -> tuple[float, float]:
        """GPUs and CPUs of a replica."""
        resources = self._config.services[name].resources()
        return resources.get("num_gpus", 0.0), resources.get("num_cpus", 0.0)
