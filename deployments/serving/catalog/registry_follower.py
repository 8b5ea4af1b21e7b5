"""The gateway's side of a registry: know all that is registered, and change it for clients."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.kind import Ask
from pliant.deployments.serving.messages import Entry, Rejected
from pliant.deployments.serving.outcome import Outcome, RequestError

logger = logging.getLogger("pliant")

COME_BACK_S = 5.0
"""When it is worth trying again what the planner could not do."""


class RegistryFollower(CatalogFollower[Entry]):
    """Keeps `known` in step with the registry while `run` runs.

    `what` names the entries, `see` tells where they are listed, and a change is waited for `change_within_s`.
    """

    def __init__(self, ask: Ask, what: str, see: str, change_within_s: float) -> None:
        super().__init__(partial(ask, "news"), what)
        self._ask_part = ask
        self._see = see
        self._change_within_s = change_within_s

    async def _change(self, method: str, *what: Any) -> Entry:
        """What a change by the planner, `method` of the registry, comes to. Raises RequestError."""
        try:
            async with asyncio.timeout(self._change_within_s):
                done: Entry | Rejected = await self._ask_part(method, *what)
        except Exception as error:
            logger.warning("%s could not be changed: %r", self._what, error)
            told = (
                f"the planner, which keeps the {self._what}, does not answer; see {self._see} for what became of this"
            )
            raise RequestError(Outcome.UNAVAILABLE, told, COME_BACK_S) from None
        if isinstance(done, Rejected):
            if done.outcome is not Outcome.REJECTED:
                raise RequestError(done.outcome, done.reason, COME_BACK_S)
            raise RequestError(done.outcome, done.reason, fault=done.fault, param=done.param)
        await self.catch_up()  # or else `run` hears of it
        return done
