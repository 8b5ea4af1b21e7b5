"""Replicas of three kinds on places that only let time pass: a text classifier's, a vision transformer's, and a
language model's. All else of them, and all around them, is what `pliant serve` runs.

So a place can do what it says here, however few cores a machine has, and `pliant simulate` is told the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.serve import Application
from tokenizers import Tokenizer

from pliant.bench.pretended import PretendedExecutor
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import LlmConfig
from pliant.config.vision import VisionConfig
from pliant.deployments import app
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Runtimes
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.replica import LlmReplica
from pliant.deployments.vision.assembly import MOST_ROWS, Assembled, Loaded
from pliant.deployments.vision.replica import VisionReplica
from pliant.models.vision_info import VisionInfo, read_vision
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.request_scheduler import Scheduler

TEXT_S = 0.1
LENGTH = 64
"""Tokens of the longest text."""
ACCURACY = {-8: 0.75, -4: 0.92, 0: 1.0}
"""By gamma, as a share of the best."""
_BATCH_S, _IMAGE_S = 0.03, {-8: 0.055, -4: 0.075, 0: 0.1}
STEP_S, ROW_S, PROMPT_S = 0.12, 0.005, 0.002
"""What a step takes, and a row and a token of a prompt more."""
SLOTS, MAX_LENGTH = 4, 128

IMPORT_PATH = f"{__name__}:build"


def image_s(gamma: int, rows: int) -> float:
    """Of a batch."""
    return _BATCH_S + _IMAGE_S[gamma] * rows


class _Text:
    max_length = LENGTH
    dynamic = True
    backend = "asleep"

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        time.sleep(TEXT_S)
        return np.zeros(2, np.float32)


class _Texts:
    lengths = (LENGTH,)
    profile = None
    device = "none"
    resident = True
    memory = None
    reason = "it only sleeps"

    def load(self, max_length: int) -> Runtime:
        return _Text()


class _Images:
    """An `Upgradable`."""

    backend = "asleep"

    def __init__(self, info: VisionInfo) -> None:
        self.info = info
        self.most_rows = MOST_ROWS

    def stage(self, folder: Path) -> Any:
        raise NotImplementedError("its model's own head is its only task")

    def own_task(self) -> Any:
        return self

    def add_task(self, key: str, weights: Any) -> None: ...

    def remove_task(self, key: str) -> None: ...

    def take_over(self, other: Any) -> None: ...

    def room(self, rows: int) -> NDArray[np.uint8]:
        return np.empty((rows, self.info.height, self.info.width, self.info.channels), np.uint8)

    def run(self, images: NDArray[np.uint8], tasks: Sequence[str], gamma: int) -> list[NDArray[np.float32]]:
        time.sleep(image_s(gamma, len(images)))
        return [np.zeros(len(self.info.labels), np.float32)] * len(images)


class TextReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Runtimes:
        return _Texts()


class ImageReplica(VisionReplica):
    async def assembled(self, config: VisionConfig) -> Assembled:
        executor = _Images(read_vision(Path(config.model)))
        rows = tuple(range(1, MOST_ROWS + 1))
        loaded = Loaded(executor, tuple(ACCURACY), image_s, rows, lambda gamma, rows: 1, "asleep", ACCURACY)
        return Assembled(self._service, config, loaded, ThreadPoolExecutor(1))


class ChatReplica(LlmReplica):
    def engine(self, config: LlmConfig) -> Engine:
        executor = PretendedExecutor(SLOTS, MAX_LENGTH, time.sleep, STEP_S, ROW_S, PROMPT_S)
        engine = Engine(
            executor,
            Tokenizer.from_file(str(Path(config.model) / "tokenizer.json")),
            (),
            config.queue,
            config.stall_ms / 1e3,
            scheduler=Scheduler(
                MultiQueue(QueueClasses(config.slo_ms / 1e3)), AdapterCache(), executor.arena_bytes, slots=SLOTS
            ),
        )
        engine.rehearse()
        return engine


_REPLICAS: dict[str, type] = {"encoder": TextReplica, "vision": ImageReplica, "llm": ChatReplica}


def build(args: dict[str, Any]) -> Application:
    """As `pliant.deployments.app:build`, with replicas of these."""
    config = app.checked(args)
    made = {name: kind for name, each in config.services.items() if (kind := _REPLICAS.get(each.kind))}
    return app.assemble(config, made)
