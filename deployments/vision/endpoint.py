"""One vision service as the gateway sees it: read images, send each to a replica, survive failures, read the answer.

Plain asyncio, without Ray: `call` sends a Ticket to a replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.config.cluster import VisionConfig
from pliant.deployments.http.images import ImageReader, Pixels
from pliant.deployments.http.parameters import VisionParameters
from pliant.deployments.serving.catalog.task_follower import TaskFollower
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.messages import RegisteredTask
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.scores import apply, likeliest
from pliant.deployments.vision.messages import Answer, Fate, Query, Refusal, RefusalKind, Ticket
from pliant.deployments.vision.routing_table import VisionRoutingTable
from pliant.models.vision_info import VisionInfo
from pliant.policies.cluster.live_tokens import NoReplicaError

_RETRY_S = 0.05
_MOST_LOST = 3
"""Replicas that may die or break down under one image before it is suspected of doing that."""
_MOST_READING = 1024
_WAY_BACK_S = 0.002
"""From a replica's answer to the client: replicas have so much less time than there is."""
MANY_LABELS = 4_096
"""In the answers to a request: as many take milliseconds to write, and are written in a thread."""
_MOST_LABELS = 65_536
"""In the answers to a request: more would hold up others while they are written."""
_ENDS: dict[RefusalKind, tuple[Outcome, Fault | None]] = {
    "shed": (Outcome.SHED, None),
    "evicted": (Outcome.SHED, Fault.EVICTED),
    "expired": (Outcome.TOO_LATE, None),
    "task": (Outcome.UNAVAILABLE, None),
    "failed": (Outcome.FAILED, None),
}

Image = bytes | NDArray[Any]
"""An encoded image, or pixels [height, width, channels]."""


class VisionRecorder(Recorder, Protocol):
    """Where a service records what happened to an image."""

    def answered(self, task: str, seconds: float, in_time: bool, gamma: int) -> None: ...


@dataclass(frozen=True, slots=True)
class VisionPrediction:
    """The scored labels of one image, likeliest first, and how they came about."""

    labels: list[str]
    scores: list[float]
    gamma: int
    """Tokens added to each layer, or merged if negative."""
    fate: Fate


