"""How many requests a gateway has at a time, in rooms that do not take each other's places.

A request that a service is to compute is in the room of bodies until its body is there, then in that of all services,
of which each has a part. Whoever only looks, or loads adapters and tasks, has other rooms, and health probes need no
place. So however many streams go on and however slowly bodies come, probes, metrics and administration are answered,
and no service keeps another from being asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.statuses import below_root, error_response
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

PROBES = ("/v2/health/live", "/v2/health/ready", "/health", "/ping")
"""What load balancers and load generators ask, without a key and without a place."""
CONSOLE, CONSOLE_STREAM = "/console", "/console/stream"
"""A page, and what it follows for as long as it is open."""
_STATUS = ("/stats", "/metrics")
_MANAGEMENT = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v2/repository/")
_BODIES, _SERVICES = "bodies on their way", "requests to services"
_STATUS_PAGES, _LOADS, _DESCRIPTIONS = "status pages", "loads of adapters and tasks", "lists and descriptions"
_CONSOLES = "consoles"
_OTHERS = {_STATUS_PAGES: 16, _LOADS: 16, _DESCRIPTIONS: 64, _CONSOLES: 32}
_PROBED = 64
"""Probes at a time that Serve lets through."""
_PLACE = "pliant.place"
_SLOW_S = 1.0
"""A body that takes longer makes way for others."""
_RETRY_AFTER_S = 1.0


Refused = Callable[[str, Outcome], None]
"""Counts a request for which there was no place, by the service that it named, "" if that is not known yet, and how it
ended."""


def most_at_once(config: GatewayConfig) -> int:
    """Requests that one gateway may have from Serve: as many as there are places, so that Serve refuses none itself."""
    return 2 * config.max_ongoing_requests + sum(_OTHERS.values()) + _PROBED


def most_of_a_service(config: GatewayConfig, services: int) -> int:
    """Requests that one of so many services may have of a gateway: unless configured, three quarters of all."""
    most = config.max_ongoing_requests
    return config.max_per_service or (most if services == 1 else max(1, most * 3 // 4))


def hold(scope: Scope, service: str) -> None:
    """Have this HTTP request count as one of `service` until it is over. Raises RequestError if it has too many.

    What is done in the background has no place.
    """
    place: _Place | None = scope.get(_PLACE)
    if place:
        place.serve(service)


class Places:
    """ASGI middleware that gives HTTP requests places, or refuses them as too many; `refused` counts those, and
    `occupied` hears which share of the places of services is taken, whenever that changes."""

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        services: Collection[str],
        refused: Refused,
        occupied: Callable[[float], None],
    ) -> None:
        self._app = app
        self._services = frozenset(services)
        self._refused = refused
        most = {_BODIES: config.max_ongoing_requests, _SERVICES: config.max_ongoing_requests, **_OTHERS}
        self._rooms = _Rooms(most, most_of_a_service(config, len(services)), occupied)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or below_root(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        place = _Place(self._rooms, receive, self._named(scope), self._refused)
        try:
            place.enter(_room(scope))
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        try:
            scope[_PLACE] = place  # not into a copy: who is outside wants to know the route
            await self._app(scope, place.receive, send)
        finally:
            place.leave()

    def _named(self, scope: Scope) -> str:
        """The service in the path, if there is one."""
        _, _, rest = below_root(scope).partition("/models/")
        name = rest.partition("/")[0]
        return name if name in self._services else ""


class _Rooms:
    """The places of a gateway."""

    def __init__(self, most: dict[str, int], most_of_a_service: int, occupied: Callable[[float], None]) -> None:
        self.most = most
        """Places by room."""
        self.most_of_a_service = most_of_a_service
        self.taken: Counter[str] = Counter()
        """By room."""
        self.served: Counter[str] = Counter()
        """By service."""
        self.bodies: dict[int, _Place] = {}
        """Those whose body is on its way, by the order in which they came."""
        self._occupied = occupied

    def take(self, room: str, count: int = 1) -> None:
        """So many more are in this room."""
        self.taken[room] += count
        if room == _SERVICES:
            self._occupied(self.taken[room] / self.most[room])


class _Place:
    """Where one request is."""

    def __init__(self, rooms: _Rooms, receive: Receive, named: str, refused: Refused) -> None:
        self._rooms = rooms
        self._receive = receive
        self._named = named
        """The service, as far as it is known."""
        self._refused = refused
        self._room = ""
        """None yet, or none any more."""
        self._service = ""
        self._came_s = asyncio.get_running_loop().time()
        self._waiting: asyncio.Timeout | None = None
        """While it waits for a part of its body."""
        self._evicted = False

    def enter(self, room: str) -> None:
        """Leave the room that it is in for another. Raises RequestError if that is full."""
        full = self._rooms.taken[room] >= self._rooms.most[room]
        if full and not (room == _BODIES and self._rooms.bodies and next(iter(self._rooms.bodies.values())).evict()):
            raise self._busy(f"the gateway has {self._rooms.most[room]} {room}, which is all that it takes at a time")
        self._leave_room()
        self._room = room
        self._rooms.take(room)
        if room == _BODIES:
            self._rooms.bodies[id(self)] = self

    def evict(self) -> bool:
        """Give the place of a body that takes long to another one; whether it takes long."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._came_s < _SLOW_S:
            return False
        self._evicted = True
        self._leave_room()
        if self._waiting:
            self._waiting.reschedule(loop.time())
        return True

    def serve(self, service: str) -> None:
        """Count as a request of `service`. Raises RequestError if that has too many."""
        self._named = service
        if self._rooms.served[service] >= self._rooms.most_of_a_service:
            raise self._busy(
                f"{service} has {self._rooms.most_of_a_service} requests in this gateway, which is all that one "
                "service gets of it"
            )
        self._service = service
        self._rooms.served[service] += 1

    async def receive(self) -> Message:
        """As ASGI has it. Raises RequestError once the body has to make way for others, and when it is there and there
        is no place where it is to go."""
        if self._room != _BODIES and not self._evicted:
            return await self._receive()
        try:
            async with asyncio.timeout(0 if self._evicted else None) as self._waiting:
                message = await self._receive()
        except TimeoutError:
            self._refused(self._named, Outcome.REJECTED)
            raise RequestError(
                Outcome.REJECTED, "the body comes too slowly while others wait", _RETRY_AFTER_S, Fault.SLOW_BODY
            ) from None
        finally:
            self._waiting = None
        if not message.get("more_body", False):
            self.enter(_SERVICES)
        return message

    def leave(self) -> None:
        """The request is over."""
        self._leave_room()
        if self._service:
            self._rooms.served[self._service] -= 1

    def _busy(self, reason: str) -> RequestError:
        self._refused(self._named, Outcome.SHED)
        return RequestError(Outcome.SHED, reason, _RETRY_AFTER_S)

    def _leave_room(self) -> None:
        if self._room:
            self._rooms.take(self._room, -1)
            self._rooms.bodies.pop(id(self), None)
            self._room = ""


def _room(scope: Scope) -> str:
    path = below_root(scope)
    if path.startswith(_MANAGEMENT):
        return _LOADS
    if path == CONSOLE_STREAM:
        return _CONSOLES
    if path in _STATUS:
        return _STATUS_PAGES
    return _BODIES if scope["method"] == "POST" else _DESCRIPTIONS
