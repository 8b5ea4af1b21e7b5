"""One image on its way through the call path: which task it is for, and how much time is left."""

from __future__ import annotations

import asyncio
import time

from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.least_held import Share
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tracing import COMPUTE_MS, Attributes
from pliant.deployments.vision.messages import Answer, Query, RegisteredTask
from pliant.deployments.vision.task_follower import TaskFollower

_WAY_BACK_S = 0.002
"""From a replica's answer to the client: replicas have so much less time than there is."""


class ImageErrand(Errand[Share, Query, Answer]):
    """`pixels`, to be answered by `service` until `deadline` of the clock, which is `slo_s` after it came.

    When a replica failed, or there was none, it gets as much time once more: late is better than lost.
    """

    def __init__(
        self,
        service: str,
        pixels: bytes,
        task: RegisteredTask,
        tasks: TaskFollower,
        deadline: float,
        slo_s: float,
        utility: float,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self.subject = service
        self.timeout_s = timeout_s
        self.task = task
        """As it is registered now."""
        self._pixels = pixels
        self._tasks = tasks
        self._deadline = deadline
        self._slo_s = slo_s
        self._utility = utility
        self._given_up = False

    def want(self, late: bool) -> Share:
        return Share(predicted_s=self._left_s(late))

    def query(self, late: bool) -> Query:
        return Query(self._pixels, self.task.task, self._left_s(late), self._utility, self.tenant)

    def facts(self, item: Answer) -> Attributes:
        return {
            "pliant.task": self.task.task.name,
            "pliant.gamma": item.gamma,
            "pliant.fate": item.fate,
            "pliant.images_together": item.rows,
            COMPUTE_MS: item.compute_s * 1e3,
        }

    def waited(self) -> None:
        self._deadline = time.monotonic() + self._slo_s

    def explained(self, refusal: Refusal) -> RequestError:
        return RequestError(refusal.outcome, f"{self.subject}: {refusal.reason}", refusal.retry_after_s, refusal.fault)

    async def renew(self, refusal: Refusal) -> bool:
        """When a task is replaced, replicas may know that first."""
        before = self.task
        try:
            async with asyncio.timeout(self._slo_s):
                self.task = await self._tasks.renewed(before)
        except TimeoutError:
            return False
        return self.task.task != before.task

    def _left_s(self, late: bool) -> float:
        if late and not self._given_up:
            self._given_up = True
            self._deadline = time.monotonic() + self._slo_s
        left_s = self._deadline - time.monotonic() - _WAY_BACK_S
        if left_s > 0:
            return left_s
        if late:
            return self._slo_s
        raise RequestError(Outcome.TOO_LATE, f"{self.subject} had no time left when the image was read", 1.0)
