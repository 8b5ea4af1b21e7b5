"""What a replica says of one text, as a gateway gets it: tokenize, dispatch, survive failures.

Plain asyncio, without Ray. What is made of it is said by the endpoints of single tasks (`endpoint`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.errand import TextErrand, TextWant
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query, Report
from pliant.deployments.http.texts import Input, Priority, TokenIds
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import current
from pliant.deployments.serving.tokenizing import CHARACTERS_PER_TOKEN, tokenize, tokenize_pair, types_of
from pliant.kernels.encoder.texts import Stop
from pliant.models.encoder_info import EncoderInfo
from pliant.models.encoder_tokenizer import encoder_tokenizer
from pliant.texts import Text, cut, parts


class TextRecorder(Recorder, Protocol):
    """Where a service records what happened to a text."""

    def arrived(self, tokens: int) -> None: ...

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None: ...

    def shed(self) -> None:
        """A text that may spend all its slack waiting was refused, and could have been answered with more replicas."""


class _Tokens(NamedTuple):
    ids: NDArray[np.int32]
    types: bytes
    encoding: Encoding | None
    warning: str | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a replica said of one text."""

    logits: NDArray[np.float32]
    """See `Answer.logits`."""
    importance: NDArray[np.float32] | None
    """[tokens]: the attention that each of `encoding` received; None unless it was wanted, and the runtime tells."""
    encoding: Encoding | None
    """None of a text that came as token ids."""
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
    tokens: int = 0
    """How many were read."""
    revision: str = ""
    """See `Answer.revision`."""
    earlier: tuple[NDArray[np.float32], ...] = ()
    """What the exits that it went past have said of it, each as `logits`."""
    earlier_s: tuple[float, ...] = ()
    """Of `compute_s`, the seconds up to each of these."""


