"""Whose a request is: what replicas are sent of its tenant, and what a gateway lets it do.

The gateway knows for each HTTP request who sent it; whatever is done for it, in this task or in those that it starts,
finds that by `current`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pliant.config.tenants import ANONYMOUS, OPEN, Right, TenantConfig
from pliant.deployments.serving.messages import Manager
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.message import message
from pliant.policies.cluster.rate_limit import RateLimit

_BUSY_RETRY_S = 1.0
_BACKGROUND_UTILITY = 0.1
"""Of texts for which nobody waits: when they would wait behind others for more than this share of their time, they are
refused, and sent again later."""


@message
class Tenant(NamedTuple):
    """Whose a query is, and its share of a replica compared with others'."""

    name: str = ANONYMOUS
    weight: float = 1.0


class TenantRecorder(Protocol):
    """Where a gateway counts by tenant."""

    def answered(self, tenant: str, status: int) -> None: ...

    def spent(self, tenant: str, tokens: int) -> None: ...


@dataclass
class Spending:
    """What is being computed for a tenant."""

    begun: bool = False
    """Whether some of the answer is there, so that no refusal is one of all."""


class Account:
    """A tenant in one of `gateways` gateways, whose number may change. Unless `config` says otherwise, this one works
    on `most_open` of its requests at a time at most."""

    def __init__(
        self,
        name: str = ANONYMOUS,
        config: TenantConfig = OPEN,
        gateways: Callable[[], int] = lambda: 1,
        most_open: int | None = None,
        recorder: TenantRecorder | None = None,
        now: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self.name = name
        self.config = config
        self._most_open = most_open
        self._recorder = recorder
        self._now = now
        self._open = 0
        self._tokens = 0
        self._statuses: Counter[int] = Counter()
        given = {"requests": config.requests_per_minute, "tokens": config.tokens_per_minute}
        self._given = {what: limit for what, limit in given.items() if limit is not None}
        """Of all gateways."""
        self._gateways = gateways
        self._parts = {what: RateLimit(limit / gateways()) for what, limit in self._given.items()}
        """This gateway's."""

    @property
    def tenant(self) -> Tenant:
        """For replicas."""
        return Tenant(self.name, self.config.weight)

    @property
    def manager(self) -> Manager:
        """For the planner."""
        return Manager(self.name, "manage-all" in self.config.rights, self.config.services)

    def check(self, right: Right, service: str | None = None) -> None:
        """Raise RequestError unless it has `right`, and may use `service`."""
        if not self.may(right):
            reason = f"tenant {self.name} lacks the right {right!r}; it has {', '.join(self.config.rights) or 'none'}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)
        allowed = self.config.services
        if service is not None and allowed is not None and service not in allowed:
            reason = f"tenant {self.name} may not use {service}; it may use {', '.join(allowed) or 'no service'}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)

    def may(self, right: Right) -> bool:
        """Whether it has `right`; who manages all may manage."""
        return right in self.config.rights or (right == "manage" and "manage-all" in self.config.rights)

    def begin(self) -> None:
        """One more of its requests is worked on, until `end`. Raises RequestError if it has sent too much."""
        most_open = self._most_open
        if self.config.requests_at_a_time:
            most_open = max(1, self.config.requests_at_a_time // self._gateways())
        if most_open is not None and self._open >= most_open:
            reason = f"tenant {self.name} has {self._open} requests under way, its limit here; send fewer at a time"
            raise RequestError(Outcome.SHED, reason, _BUSY_RETRY_S)
        now = self._now()
        limits = self._limits(now)
        for what, limit in limits.items():
            if not limit.per_minute:
                reason = f"tenant {self.name} has no quota: its {what}_per_minute is 0"
                raise RequestError(Outcome.SHED, reason, fault=Fault.QUOTA)
            if wait_s := limit.wait_s(min(1.0, limit.per_minute), now):
                reason = f"tenant {self.name} has reached its limit of {limit.per_minute:g} {what} per minute here"
                raise RequestError(Outcome.SHED, f"{reason}; retry in {wait_s:.1f} s", wait_s)
        if requests := limits.get("requests"):
            requests.spend(1, now)
        self._open += 1

    def end(self) -> None:
        """One of its requests is worked on no more."""
        self._open -= 1

    def spend(self, tokens: int) -> None:
        """So many tokens of an answer were computed for it."""
        now = self._now()
        if limit := self._limits(now).get("tokens"):
            limit.spend(tokens, now)
        self._computed(tokens)

    @contextmanager
    def spending(self, tokens: int) -> Iterator[Spending]:
        """So many tokens, of a text or a prompt, are computed for it within. What is refused costs it nothing."""
        now = self._now()
        if limit := self._limits(now).get("tokens"):
            limit.spend(tokens, now)
        spending = Spending()
        try:
            yield spending
        except RequestError:
            if not spending.begun:
                if limit:
                    limit.give_back(tokens, self._now())
                tokens = 0
            raise
        finally:
            self._computed(tokens)

    def answered(self, status: int) -> None:
        """A request of its got this HTTP status."""
        self._statuses[status] += 1
        if self._recorder:
            self._recorder.answered(self.name, status)

    def slo_ms(self, wanted: float) -> float:
        """The time that its requests have that want so much."""
        return self.config.slo_ms.clamp(wanted)

    def utility(self, wanted: float) -> float:
        """What an answer is worth to it that it says is worth so much; little, if nobody waits for it."""
        if in_background():
            return _BACKGROUND_UTILITY
        most = self.config.max_utility
        return wanted if most is None else min(wanted, most)

    def headers(self) -> dict[str, str]:
        """What its limits are in this gateway, what is left of them, and when all of it is there again."""
        now = self._now()
        found = {}
        for what, limit in self._limits(now).items():
            found[f"x-ratelimit-limit-{what}"] = f"{limit.per_minute:.0f}"
            found[f"x-ratelimit-remaining-{what}"] = f"{max(0, math.floor(limit.left(now)))}"
            found[f"x-ratelimit-reset-{what}"] = _duration(limit.wait_s(limit.per_minute, now))
        return found

    def facts(self) -> dict[str, Any]:
        """For /stats."""
        now = self._now()
        left = {f"remaining_{what}": math.floor(limit.left(now)) for what, limit in self._limits(now).items()}
        return {
            "open": self._open,
            "tokens": self._tokens,
            "requests": {str(status): count for status, count in sorted(self._statuses.items())},
            **left,
        }

    def _computed(self, tokens: int) -> None:
        self._tokens += tokens
        if self._recorder:
            self._recorder.spent(self.name, tokens)

    def _limits(self, now: float) -> dict[str, RateLimit]:
        """With as many gateways as there are now."""
        for what, limit in self._parts.items():
            if (part := self._given[what] / self._gateways()) != limit.per_minute:
                limit.change(part, now)
        return self._parts


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.3g}s"


_current: ContextVar[Account] = ContextVar("account")
_background: ContextVar[bool] = ContextVar("background", default=False)
_nobody = Account()


def current() -> Account:
    """Who sent the HTTP request that is worked on; what the cluster does for itself is nobody's, and may do all."""
    return _current.get(_nobody)


def act_for(account: Account, background: bool = False) -> None:
    """From now on this task, and those that it starts, work for `account`, which does not wait if in `background`."""
    _current.set(account)
    _background.set(background)


def in_background() -> bool:
    """Whether what is worked on is to keep nobody else waiting."""
    return _background.get()