class VisionClassifier:
    """Answers images. Each is sent by itself, to the replica that has the least to do."""

    def __init__(
        self,
        name: str,
        config: VisionConfig,
        info: VisionInfo,
        max_megapixels: float,
        tasks: TaskFollower,
        table: VisionRoutingTable,
        call: Callable[[Ticket], Awaitable[Answer | Refusal]],
        recorder: VisionRecorder,
    ) -> None:
        self.name = name
        self.reader = ImageReader(info, max_megapixels)
        self._config = config
        self._tasks = tasks
        self._table = table
        self._call = call
        self._recorder = recorder
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="images")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="large-images")
        """One large image may be in memory at a time, and small ones need not wait for it."""
        self._reading = 0

    @property
    def ready(self) -> bool:
        return self._table.ready and self._tasks.informed

    def tasks(self) -> list[RegisteredTask]:
        """Those that may be named."""
        return self._tasks.of(self.name)

    async def classify(self, images: Sequence[Image], parameters: VisionParameters) -> list[VisionPrediction]:
        """Answer all `images`, or raise the RequestError of the first that fails."""
        started = time.monotonic()
        task = await self._tasks.find(self.name, parameters.task)
        _check_labels(len(images), task, parameters)
        if len(images) == 1:
            return [await self._classify(images[0], task, parameters, started)]
        calls = [asyncio.create_task(self._classify(image, task, parameters, started)) for image in images]
        try:
            return await asyncio.gather(*calls)
        finally:
            for each in calls:
                each.cancel()

    async def _classify(
        self, image: Image, task: RegisteredTask, parameters: VisionParameters, started: float
    ) -> VisionPrediction:
        slo_s = (parameters.slo_ms or self._config.slo_ms or task.slo_ms) / 1e3
        timeout_s = max(self._config.timeout_s, slo_s)
        utility = parameters.utility or self._config.utility or task.utility
        with counted(self._recorder):
            try:
                async with asyncio.timeout(timeout_s):
                    pixels = await self._read(image, started + slo_s)
                    answer, task = await self._dispatch(pixels.tobytes(), task, started + slo_s, utility)
            except TimeoutError:
                reason = f"no replica of {self.name} answered within {timeout_s:g} s"
                raise RequestError(Outcome.UNAVAILABLE, reason, 1, Fault.TIMED_OUT) from None
        seconds = time.monotonic() - started
        in_time = answer.fate == "in_time" and seconds <= slo_s
        self._recorder.answered(task.task.name, seconds, in_time, answer.gamma)
        return _prediction(answer, task, parameters, "in_time" if in_time else "late")

    async def _read(self, image: Image, deadline: float) -> Pixels:
        if isinstance(image, np.ndarray) and self.reader.fits(image):
            return image
        if self._reading >= _MOST_READING:
            raise RequestError(Outcome.SHED, f"{self._reading} images are being read; send fewer at once", 1)
        self._reading += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._read_in_thread(image)
        except TimeoutError:
            reason = f"{self.name} could not read the image in time: {self._reading} are being read, or it is too large"
            raise RequestError(Outcome.TOO_LATE, reason) from None
        finally:
            self._reading -= 1

    async def _read_in_thread(self, image: Image) -> Pixels:
        loop = asyncio.get_running_loop()
        if not isinstance(image, bytes):
            return await loop.run_in_executor(self._quick, self.reader.fit, image)
        if (quick := await loop.run_in_executor(self._quick, self.reader.decode_quick, image)) is not None:
            return quick
        return await loop.run_in_executor(self._slow, self.reader.decode, image)

    async def _dispatch(
        self, pixels: bytes, task: RegisteredTask, deadline: float, utility: float
    ) -> tuple[Answer, RegisteredTask]:
        """Send until answered, as long as there is time for an answer; which task it is of, if that was replaced."""
        avoid: set[str] = set()
        failures = 0
        unable: RequestError | None = None
        trouble = RequestError(Outcome.TOO_LATE, f"{self.name} had no time left when the image was read")
        while (budget_s := deadline - time.monotonic() - _WAY_BACK_S) > 0:
            try:
                replica = self._table.choose(avoid)
            except NoReplicaError:
                if unable:
                    raise unable from None
                if not failures:
                    trouble = RequestError(
                        Outcome.UNAVAILABLE, f"no replica of {self.name} could be reached in time", 1
                    )
                avoid.clear()
                await asyncio.sleep(min(_RETRY_S, budget_s))
                continue
            avoid.add(replica)
            reply = await self._reply(replica, Query(pixels, task.task, budget_s, utility))
            if isinstance(reply, Answer):
                return reply, task
            if reply is None:
                continue
            outcome, fault = _ENDS[reply.kind]
            refused = RequestError(outcome, f"{self.name}: {reply.reason}", reply.retry_after_s or None, fault)
            failures += 1
            if reply.kind not in ("failed", "task") or failures == _MOST_LOST:
                raise refused
            self._recorder.retried("moved" if reply.kind == "task" else "lost")
            trouble = RequestError(
                Outcome.UNAVAILABLE, f"{refused.reason}, and there was no time left to try another replica", 1
            )
            if reply.kind == "task":
                newer = await self._renewed(task, budget_s)
                unable = refused if newer.task == task.task else None
                avoid = avoid if unable else set()
                task = newer
        raise trouble

    async def _reply(self, replica: str, query: Query) -> Answer | Refusal | None:
        """None from a replica that was not reached."""
        try:
            return await self._call(Ticket(replica, self._table.gateway, query))
        except (ReplicaLeftError, NotDeployedError):
            self._recorder.retried("moved")
            return None
        except ReplicaLostError:
            return Refusal("failed", "the replica died")
        finally:
            self._table.done(replica)

    async def _renewed(self, task: RegisteredTask, within_s: float) -> RegisteredTask:
        """`task` as it is registered now: when it is replaced, replicas may know that first."""
        try:
            async with asyncio.timeout(within_s):
                return await self._tasks.renewed(task)
        except TimeoutError:
            return task


def _check_labels(images: int, task: RegisteredTask, parameters: VisionParameters) -> None:
    labels = min(parameters.top_k or len(task.labels), len(task.labels))
    if images * labels > _MOST_LABELS:
        least = f"{images} images with {labels} labels each are more than the {_MOST_LABELS} of an answer"
        raise RequestError(
            Outcome.REJECTED, f"parameters.top_k: {least}; send at most {_MOST_LABELS // images}, or fewer images"
        )


def _prediction(answer: Answer, task: RegisteredTask, parameters: VisionParameters, fate: Fate) -> VisionPrediction:
    scores = apply(parameters.function_to_apply, np.frombuffer(answer.logits, dtype="<f4"))
    order = likeliest(scores, parameters.top_k)
    return VisionPrediction([task.labels[index] for index in order], scores[order].tolist(), answer.gamma, fate)
