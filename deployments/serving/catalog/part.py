"""A registry as a kind's part of the planner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Generic

from pliant.deployments.serving.catalog.catalog import Seen
from pliant.deployments.serving.catalog.registry import Registry, RejectedError
from pliant.deployments.serving.kind import Part
from pliant.deployments.serving.messages import CatalogNews, Entry, Rejected
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.state.record import StateError

_NEWS_WITHIN_S = 5.0


class CatalogPart(Part, Generic[Entry]):
    """Tells followers of `registry` what is in it, and changes it for clients."""

    def __init__(self, registry: Registry[Entry, Any]) -> None:
        self._registry = registry

    async def started(self) -> None:
        await self._registry.started()

    def check(self) -> None:
        self._registry.check()

    async def news(
        self, follower: str, seen: Seen, wait: bool, failed: Mapping[Any, str] = MappingProxyType({})
    ) -> CatalogNews[Entry]:
        """What became of entries since `seen`: now, or else as soon as there is something, or after some seconds.

        A replica that follows has seen an entry when it has it in memory, or says why it `failed`. Raises StateError
        where another planner may know better: one that has not heard of a change takes no gateway back behind it, and
        gives no answer that is not to `wait`.
        """
        if not wait or (seen[0] and not self._registry.catalog.gave(seen)):
            await self._registry.confirm()
        return await self._registry.catalog.follow(follower, seen, _NEWS_WITHIN_S if wait else 0, failed)

    async def load(self, *what: Any) -> Entry | Rejected:
        """See the registry's own."""
        return await self._confirmed(partial(self._registry.load, *what))

    async def unload(self, *what: Any) -> Entry | Rejected:
        """See the registry's own."""
        return await self._confirmed(partial(self._registry.unload, *what))

    async def _confirmed(self, change: Callable[[], Awaitable[Entry]]) -> Entry | Rejected:
        """What `change` comes to. It is not rejected by what may no longer be so."""
        await self.started()
        looks = self._registry.looks
        try:
            return await change()
        except RejectedError as error:
            if error.rejected.outcome is not Outcome.REJECTED:
                return error.rejected
            try:
                await self._registry.confirm()
                if looks != self._registry.looks:
                    raise StateError("what is stored was read only now")
            except StateError as unsure:
                return Rejected(Outcome.UNAVAILABLE, f"nothing was changed, because {unsure}")
            return error.rejected
