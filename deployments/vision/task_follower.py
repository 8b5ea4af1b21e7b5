"""The gateway's side of the registry of tasks: know all of them, and change it for clients."""

from __future__ import annotations

from pliant.deployments.serving.catalog.registry_follower import COME_BACK_S, RegistryFollower
from pliant.deployments.serving.kind import Ask
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tenants import current
from pliant.deployments.vision.messages import RegisteredTask

_CHANGE_WITHIN_S = 90.0
"""Replicas have half a minute to load a task, and everybody else as long to hear of it."""
_NAMED = 20
"""Tasks that an error lists."""


class TaskFollower(RegistryFollower[RegisteredTask]):
    """Keeps `known`, the tasks by service/name, in step with the registry while `run` runs."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask, "tasks", "the list of tasks", _CHANGE_WITHIN_S)

    def of(self, service: str) -> list[RegisteredTask]:
        """The tasks of `service`, by name."""
        found = [entry for entry in self.known.values() if entry.service == service and not entry.coming]
        return sorted(found, key=lambda entry: entry.task.name)

    async def find(self, service: str, name: str | None) -> RegisteredTask:
        """The task of `service` that is called so; without a name its only one, or else its model's own head.

        What is not known may be news, so that the registry is asked.

        Raises RequestError if there is no such task, or it must be named, or while it cannot be said.
        """
        if (found := self._find(service, name)) is None:
            answered = await self.catch_up()
            if (found := self._find(service, name)) is None:
                raise self._unknown(service, name, answered)
        return found

    async def renewed(self, entry: RegisteredTask) -> RegisteredTask:
        """What has become of `entry`, which a replica cannot have. Raises RequestError if it is gone."""
        answered = await self.catch_up()
        service, name = entry.service, entry.task.name
        if (found := self._find(service, name)) is None:
            raise self._unknown(service, name, answered)
        return found

    async def load(self, service: str, name: str, path: str, replace: bool) -> RegisteredTask:
        """Load a task for all gateways and replicas. Raises RequestError."""
        return await self._load(service, name, path, replace, current().manager)

    async def unload(self, service: str, name: str) -> RegisteredTask:
        """Unload a task everywhere. Raises RequestError."""
        return await self._unload(self.known.get(f"{service}/{name}"), service, name, current().manager)

    def _find(self, service: str, name: str | None) -> RegisteredTask | None:
        if name is not None:
            found = self.known.get(f"{service}/{name}")
            return None if found and found.coming else found
        of_service = self.of(service)
        choice = of_service if len(of_service) == 1 else [entry for entry in of_service if entry.task.is_own]
        return choice[0] if choice else None

    def _unknown(self, service: str, name: str | None, answered: bool) -> RequestError:
        names = [entry.task.name for entry in self.of(service)]
        listed = ", ".join(names[:_NAMED]) + ", and more" * (len(names) > _NAMED)
        if name is None and names:
            return RequestError(Outcome.REJECTED, f"parameters.task: must be given; there are: {listed}")
        if not answered:
            reason = f"the tasks are not known yet, as {self.away}; retry later"
            return RequestError(Outcome.UNAVAILABLE, reason, COME_BACK_S)
        if not names:
            return RequestError(Outcome.REJECTED, f"{service} has no task at all; load one", fault=Fault.NOT_FOUND)
        reason = f"{service} has no task {(name or '')[:100]!r}; there are: {listed}"
        return RequestError(Outcome.REJECTED, reason, fault=Fault.NOT_FOUND)
