"""One vision service as the gateway sees it: read images, send each to a replica, survive failures, read the answer.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pliant.config.vision import VisionConfig
from pliant.deployments.http.image_answers import Image, VisionPrediction
from pliant.deployments.http.images import ImageError, ImageReader, Pixels
from pliant.deployments.http.parameters import VisionParameters
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.least_held import Share
from pliant.deployments.serving.outcome import Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.scores import apply, likeliest
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import current
from pliant.deployments.vision.errand import ImageErrand
from pliant.deployments.vision.messages import Answer, Fate, Query, RegisteredTask
from pliant.deployments.vision.report import ReplicaReport
from pliant.deployments.vision.task_follower import TaskFollower
from pliant.models.vision_info import VisionInfo

_MOST_READING = 1024
_MOST_LABELS = 65_536
"""In the answers to a request: more would hold up others while they are written."""


class VisionRecorder(Recorder, Protocol):
    """Where a service records what happened to an image."""

    def arrived(self) -> None: ...

    def answered(self, seconds: float, in_time: bool) -> None: ...


class VisionClassifier:
    """Answers images. Each is sent by itself, to the replica that has the least to do."""

    def __init__(
        self,
        name: str,
        config: VisionConfig,
        info: VisionInfo,
        max_megapixels: float,
        tasks: TaskFollower,
        table: ReplicaTable[Share, ReplicaReport],
        caller: Caller[Share, Query, Answer],
        recorder: VisionRecorder,
    ) -> None:
        self.name = name
        self.reader = ImageReader(info, max_megapixels)
        self._config = config
        self._tasks = tasks
        self._table = table
        self._caller = caller
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
        return await each([self._classify(image, task, parameters, started) for image in images])

    async def _classify(
        self, image: Image, task: RegisteredTask, parameters: VisionParameters, started: float
    ) -> VisionPrediction:
        account = current()
        slo_s = account.slo_ms(parameters.slo_ms or self._config.slo_ms or task.slo_ms) / 1e3
        utility = account.utility(parameters.utility or self._config.utility or task.utility)
        deadline = started + slo_s
        with counted(self._recorder):
            pixels = await self._read(image, deadline)
            self._recorder.arrived()
            timeout_s = max(self._config.timeout_s, slo_s)
            errand = ImageErrand(self.name, pixels.tobytes(), task, self._tasks, deadline, slo_s, utility, timeout_s)
            answer, _ = await self._caller.answer(errand)
        seconds = time.monotonic() - started
        in_time = answer.fate == "in_time" and seconds <= slo_s
        self._recorder.answered(seconds, in_time)
        return _prediction(answer, errand.task, parameters, "in_time" if in_time else "late")

    async def _read(self, image: Image, deadline: float) -> Pixels:
        if isinstance(image, np.ndarray) and self.reader.fits(image):
            return image
        if self._reading >= _MOST_READING:
            raise RequestError(Outcome.SHED, f"{self._reading} images are being read; send fewer at once", 1)
        self._reading += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._read_in_thread(image)
        except ImageError as error:
            raise RequestError(Outcome.REJECTED, str(error), fault=error.fault) from None
        except TimeoutError:
            reason = f"{self.name} could not read the image in time: {self._reading} are being read, or it is too large"
            raise RequestError(Outcome.TOO_LATE, reason, 1) from None
        finally:
            self._reading -= 1

    async def _read_in_thread(self, image: Image) -> Pixels:
        loop = asyncio.get_running_loop()
        if not isinstance(image, bytes):
            return await loop.run_in_executor(self._quick, self.reader.fit, image)
        if (quick := await loop.run_in_executor(self._quick, self.reader.decode_quick, image)) is not None:
            return quick
        return await loop.run_in_executor(self._slow, self.reader.decode, image)


def _check_labels(images: int, task: RegisteredTask, parameters: VisionParameters) -> None:
    labels = min(parameters.top_k or len(task.labels), len(task.labels))
    if images * labels > _MOST_LABELS:
        least = f"{images} images with {labels} labels each are more than the {_MOST_LABELS} of an answer"
        reason = f"parameters.top_k: {least}; send at most {_MOST_LABELS // images}, or fewer images"
        raise RequestError(Outcome.REJECTED, reason)


def _prediction(answer: Answer, task: RegisteredTask, parameters: VisionParameters, fate: Fate) -> VisionPrediction:
    scores = apply(parameters.function_to_apply, np.frombuffer(answer.logits, dtype="<f4"))
    order = likeliest(scores, parameters.top_k)
    return VisionPrediction([task.labels[index] for index in order], scores[order].tolist(), answer.gamma, fate)
