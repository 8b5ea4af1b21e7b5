"""The gateway's side of planning: report to the planner what arrives, and follow its plan.

Plain asyncio, without Ray. The planner may be gone for as long as it likes: requests go on as they went.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.table import ReplicaTable
from pliant.policies.cluster.autoscaling import HIGH, LOW

logger = logging.getLogger("pliant")

T = TypeVar("T")

Exchange = Callable[[str, str, Mapping[str, News]], Awaitable[tuple[str, Mapping[str, Guidance]]]]

_ANSWER_WITHIN_S = 3.0
"""Planners answer within one. One that stopped is not asked again for longer than that after it was replaced."""
_RETRY_S = 1.0
_NOTHING = Guidance()


class Tally:
    """News of one service, as they come in; `requests` counts how they end, `clock` tells seconds since 1970."""

    def __init__(
        self, requests: Mapping[str, int] = MappingProxyType({}), clock: Callable[[], float] = time.time
    ) -> None:
        self._news = News()
        self._requests = requests
        self._clock = clock

    def arrived(self, tokens: int) -> None:
        self._news.arrived[tokens] += 1
        self._news.seconds[int(self._clock())] += 1

    def asked(self, service: str) -> None:
        """Another service was asked for a request of this one."""
        self._news.asked[service] += 1

    def answered(self, share_of_slo: float) -> None:
        self._news.answered += 1
        self._news.near_slo += share_of_slo >= HIGH
        self._news.above_half += share_of_slo >= LOW
        self._news.late += share_of_slo > 1

    def wrote(self, tokens: int) -> None:
        """An answer of so many tokens."""
        self._news.answered += 1
        self._news.tokens += tokens

    def sure(self, degree: int) -> None:
        """A cascade's first level was sure of a text to that degree."""
        self._news.sure[degree] += 1

    def drifted(self) -> None:
        """A cascade's level began to send on another share of texts than in the profile."""
        self._news.drifts += 1

    def shed(self) -> None:
        self._news.shed += 1

    def lost(self) -> None:
        """A text got no answer, or none in time: nobody is idle, but more replicas may be no help."""
        self._news.answered += 1
        self._news.above_half += 1

    def take(self) -> News:
        """What is new since the last `take`."""
        news, self._news = self._news, News()
        news.requests = dict(self._requests)
        return news


class Follower:
    """Keeps `tables` in step with the planner, and reports `tallies` to it, both by service. `me` is this gateway."""

    def __init__(
        self, me: str, exchange: Exchange, tables: Mapping[str, ReplicaTable[Any, Any]], tallies: Mapping[str, Tally]
    ) -> None:
        self._me = me
        self._exchange = exchange
        self._tables = tables
        self._tallies = tallies
        self._guidance: Mapping[str, Guidance] = {}
        self._epoch = 0
        """Of the newest planner that answered."""
        self._replaced = asyncio.Event()
        """Set, and made anew, when a newer planner answers."""
        self.reached = True
        """Whether the planner answered when it was last asked."""

    async def run(self) -> None:
        """Exchange news for guidance for ever."""
        seen = ""
        while True:
            news = {name: tally.take() for name, tally in self._tallies.items()}
            try:
                async with asyncio.timeout(_ANSWER_WITHIN_S):
                    answered, guidance = await self._exchange(self._me, seen, news)
            except Exception as error:
                if self.reached:
                    logger.warning("the planner cannot be reached; lengths stay as they are: %r", error)
                self.reached = False
                self._follow({})
                await asyncio.sleep(_RETRY_S)
                for tally in self._tallies.values():
                    tally.take()  # old news would look like a burst
                continue
            self.reached = True
            if self._outdated(guidance):
                await asyncio.sleep(_RETRY_S)  # a newer one may be asked then, or this one hears that there was one
            else:
                seen = answered
                self._follow(guidance)

    def of(self, service: str) -> Guidance:
        """What the planner last said; empty while it cannot be reached."""
        return self._guidance.get(service, _NOTHING)

    async def while_it_lasts(self, call: Awaitable[T]) -> T:
        """What `call`, of the planner, comes to. Raises ReplicaLostError as soon as a newer planner answers: the one
        that was called may have stopped.
        """
        calling, replaced = asyncio.ensure_future(call), asyncio.ensure_future(self._replaced.wait())
        try:
            await asyncio.wait((calling, replaced), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise ReplicaLostError("there is a newer planner")
            return calling.result()
        finally:
            calling.cancel()
            replaced.cancel()

    def _outdated(self, guidance: Mapping[str, Guidance]) -> bool:
        """Whether it is of a planner that another one has taken over from."""
        epoch = max((each.epoch for each in guidance.values()), default=0)
        self._epoch, before = max(self._epoch, epoch), self._epoch
        if 0 < before < epoch:
            self._replaced.set()
            self._replaced = asyncio.Event()
        return 0 < epoch < before

    def _follow(self, guidance: Mapping[str, Guidance]) -> None:
        self._guidance = guidance
        for name, table in self._tables.items():
            now = self.of(name)
            known = table.reports()
            for replica, report in now.reports.items():
                if replica in known and known[replica]["version"] < report["version"]:
                    table.observe(replica, report)
            table.stop_routing(now.moving)
            table.starts_within_s = now.starts_within_s
            if now.gateways:
                table.chooser.share(self._me, now.gateways)
