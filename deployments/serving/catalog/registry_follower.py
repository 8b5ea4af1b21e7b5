"""The gateway's side of a registry: know all that is registered, and change it for clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.kind import Ask
from pliant.deployments.serving.messages import Entry, Rejected
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

logger = logging.getLogger("pliant")

COME_BACK_S = 5.0
"""When it is worth trying again what the planner could not do."""
_AGAIN_S = 0.2
"""After which it is tried again when the planner died: Serve may not know yet."""


class RegistryFollower(CatalogFollower[Entry]):
    """Keeps `known` in step with the registry while `run` runs.

    `what` names the entries, `see` says where they are listed, and a change is waited for `change_within_s`.
    """

    def __init__(self, ask: Ask, what: str, see: str, change_within_s: float) -> None:
        super().__init__(partial(ask, "news"), what)
        self._ask_part = ask
        self._see = see
        self._change_within_s = change_within_s

    async def _load(self, *what: Any) -> Entry:
        """What the registry's `load` of `what` comes to. Raises RequestError."""
        load = partial(self._ask_part, "load", *what)
        return await self._change(load, again=partial(load, True))

    async def _unload(self, known: Entry | None, *what: Any) -> Entry:
        """What the registry's `unload` of `what`, here `known`, comes to. Raises RequestError."""
        unload = partial(self._ask_part, "unload", *what)
        return await self._change(unload, again=partial(self._gone, unload, known))

    async def _gone(self, unload: Callable[[], Awaitable[Entry | Rejected]], known: Entry | None) -> Entry | Rejected:
        """What is gone now, and was `known`, the first call has unloaded; of what was not, that cannot be said."""
        done = await unload()
        if not isinstance(done, Rejected) or done.fault is not Fault.NOT_FOUND:
            return done
        return known or done._replace(outcome=Outcome.UNAVAILABLE)

    async def _change(
        self, change: Callable[[], Awaitable[Entry | Rejected]], again: Callable[[], Awaitable[Entry | Rejected]]
    ) -> Entry:
        """What `change` by the planner comes to; where that dies or is replaced meanwhile, `again` by the next, which
        may find that the change has come about. Raises RequestError."""
        try:
            async with asyncio.timeout(self._change_within_s):
                while True:
                    try:
                        done = await change()
                        break
                    except ReplicaLostError as error:
                        logger.warning("%s are changed again by another planner: %s", self._what, error)
                        change = again
                        await asyncio.sleep(_AGAIN_S)
        except Exception as error:
            logger.warning("%s could not be changed: %r", self._what, error)
            reason = (
                f"the planner, which keeps the {self._what}, does not answer; see {self._see} for what became of this"
            )
            raise RequestError(Outcome.UNAVAILABLE, reason, COME_BACK_S) from None
        if isinstance(done, Rejected):
            if done.outcome is not Outcome.REJECTED and change is again:
                reason = f"the planner was replaced meanwhile; see {self._see} for what became of this"
                raise RequestError(Outcome.UNAVAILABLE, reason, COME_BACK_S)
            if done.outcome is not Outcome.REJECTED:
                raise RequestError(done.outcome, done.reason, COME_BACK_S)
            raise RequestError(done.outcome, done.reason, fault=done.fault, param=done.param)
        await self.catch_up()  # or else `run` hears of it
        return done
