"""What protocols ask of a service that takes texts, and what it answers, whatever kind it is of.

There are three sorts, by `task`: what labels texts, what labels their tokens, and what makes vectors of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.http.parameters import ClassifyParameters, EmbedParameters, TagParameters
from pliant.models.encoder_head import Task
from pliant.texts import Pair, Text

_MANY_NUMBERS = 16_384


class TokenIds(NamedTuple):
    """A text that its client has tokenized, special tokens included."""

    ids: Sequence[int]


Input = Text | TokenIds


class Priority(Protocol):
    """How soon an answer is wanted, and what it is worth: `TextParameters`."""

    @property
    def slo_ms(self) -> float | None: ...

    @property
    def utility(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Details:
    """How a cascade came to an answer."""

    level: str
    """The last one that read the text."""
    confidence: float
    """Calibrated, from 0 to 1, that the first label is right."""
    words_pruned: int
    """Left out of the text before that level read it."""
    degraded: bool
    """A later level was to read the text, and could not."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The scored labels of one text, likeliest first."""

    labels: list[str]
    scores: list[float]
    warning: str | None
    details: Details | None = None
    """Of a cascade."""
    tokens: int = 0
    """Of the text, as its model reads it."""


@dataclass(frozen=True, slots=True)
class Relevance:
    """How well the second text of a pair suits the first."""

    score: float
    tokens: int
    """Read for it, and not yet for another of the same request."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text."""

    vector: NDArray[np.float32]
    tokens: int
    """Of the text, its prompt included."""
    warning: str | None
    revision: str = ""
    """Of the model; "" if that is not known."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Some characters of a text, and what they are."""

    label: str
    """Without `B-` and `I-` if tokens are put together."""
    score: float
    word: str
    start: int
    end: int
    """In characters of the text."""
    index: int | None
    """Of the token; None if tokens are put together."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """The entities of one text, in its order."""

    entities: list[Entity]
    tokens: int
    warning: str | None


class Scorer(Protocol):
    """What says of two texts how well they suit each other: a model of one label, or one that makes vectors."""

    name: str

    async def relevance(self, pairs: Sequence[Pair], priority: Priority) -> list[Relevance]: ...


class TextClassifier(Protocol):
    """What labels texts; of a service that says no `task` this is its task. A cascade has `levels`, too, and
    says whether it `reads_pairs`."""

    name: str
    labels: Sequence[str]

    async def classify(self, texts: Sequence[Input], parameters: ClassifyParameters) -> list[Prediction]: ...


class TextEmbedder(Scorer, Protocol):
    """What makes vectors of texts."""

    @property
    def dimensions(self) -> int: ...

    @property
    def root(self) -> str:
        """Where its weights are from."""

    @property
    def max_length(self) -> int:
        """Tokens of a text."""

    async def embed(self, texts: Sequence[Input], parameters: EmbedParameters) -> list[Embedding]: ...

    def similarity(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
        """How much alike two vectors are, as the model was trained."""


class TextTagger(Protocol):
    """What labels the tokens of texts."""

    name: str
    labels: Sequence[str]

    async def tag(self, texts: Sequence[str], parameters: TagParameters) -> list[Tagged]: ...


def task_of(endpoint: Any) -> Task:
    """Which of these a service is."""
    found: Task = getattr(endpoint, "task", "classify")
    return found


def many_numbers(embeddings: Sequence[Embedding]) -> bool:
    """Whether it takes so long to write them that a thread should."""
    return sum(len(embedding.vector) for embedding in embeddings) > _MANY_NUMBERS


def warning_of(answers: Sequence[Prediction | Embedding | Tagged]) -> str:
    """All warnings, each with the index of its text."""
    return "; ".join(f"text {index}: {answer.warning}" for index, answer in enumerate(answers) if answer.warning)


def levels_of(endpoint: Any) -> Sequence[str]:
    """Of a cascade; none of another service."""
    found: Sequence[str] = getattr(endpoint, "levels", ())
    return found
