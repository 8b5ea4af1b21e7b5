"""What clients may name, and how far each service is: whether it can answer yet, and what it waits for until then.

A gateway answers from its first second on, while models are trained or downloaded and replicas load them. A service
that has never been ready is refused at once; one that was ready before is waited for when its replicas fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pliant.deployments.serving.messages import STARTING, Step
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.tenants import current

Answers = Literal["texts", "images", "prompts"]
"""What a service takes: texts to classify, images to classify, or prompts to go on with."""

_COME_BACK_S = 2.0
_PATIENCE_S = 1.0
"""A gateway that starts hears within it of replicas that have long been there."""
_OPENS_WITHIN_S = 30.0
"""However slow a machine is on which gateways are replaced; longer takes only a model that cannot be read."""
_POLL_S = 0.02


class Endpoint(Protocol):
    """What answers for a service."""

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True)
class Replicas:
    """Those of one service: how many there should be, how many run, and what others do that start."""

    wanted: Callable[[], int]
    running: Callable[[], int]
    starting: Callable[[], Collection[Step]]
    least: int = 1
    """0: the service sleeps when nothing is asked of it."""


class Service:
    """One service: the `replicas` that it has, or of one that has none, the `parts`."""

    def __init__(
        self, name: str, kind: str, answers: Answers, replicas: Replicas | None = None, parts: Sequence[Service] = ()
    ) -> None:
        self.name = name
        self.kind = kind
        """As in cluster.yaml."""
        self.answers = answers
        self.endpoint: Any = None
        """What answers, once there is something."""
        self.created = 0
        """When there was, in seconds since 1970."""
        self._opened = asyncio.Event()
        self._begun = False
        self._replicas = replicas
        self._parts = parts
        self._opening: Step | None = None

    def open(self, endpoint: Endpoint) -> None:
        """Have `endpoint` answer, from when it is ready."""
        self.endpoint = endpoint
        self.created = int(time.time())
        self._opened.set()

    async def opened(self) -> None:
        """Wait until there is an endpoint."""
        await self._opened.wait()

    def opening(self, text: str, done: float) -> None:
        """What the gateway does before there is an endpoint."""
        self._opening = Step(text, done)

    @property
    def ready(self) -> bool:
        """Whether the service can answer now, or starts a replica when it is asked."""
        return self.endpoint is not None and (bool(self.endpoint.ready) or self.asleep)

    @property
    def asleep(self) -> bool:
        """Whether it has no replica, and one starts when it is asked."""
        return self._replicas is not None and not (self._replicas.wanted() or self._replicas.running())

    @property
    def wakes(self) -> bool:
        """Whether it sleeps at times, and starts a replica now because it was asked something; of one that has none,
        whether a part does."""
        if self.ready:
            return False
        if self._replicas is None:
            return any(part.wakes for part in self._parts)
        return not self._replicas.least

    @property
    def refused(self) -> bool:
        """Whether it is of no use to wait for it, as it takes a person to make it ready."""
        return bool(getattr(self.endpoint, "refused", False))

    @property
    def runs(self) -> bool:
        """Whether it has replicas that run, so that it can answer as soon as there is an endpoint."""
        return self._replicas is not None and self._replicas.running() > 0

    @property
    def begun(self) -> bool:
        """Whether requests may be sent to the endpoint: from when a replica first ran, or if it has no replicas.

        A gateway that starts beside replicas that move or die may never have seen the service ready.
        """
        if not self._begun and self.endpoint is not None:
            self._begun = self.ready or self._replicas is None or self.runs
        return self._begun

    @property
    def state(self) -> str:
        """For people: what the service does or waits for, and how far that is."""
        if self._replicas is None:
            return self._state_by_itself()
        count = f"{self._replicas.running()} of {self._replicas.wanted()} replicas"
        if self.asleep and self.endpoint:
            return "asleep; a request starts a replica"
        if self.ready:
            others = _commonest(self._busy())
            return f"ready, {count}; {others}" if others else f"ready, {count}"
        step = self.step
        if step and step.done:
            return str(step)
        return f"{step or STARTING}, {count}"

    def facts(self) -> dict[str, Any]:
        """For people."""
        step = self.step
        return {
            "kind": self.kind,
            "ready": self.ready,
            "state": self.state,
            "done": step.done if step else None,
        }

    @property
    def step(self) -> Step | None:
        """What it does before it is ready, as far as somebody said."""
        if self._replicas is None or self.ready:
            return None
        return _commonest(self._busy()) or (None if self.endpoint else self._opening)

    def _busy(self) -> list[Step]:
        """What its replicas do that start, as far as they said."""
        return [step for step in self._replicas.starting() if step.text != STARTING] if self._replicas else []

    def _state_by_itself(self) -> str:
        if self.endpoint:
            return str(getattr(self.endpoint, "state", "ready"))
        closed = [f"{part.name} ({part.state})" for part in self._parts if not part.endpoint]
        return f"waits for {', '.join(closed)}" if closed else "starting"


class Services:
    """All services, in the order of the configuration. Whoever asks is patient for `patience_s`."""

    def __init__(self, services: Collection[Service], patience_s: float = _PATIENCE_S) -> None:
        self._services = {service.name: service for service in services}
        self._patience_s = patience_s

    @classmethod
    def of(cls, answers: Answers, endpoints: Mapping[str, Endpoint]) -> Services:
        """`endpoints` of one sort by name, that are all there."""
        services = [Service(name, answers, answers) for name in endpoints]
        for service in services:
            service.open(endpoints[service.name])
        return cls(services)

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services.values())

    def endpoints(self, *answers: Answers) -> dict[str, Any]:
        """Those there are that take one of these, by name."""
        return {service.name: service.endpoint for service in self if service.answers in answers and service.endpoint}

    def find(self, name: str, *answers: Answers) -> Service | None:
        """The service that is called so, if it takes one of these."""
        service = self._services.get(name)
        return service if service and service.answers in answers else None

    async def begun(self, service: Service) -> Any:
        """The endpoint of `service`, for whoever may use it.

        Raises RequestError, which says what is waited for, until it was ready.
        """
        current().check("infer", service.name)
        return await self.opened(service)

    async def opened(self, service: Service) -> Any:
        """The same, whoever asks: of one that another is made of, which they may use.

        Raises RequestError, which says what is waited for, until it was ready.
        """
        since = time.monotonic()
        while not service.begun:
            if time.monotonic() - since >= (_OPENS_WITHIN_S if service.runs else self._patience_s):
                raise not_ready(service)
            await asyncio.sleep(_POLL_S)
        return service.endpoint

    def check_ready(self, *answers: Answers) -> None:
        """Raise RequestError unless all services can answer now that take one of these, by default all that there are,
        and neither need a person first nor sleep at times."""
        asked = [service for service in self if not answers or service.answers in answers]
        late = [service for service in asked if not (service.ready or service.refused or service.wakes)]
        waiting = [f"{each.name} ({each.state})" for each in late]
        if waiting:
            raise RequestError(Outcome.UNAVAILABLE, f"not ready yet: {', '.join(waiting)}", _COME_BACK_S)


def not_ready(service: Service) -> RequestError:
    """What to say of a service that cannot answer yet."""
    return RequestError(Outcome.UNAVAILABLE, f"{service.name} is not ready yet: {service.state}", _COME_BACK_S)


def _commonest(steps: Collection[Step]) -> Step | None:
    """What most replicas do; of these, what the one does that is least far."""
    if not steps:
        return None
    text, _ = Counter(step.text for step in steps).most_common(1)[0]
    return min((step for step in steps if step.text == text), key=lambda step: step.done)
