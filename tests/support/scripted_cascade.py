"""Levels of a cascade without models: what they say of a text follows from the text alone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from support.call_path import Recorder
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.deployments.cascade.readings import Seen, UnreadableError
from pliant.deployments.encoder.messages import ImportanceRequest
from pliant.deployments.encoder.reading import Reading
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tokenizing import encoded
from pliant.kernels.encoder.texts import Stop
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.encoder.confidence import confidence, softmax
from pliant.texts import Text, parts
from pliant.training.labelled_texts import LabelledText

LABELS = ("no", "perhaps", "yes")
TOO_LONG = 40
"""Words that no level takes."""

TOKENIZER = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
TOKENIZER.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]


def texts(count: int) -> list[LabelledText]:
    """Each names its label, somewhere among words that say nothing."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        label = LABELS[rng.integers(len(LABELS))]
        words = [f"w{word}" for word in rng.integers(10, size=rng.integers(1, 9))]
        words.insert(int(rng.integers(len(words) + 1)), label)
        made.append(LabelledText(f"{' '.join(words)} t{number}", label))
    return made


class Model:
    """Right on `accuracy` of the texts, and sure of it where it is; words that begin with w are of no importance.

    It takes `seconds` for each word, of which only the profile hears.
    """

    def __init__(
        self, name: str, accuracy: float, seconds: float, labels: Sequence[str] = LABELS, attentive: bool = True
    ) -> None:
        self.name = name
        self.labels = list(labels)
        self.accuracy = accuracy
        self.seconds = seconds
        self.attentive = attentive
        self.exits: dict[int, Model] = {}
        """What those behind so many layers say, of which each takes its seconds from the first layer on."""
        self.read_texts: list[Text] = []

    def logits(self, text: Text) -> np.ndarray:
        words = words_of(text)
        label = next(word for word in words if word in LABELS)
        number = hashlib.blake2b(words[-1].encode(), digest_size=4, salt=self.name[:16].encode()).digest()
        chance = int.from_bytes(number) / 2**32
        right = chance < self.accuracy
        sure = 2.0 + 6.0 * abs(chance - self.accuracy)
        said = label if right else LABELS[(LABELS.index(label) + 1) % len(LABELS)]
        return np.array([sure if known == said else 0.0 for known in self.labels], np.float32)

    def importance(self, text: Text) -> np.ndarray:
        return np.array([0.1 if word.startswith("w") else 1.0 for word in words_of(text)], np.float32)


def words_of(text: Text) -> list[str]:
    return " ".join(parts(text)).split()


class Levels:
    """A profile's reader over models."""

    def __init__(self, *levels: Model) -> None:
        self.models = {level.name: level for level in levels}
        self.pause: asyncio.Event | None = None

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        if self.pause:
            await self.pause.wait()
        model, words = self.models[service], len(words_of(text))
        if words > TOO_LONG:
            raise UnreadableError
        model.read_texts.append(text)
        told = model.importance(text) if importance and model.attentive else None
        seconds, asked = model.seconds * words, [model.exits[layers] for layers in exits]
        earlier, earlier_s = [one.logits(text) for one in asked], [one.seconds * words for one in asked]
        return Seen(model.logits(text), told, encoded(TOKENIZER, text), seconds, 0.0, seconds, earlier, earlier_s)


class Service:
    """A classifier that does as its model says, or as `fails` does."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = model.name
        self.labels = model.labels
        self.ready = True
        self.down = False
        self.interrupted = False
        self.waited_s = 0.0
        self.fails: Exception | None = None
        self.hangs = False
        self.calls: list[tuple[Text, float | None, float, bool]] = []
        self.stops: list[tuple[Stop, ...]] = []
        self.cancelled = self.late = 0
        self.most_characters = 5000

    async def tokens(self, text: Text) -> int:
        return len(words_of(text))

    async def read(
        self,
        text: Text,
        slo_s: float | None,
        slack_share: float = 1.0,
        importance_request: ImportanceRequest | None = None,
        within_s: float | None = None,
        stops: Sequence[Stop] = (),
    ) -> Reading:
        self.stops.append(tuple(stops))
        self.calls.append((text, slo_s, slack_share, importance_request is not None))
        await asyncio.sleep(0)
        if self.hangs:
            try:
                async with asyncio.timeout(within_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                self.late += 1
                raise RequestError(Outcome.UNAVAILABLE, "no replica answered", fault=Fault.TIMED_OUT) from None
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.fails:
            raise self.fails
        if len(words_of(text)) > TOO_LONG:
            raise RequestError(Outcome.REJECTED, "too long", fault=Fault.TOO_LONG)
        earlier: list[np.ndarray] = []
        logits = self.model.logits(text)
        for stop in stops:
            logits = self.model.exits[stop.after].logits(text)
            if confidence(softmax(logits, stop.temperature)) >= stop.sure_from:
                break
            earlier.append(logits)
            logits = self.model.logits(text)
        told = (
            self.model.importance(text)
            if importance_request and self.model.attentive and importance_request.wants(logits)
            else None
        )
        seconds = self.model.seconds * len(words_of(text))
        encoding = encoded(TOKENIZER, text)
        return Reading(
            logits,
            told,
            encoding,
            seconds,
            0.0,
            seconds,
            self.waited_s,
            None,
            self.interrupted,
            earlier=tuple(earlier),
            earlier_s=tuple(self.model.exits[stop.after].seconds for stop in stops[: len(earlier)]),
        )


class CascadeRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.drifts: list[tuple[str, bool]] = []
        self.begins: list[float] = []
        """How sure the first level was of each text."""
        self.levels: list[str] = []
        """That were asked, in order."""
        self.checks: list[bool] = []
        self.answers_drifts: list[bool] = []

    def asked(self, level: str) -> None:
        self.levels.append(level)

    def begun(self, sure: float) -> None:
        self.begins.append(sure)

    def answered(self, level: str, seconds: float, slo_s: float, confidence: float) -> None:
        assert 0 < confidence <= 1
        self.events.append(("answered", level, slo_s))

    def rerouted(self, level: str, words: int, pruned: int) -> None:
        self.events.append(("rerouted", level, words, pruned))

    def checked(self, differs: bool) -> None:
        self.checks.append(differs)

    def answers_drifted(self, drifting: bool) -> None:
        self.answers_drifts.append(drifting)

    def drifted(self, level: str, drifting: bool) -> None:
        self.drifts.append((level, drifting))

    def degraded(self, level: str, reason: str) -> None:
        self.events.append(("degraded", level, reason))

    def retried(self, why: str) -> None:
        raise AssertionError("levels retry")


def candidate(*levels: str, cutoff: float = 1.0, alpha: float = 0.0, **changes: Any) -> Candidate:
    """A chain of these levels that vote alike."""
    count = len(levels)
    options: dict[str, Any] = {
        "levels": levels,
        "cutoffs": (cutoff,) * (count - 1),
        "alphas": (alpha,) * (count - 1),
        "temperatures": (2.0,) * count,
        "weights": tuple(tuple(1 / (index + 1) for _ in range(index + 1)) for index in range(count)),
        "slope": 10.0,
        "accuracy": 0.9,
        "accuracy_error": 0.01,
        "loss": 0.0,
        "loss_error": 0.01,
        "mean_latency_s": 0.01,
        "p75_latency_s": 0.01,
        "p99_latency_s": 0.01,
        "shares": (*[0.0] * (count - 1), 1.0),
        "early_accuracy_gap": 0.0,
    }
    return Candidate(**{**options, **changes})