class Reader:
    """Has texts read. Each is dispatched by itself, to the shortest runtime that fits and has time for it."""

    def __init__(
        self,
        name: str,
        config: EncoderConfig,
        folder: Path,
        info: EncoderInfo,
        chooser: EncoderChooser,
        table: ReplicaTable[TextWant, Report],
        caller: Caller[TextWant, Query, Answer],
        recorder: TextRecorder,
    ) -> None:
        self.name = name
        self.info = info
        self.labels = list(info.labels)
        self._config = config
        self._chooser = chooser
        self._table = table
        self._caller = caller
        self._recorder = recorder
        self._longest = config.longest(info.max_length)
        self._tokenizer = encoder_tokenizer(folder, info)
        self._cutter = encoder_tokenizer(folder, info, self._longest)

    @property
    def ready(self) -> bool:
        return self._table.ready and self._chooser.serves(self._longest)

    @property
    def revisions(self) -> list[str]:
        """Of the models that replicas have loaded: several while a new one takes over."""
        return sorted({report.get("revision", "") for report in self._table.reports().values()} - {""})

    @property
    def most_characters(self) -> int:
        """Of a text; what comes after them is never read."""
        return self._longest * CHARACTERS_PER_TOKEN

    async def tokens(self, text: Text) -> int:
        """How many tokens of `text` are read, if it is cut where it is too long."""
        encoding, _ = await self._encode(self._tokenizer, parts(cut(text, self.most_characters)))
        return min(len(encoding), self._longest)

    @property
    def down(self) -> bool:
        """No replica holds any runtime now."""
        return not self._chooser.serves(1)

    async def read(
        self,
        text: Input,
        slo_s: float | None,
        slack_share: float = 1.0,
        importance_request: ImportanceRequest | None = None,
        within_s: float | None = None,
        truncate: bool | None = None,
        stops: tuple[Stop, ...] = (),
    ) -> Reading:
        """What a replica says of `text` within `slo_s` seconds; None: however late.

        `importance_request` asks for the importance of its tokens, too. A caller that can do without an answer waits
        for it no longer than `within_s`, and not at all for replicas that are not there. `truncate` says whether a text
        that is too long is cut; None: as configured. It may leave the model at `stops`. Raises RequestError; its fault
        is TIMED_OUT when the time was too short, and DOWN when no replica is there.
        """
        started = time.monotonic()
        timeout_s = max(self._config.timeout_s, slo_s or 0.0) if within_s is None else within_s
        with counted(self._recorder):
            tokens = await self._tokenize(text, self._config.truncate if truncate is None else truncate)
            length = len(tokens.ids)
            self._recorder.arrived(length)
            errand = TextErrand(
                self.name,
                tokens.ids.tobytes(),
                length,
                started,
                slo_s,
                slack_share,
                importance_request,
                timeout_s,
                within_s is None,
                tokens.types,
                stops,
            )
            try:
                with current().spending(length):
                    answer, interrupted = await self._caller.answer(errand)
            except RequestError as error:
                if error.outcome is Outcome.SHED and slack_share == 1:
                    self._recorder.shed()
                raise
        seconds = time.monotonic() - started
        self._recorder.answered(seconds, self._config.slo_ms / 1e3 if slo_s is None else slo_s, length, answer)
        received = np.frombuffer(answer.importance, dtype="<f4") if answer.importance else None
        logits = np.frombuffer(answer.logits, dtype="<f4")
        earlier = np.frombuffer(answer.earlier, dtype="<f4").reshape(-1, len(logits)) if answer.earlier else ()
        return Reading(
            logits,
            received,
            tokens.encoding,
            seconds,
            answer.importance_s,
            answer.compute_s,
            errand.waited_s,
            tokens.warning,
            interrupted,
            length,
            answer.revision,
            tuple(earlier),
            answer.earlier_s,
        )

    async def ask(self, text: Input, priority: Priority, truncate: bool | None = None) -> Reading:
        """`read` as a client wants it, as far as its tenant may."""
        account = current()
        slo_ms = account.slo_ms(priority.slo_ms or self._config.slo_ms)
        return await self.read(text, slo_ms / 1e3, account.utility(priority.utility), truncate=truncate)

    async def _tokenize(self, text: Input, truncate: bool) -> _Tokens:
        if isinstance(text, TokenIds):
            return self._check(text, truncate)
        both = parts(text)
        characters = sum(map(len, both))
        if characters > self.most_characters and not truncate:
            raise _too_long(f"text of {characters} characters; {self.name} takes at most {self._longest} tokens")
        begun = [part[: self.most_characters] for part in both]
        encoding, read = await self._encode(self._tokenizer, begun)
        if not len(encoding):
            raise RequestError(Outcome.REJECTED, "a text has no tokens; send at least one word")
        whole = read == characters
        if len(encoding) <= self._longest and whole:
            return self._tokens(encoding, None)
        count = f"{len(encoding)}" if whole else f"more than {len(encoding)}"
        if not truncate:
            raise _too_long(f"text of {count} tokens; {self.name} takes at most {self._longest}")
        if len(begun) == 1:
            begun = [begun[0][:read]]
        rest, _ = await self._encode(self._cutter, begun)
        return self._tokens(rest, f"text cut to the first {len(rest)} of {count} tokens")

    async def _encode(self, tokenizer: Tokenizer, given: Sequence[str]) -> tuple[Encoding, int]:
        """Tokens of a text, or of two together, and of how many of all characters they are."""
        if len(given) == 1:
            return await tokenize(tokenizer, given[0], self._longest, offsets=True)
        return await tokenize_pair(tokenizer, given[0], given[1], self._longest)

    def _tokens(self, encoding: Encoding, warning: str | None) -> _Tokens:
        types = types_of(encoding) if self.info.pairs else b""
        return _Tokens(np.array(encoding.ids, "<i4"), types, encoding, warning)

    def _check(self, text: TokenIds, truncate: bool) -> _Tokens:
        if not text.ids:
            raise RequestError(Outcome.REJECTED, "a text has no tokens; send at least one")
        low, high, last = min(text.ids), max(text.ids), self.info.vocabulary - 1
        if low < 0 or high > last:
            raise RequestError(Outcome.REJECTED, f"token ids of {self.name} are 0 to {last}; got {low} to {high}")
        warning = None
        if len(text.ids) > self._longest:
            if not truncate:
                raise _too_long(f"text of {len(text.ids)} tokens; {self.name} takes at most {self._longest}")
            warning = f"text cut to the first {self._longest} of {len(text.ids)} tokens"
        return _Tokens(np.array(text.ids[: self._longest], "<i4"), b"", None, warning)


def _too_long(reason: str) -> RequestError:
    return RequestError(Outcome.REJECTED, reason, fault=Fault.TOO_LONG)
