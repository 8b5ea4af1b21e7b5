"""What protocols ask of a service that takes images, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from pliant.deployments.http.images import ImageReader
from pliant.deployments.http.parameters import VisionParameters
from pliant.formats.vision_task import TaskRef

_MANY_LABELS = 4_096

Image = bytes | NDArray[Any]
"""An encoded image, or pixels [height, width, channels]."""


@dataclass(frozen=True, slots=True)
class VisionPrediction:
    """The scored labels of one image, likeliest first, and how they came about."""

    labels: list[str]
    scores: list[float]
    gamma: int
    """Tokens added to each layer, or merged if negative."""
    fate: str
    """Whether it was in time: "in_time" or "late"."""


class NamedTask(Protocol):
    """What images may be classified for."""

    @property
    def task(self) -> TaskRef: ...

    @property
    def labels(self) -> Sequence[str]: ...


class ImageClassifier(Protocol):
    """What labels images."""

    name: str
    reader: ImageReader

    def tasks(self) -> Sequence[NamedTask]:
        """Those that may be named."""

    async def classify(self, images: Sequence[Image], parameters: VisionParameters) -> list[VisionPrediction]: ...


def many_labels(predictions: Sequence[VisionPrediction]) -> bool:
    """Whether it takes so long to write them that a thread should."""
    return sum(len(prediction.labels) for prediction in predictions) > _MANY_LABELS
