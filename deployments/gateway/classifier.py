"""One classifier service as the gateway sees it: tokenize, dispatch, survive failures, read the answer.

Plain asyncio, without Ray: `call` sends a Query to a replica.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from pliant.config import EncoderConfig
from pliant.deployments.encoder.engine import Answer, Query, Refusal
from pliant.deployments.encoder.routing_table import RoutingTable
from pliant.deployments.gateway.errors import NotDeployedError, ReplicaLostError, RequestError
from pliant.deployments.gateway.parameters import ClassifyParameters
from pliant.deployments.gateway.scores import apply, likeliest
from pliant.models import ModelInfo
from pliant.policies.admission import DeadlineError
from pliant.policies.dispatch import NoRuntimeError

_LONG_TEXT = 4_000
"""Characters from which on a text is tokenized in a thread, so that the event loop stays responsive."""
_CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this per token of the longest runtime is too long without looking closer."""
_RETRY_S = 0.05
_MOST_LOST = 3
"""Replicas that may die under one request before it is suspected of killing them."""
_MOST_REFUSED = 3


class Recorder(Protocol):
    """Where a service records what happened to a text."""

    def arrived(self, tokens: int) -> None: ...

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None: ...

    def shed(self) -> None:
        """A text that may spend all its slack waiting was refused, and could have been answered with more replicas."""

    def failed(self, status: int) -> None: ...

    def retried(self, reason: Literal["lost", "length", "busy", "none"]) -> None: ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """The scored labels of one text, likeliest first."""

    labels: list[str]
    scores: list[float]
    warning: str | None


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
        recorder: Recorder,
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

    async def classify(self, texts: Sequence[str], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        if len(texts) == 1:
            return [await self._classify(texts[0], parameters)]
        tasks = [asyncio.create_task(self._classify(text, parameters)) for text in texts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _classify(self, text: str, parameters: ClassifyParameters) -> Prediction:
        started = time.monotonic()
        slo_s = (parameters.slo_ms or self._config.slo_ms) / 1e3
        timeout_s = max(self._config.timeout_s, slo_s)
        try:
            encoding, warning = await self._tokenize(text)
            ids = np.array(encoding.ids, dtype="<i4")
            self._recorder.arrived(len(ids))
            async with asyncio.timeout(timeout_s):
                answer = await self._dispatch(ids, started, slo_s, parameters.utility)
        except TimeoutError:
            self._recorder.failed(503)
            raise RequestError(503, f"no replica of {self.name} answered within {timeout_s:g} s", 1) from None
        except RequestError as error:
            self._recorder.failed(error.status)
            raise
        seconds = time.monotonic() - started
        self._recorder.answered(seconds, slo_s, len(ids), answer)
        return self._read(answer, parameters, warning)

    async def _tokenize(self, text: str) -> tuple[Encoding, str | None]:
        longest = self._longest
        most = longest * _CHARACTERS_PER_TOKEN
        if len(text) > most and not self._config.truncate:
            raise RequestError(422, f"text of {len(text)} characters; {self.name} takes at most {longest} tokens")
        if len(text) > _LONG_TEXT:
            encoding = await asyncio.to_thread(self._tokenizer.encode, text[:most])
        else:
            encoding = self._tokenizer.encode(text)
        if not len(encoding):
            raise RequestError(400, "a text has no tokens; send at least one word")
        if len(encoding) <= longest and len(text) <= most:
            return encoding, None
        if not self._config.truncate:
            raise RequestError(422, f"text of {len(encoding)} tokens; {self.name} takes at most {longest}")
        cut = await asyncio.to_thread(self._cutter.encode, text[:most])
        given = f"{len(encoding)}" if len(text) <= most else f"more than {len(encoding)}"
        return cut, f"text cut to the first {len(cut)} of {given} tokens"

    async def _dispatch(self, ids: NDArray[np.int32], started: float, slo_s: float, utility: float) -> Answer:
        """Send until answered. Once a replica failed us the SLO no longer counts: late is better than lost."""
        payload, length = ids.tobytes(), len(ids)
        lost = refused = 0
        interrupted = False
        while True:
            budget_s = None if interrupted else started + slo_s - time.monotonic()
            try:
                reply = await self._call(Query(payload, length, budget_s, utility))
            except DeadlineError as error:
                raise self._late(error.retry_after_s, error.service_s, slo_s, utility) from None
            except (NoRuntimeError, NotDeployedError):
                interrupted = True
                self._recorder.retried("none")
                await asyncio.sleep(_RETRY_S)
                continue
            except ReplicaLostError:
                interrupted = True
                lost += 1
                if lost == _MOST_LOST:
                    raise RequestError(
                        503, f"{lost} replicas of {self.name} died while they computed this text"
                    ) from None
                self._recorder.retried("lost")
                continue
            if isinstance(reply, Answer):
                return reply
            self._table.observe(reply.replica, reply.report)
            self._recorder.retried(reply.reason)
            if reply.reason == "busy":
                refused += 1
                if refused == _MOST_REFUSED:
                    raise self._late(reply.retry_after_s, reply.report["service_s"], slo_s, utility)

    def _late(self, retry_after_s: float, service_s: float, slo_s: float, utility: float) -> RequestError:
        """What is said of a request that cannot be answered in time: either never can, or the service is busy."""
        if service_s > slo_s:
            needed = f"this text takes about {service_s * 1e3:.1f} ms"
            return RequestError(429, f"{self.name} cannot meet this slo_ms even when idle: {needed}; raise it", 1)
        if utility == 1:
            self._recorder.shed()
        reason = f"{self.name} is too busy to meet the SLO: retry later, raise slo_ms, or send fewer texts at once"
        return RequestError(429, reason, service_s if math.isinf(retry_after_s) else retry_after_s)

    def _read(self, answer: Answer, parameters: ClassifyParameters, warning: str | None) -> Prediction:
        logits = np.frombuffer(answer.logits, dtype="<f4")
        scores = apply(parameters.function_to_apply or self._default_function, logits)
        order = likeliest(scores, parameters.top_k)
        return Prediction([self.labels[index] for index in order], scores[order].tolist(), warning)
