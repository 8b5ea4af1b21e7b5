"""One classifier service as the gateway sees it: tokenize, dispatch, survive failures, read the answer.

Plain asyncio, without Ray: `call` sends a Query to a replica.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from pliant.config.cluster import EncoderConfig
from pliant.deployments.encoder.engine import Answer, Query, Refusal, Telling
from pliant.deployments.encoder.routing_table import RoutingTable
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLostError
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.scores import apply, likeliest
from pliant.models.sources import ModelInfo
from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import NoRuntimeError

_LONG_TEXT = 4_000
"""Characters from which on a text is tokenized in a thread, so that the event loop stays responsive."""
_CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this per token of the longest runtime is too long without looking closer."""
_RETRY_S = 0.05
_MOST_LOST = 3
"""Replicas that may die under one request before it is suspected of killing them."""
_MOST_REFUSED = 3

Answered = TypeVar("Answered")


class EncoderRecorder(Recorder, Protocol):
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
    telling_s: float
    """Of these, what importance took beyond the logits."""
    compute_s: float
    """Of these, what the logits took."""
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
        table: RoutingTable,
        call: Callable[[Query], Awaitable[Answer | Refusal]],
        recorder: EncoderRecorder,
    ) -> None:
        self.name = name
        self.labels = list(info.labels)
        self._config = config
        self._table = table
        self._call = call
        self._recorder = recorder
        self._default_function = "sigmoid" if info.multi_label else "softmax"
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._cutter = Tokenizer.from_str(self._tokenizer.to_str())
        self._longest = config.longest(info.max_length)
        self._cutter.enable_truncation(self._longest)

    @property
    def ready(self) -> bool:
        return self._table.serves(self._longest)

    @property
    def most_characters(self) -> int:
        """Of a text; what comes after them is never read."""
        return self._longest * _CHARACTERS_PER_TOKEN

    @property
    def down(self) -> bool:
        """No replica holds any runtime now."""
        return not self._table.serves(1)

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        if parameters.details:
            raise RequestError(Outcome.REJECTED, f"parameters.details: {self.name} is no cascade, and has none to tell")
        return await each([self._classify(text, parameters) for text in texts])

    async def read(
        self,
        text: str,
        slo_s: float | None,
        utility: float = 1.0,
        telling: Telling | None = None,
        within_s: float | None = None,
    ) -> Reading:
        """What a replica says of `text` within `slo_s` seconds; None: however late.

        With `telling` also of its tokens, for the answers that this wants it of. A caller that can do without an answer
        waits for it no longer than `within_s`, and not at all for replicas that are not there. Raises RequestError.
        """
        started = time.monotonic()
        timeout_s = max(self._config.timeout_s, slo_s or 0.0) if within_s is None else within_s
        waits = within_s is None
        with counted(self._recorder):
            try:
                async with asyncio.timeout(timeout_s):
                    encoding, warning = await self._tokenize(text)
                    ids = np.array(encoding.ids, dtype="<i4")
                    self._recorder.arrived(len(ids))
                    answer, interrupted = await self._dispatch(ids, started, slo_s, utility, telling, waits)
            except TimeoutError:
                reason = f"no replica of {self.name} answered within {round(timeout_s, 3):g} s"
                raise RequestError(Outcome.UNAVAILABLE, reason, 1, Fault.TIMED_OUT) from None
        seconds = time.monotonic() - started
        self._recorder.answered(seconds, self._config.slo_ms / 1e3 if slo_s is None else slo_s, len(ids), answer)
        received = np.frombuffer(answer.importance, dtype="<f4") if answer.importance else None
        logits = np.frombuffer(answer.logits, dtype="<f4")
        return Reading(logits, received, encoding, seconds, answer.telling_s, answer.compute_s, warning, interrupted)

    async def _classify(self, text: str, parameters: ClassifyParameters) -> Prediction:
        reading = await self.read(text, (parameters.slo_ms or self._config.slo_ms) / 1e3, parameters.utility)
        scores = apply(parameters.function_to_apply or self._default_function, reading.logits)
        order = likeliest(scores, parameters.top_k)
        return Prediction([self.labels[index] for index in order], scores[order].tolist(), reading.warning)

    async def _tokenize(self, text: str) -> tuple[Encoding, str | None]:
        longest = self._longest
        most = longest * _CHARACTERS_PER_TOKEN
        if len(text) > most and not self._config.truncate:
            reason = f"text of {len(text)} characters; {self.name} takes at most {longest} tokens"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.TOO_LONG)
        if len(text) > _LONG_TEXT:
            encoding = await asyncio.to_thread(self._tokenizer.encode, text[:most])
        else:
            encoding = self._tokenizer.encode(text)
        if not len(encoding):
            raise RequestError(Outcome.REJECTED, "a text has no tokens; send at least one word")
        if len(encoding) <= longest and len(text) <= most:
            return encoding, None
        if not self._config.truncate:
            reason = f"text of {len(encoding)} tokens; {self.name} takes at most {longest}"
            raise RequestError(Outcome.REJECTED, reason, fault=Fault.TOO_LONG)
        cut = await asyncio.to_thread(self._cutter.encode, text[:most])
        given = f"{len(encoding)}" if len(text) <= most else f"more than {len(encoding)}"
        return cut, f"text cut to the first {len(cut)} of {given} tokens"

    async def _dispatch(
        self,
        ids: NDArray[np.int32],
        started: float,
        slo_s: float | None,
        utility: float,
        telling: Telling | None,
        waits: bool,
    ) -> tuple[Answer, bool]:
        """Send until answered; whether a replica failed us. Once one did the SLO no longer counts."""
        payload, length = ids.tobytes(), len(ids)
        lost = refused = 0
        interrupted = False
        while True:
            budget_s = None if interrupted or slo_s is None else started + slo_s - time.monotonic()
            try:
                reply = await self._call(Query(payload, length, budget_s, utility, telling))
            except DeadlineError as error:
                raise self._late(error.retry_after_s, error.service_s, slo_s, utility) from None
            except (NoRuntimeError, NotDeployedError):
                if not waits:
                    reason = f"no replica of {self.name} takes {length} tokens now"
                    raise RequestError(Outcome.UNAVAILABLE, reason, 1, Fault.DOWN) from None
                interrupted = True
                await asyncio.sleep(_RETRY_S)
                continue
            except ReplicaLostError:
                interrupted = True
                lost += 1
                if lost == _MOST_LOST:
                    raise RequestError(
                        Outcome.UNAVAILABLE, f"{lost} replicas of {self.name} died while they computed this text"
                    ) from None
                self._recorder.retried("lost")
                continue
            if isinstance(reply, Answer):
                return reply, interrupted
            self._table.observe(reply.replica, reply.report)
            self._recorder.retried("busy" if reply.reason == "busy" else "moved")
            if reply.reason == "busy":
                refused += 1
                if refused == _MOST_REFUSED:
                    raise self._late(reply.retry_after_s, reply.report["service_s"], slo_s, utility)

    def _late(self, retry_after_s: float, service_s: float, slo_s: float | None, utility: float) -> RequestError:
        """What is said of a request that cannot be answered in time: either never can, or the service is busy."""
        if slo_s is not None and service_s > slo_s:
            needed = f"this text takes about {service_s * 1e3:.1f} ms"
            reason = f"{self.name} cannot meet this slo_ms even when idle: {needed}; raise it"
            return RequestError(Outcome.TOO_LATE, reason, 1, Fault.SHORT_SLO)
        if utility == 1:
            self._recorder.shed()
        reason = f"{self.name} is too busy to meet the SLO: retry later, raise slo_ms, or send fewer texts at once"
        return RequestError(Outcome.SHED, reason, service_s if math.isinf(retry_after_s) else retry_after_s)


async def each(answers: Sequence[Coroutine[Any, Any, Answered]]) -> list[Answered]:
    """All `answers`, which come at the same time; when one fails or the client leaves, the others end."""
    if len(answers) == 1:
        return [await answers[0]]
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
