"""The gateway's side of the registry of adapters: know all of them, and change it for clients."""

from __future__ import annotations

from pliant.deployments.llm.messages import Registered
from pliant.deployments.serving.catalog.registry_follower import COME_BACK_S, RegistryFollower
from pliant.deployments.serving.kind import Ask
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.tenants import current

_CHANGE_WITHIN_S = 15.0


class AdapterFollower(RegistryFollower[Registered]):
    """Keeps `known`, the adapters by name, in step with the registry while `run` runs."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, "adapters", "/v1/models", _CHANGE_WITHIN_S)

    async def find(self, name: str) -> Registered | None:
        """The adapter that is called so; one that is not known may be news, so the registry is asked.

        Raises RequestError when it does not answer.
        """
        if name not in self.known and not await self.catch_up():
            reason = f"whether there is an adapter {name[:200]!r} cannot be said, as {self.away}; retry later"
            raise RequestError(Outcome.UNAVAILABLE, reason, COME_BACK_S)
        return self.known.get(name)

    async def load(self, name: str, path: str, service: str | None, in_place: bool) -> Registered:
        """Load an adapter for all gateways and replicas.

        Those that do not hear of it in time, perhaps this one, ask when they are given its name, as `find` does. Raises
        RequestError.
        """
        return await self._load(name, path, service, in_place, current().manager)

    async def unload(self, name: str) -> Registered:
        """Unload an adapter everywhere; gateways that do not hear of it in time, perhaps this one, do so a bit later.

        Raises RequestError.
        """
        return await self._unload(self.known.get(name), name, current().manager)
