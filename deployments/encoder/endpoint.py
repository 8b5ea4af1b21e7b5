"""One classifier service as the gateway sees it: tokenize, dispatch, survive failures, read the answer.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.errand import TextErrand, TextWant
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query, Report
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.scores import apply, likeliest
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import current
from pliant.deployments.serving.tokenizing import CHARACTERS_PER_TOKEN, tokenize
from pliant.models.sources import ModelInfo


class TextRecorder(Recorder, Protocol):
    """Where a service records what happened to a text."""

    def arrived(self, tokens: int) -> None: ...

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None: ...

    def shed(self) -> None:
        """A text that may spend all its slack waiting was refused, and could have been answered with more replicas."""


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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a replica said of one text."""

    logits: NDArray[np.float32]
    """[labels]"""
    importance: NDArray[np.float32] | None
    """[tokens]: the attention that each of `encoding` received; None unless it was wanted, and the runtime tells."""
    encoding: Encoding
    seconds: float
    """Since `read` was called."""
    importance_s: float
    """Of these, what importance took beyond the logits."""
    compute_s: float
    """Of these, what the logits took."""
    waited_s: float
    """Of these, those until there was a replica, if there was none: they do not count towards the SLO."""
    warning: str | None
    interrupted: bool
    """A replica failed us, so that the SLO no longer counts: late is better than lost."""


class Classifier:
    """Answers texts. Each is dispatched by itself, to the shortest runtime that fits and has time for it."""

    def __init__(
        self,
        name: str,
        config: EncoderConfig,
        folder: Path,
        info: ModelInfo,
        chooser: EncoderChooser,
        table: ReplicaTable[TextWant, Report],
        caller: Caller[TextWant, Query, Answer],
        recorder: TextRecorder,
    ) -> None:
        self.name = name
        self.labels = list(info.labels)
        self._config = config
        self._chooser = chooser
        self._table = table
        self._caller = caller
        self._recorder = recorder
        self._default_function = "softmax" if info.chooses else "sigmoid"
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._cutter = Tokenizer.from_str(self._tokenizer.to_str())
        self._longest = config.longest(info.max_length)
        self._cutter.enable_truncation(self._longest)

    @property
    def ready(self) -> bool:
        return self._table.ready and self._chooser.serves(self._longest)

    @property
    def most_characters(self) -> int:
        """Of a text; what comes after them is never read."""
        return self._longest * CHARACTERS_PER_TOKEN

    @property
    def down(self) -> bool:
        """No replica holds any runtime now."""
        return not self._chooser.serves(1)

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        if parameters.details:
            reason = f"parameters.details: {self.name} is no cascade, and has none"
            raise RequestError(Outcome.REJECTED, reason)
        return await each([self._classify(text, parameters) for text in texts])

    async def read(
        self,
        text: str,
        slo_s: float | None,
        slack_share: float = 1.0,
        importance_request: ImportanceRequest | None = None,
        within_s: float | None = None,
    ) -> Reading:
        """What a replica says of `text` within `slo_s` seconds; None: however late.

        `importance_request` asks for the importance of its tokens, too. A caller that can do without an answer waits
        for it no longer than `within_s`, and not at all for replicas that are not there. Raises RequestError; its fault
        is TIMED_OUT when the time was too short, and DOWN when no replica is there.
        """
        started = time.monotonic()
        timeout_s = max(self._config.timeout_s, slo_s or 0.0) if within_s is None else within_s
        with counted(self._recorder):
            encoding, warning = await self._tokenize(text)
            ids = np.array(encoding.ids, dtype="<i4")
            self._recorder.arrived(len(ids))
            current().spend(len(ids))
            errand = TextErrand(
                self.name,
                ids.tobytes(),
                len(ids),
                started,
                slo_s,
                slack_share,
                importance_request,
                timeout_s,
                within_s is None,
            )
            try:
                answer, interrupted = await self._caller.answer(errand)
            except RequestError as error:
                if error.outcome is Outcome.SHED and slack_share == 1:
                    self._recorder.shed()
                raise
        seconds = time.monotonic() - started
        self._recorder.answered(seconds, self._config.slo_ms / 1e3 if slo_s is None else slo_s, len(ids), answer)
        received = np.frombuffer(answer.importance, dtype="<f4") if answer.importance else None
        logits = np.frombuffer(answer.logits, dtype="<f4")
        return Reading(
            logits,
            received,
            encoding,
            seconds,
            answer.importance_s,
            answer.compute_s,
            errand.waited_s,
            warning,
            interrupted,
        )

    async def _classify(self, text: str, parameters: ClassifyParameters) -> Prediction:
        account = current()
        slo_ms = account.slo_ms(parameters.slo_ms or self._config.slo_ms)
        reading = await self.read(text, slo_ms / 1e3, account.utility(parameters.utility))
        scores = apply(parameters.function_to_apply or self._default_function, reading.logits)
        order = likeliest(scores, parameters.top_k)
        return Prediction([self.labels[index] for index in order], scores[order].tolist(), reading.warning)

    async def _tokenize(self, text: str) -> tuple[Encoding, str | None]:
        longest = self._longest
        if len(text) > self.most_characters and not self._config.truncate:
            raise _too_long(f"text of {len(text)} characters; {self.name} takes at most {longest} tokens")
        encoding, read = await tokenize(self._tokenizer, text[: self.most_characters], longest, offsets=True)
        if not len(encoding):
            raise RequestError(Outcome.REJECTED, "a text has no tokens; send at least one word")
        if len(encoding) <= longest and read == len(text):
            return encoding, None
        count = f"{len(encoding)}" if read == len(text) else f"more than {len(encoding)}"
        if not self._config.truncate:
            raise _too_long(f"text of {count} tokens; {self.name} takes at most {longest}")
        cut, _ = await tokenize(self._cutter, text[:read], longest, offsets=True)
        return cut, f"text cut to the first {len(cut)} of {count} tokens"


def _too_long(reason: str) -> RequestError:
    return RequestError(Outcome.REJECTED, reason, fault=Fault.TOO_LONG)
