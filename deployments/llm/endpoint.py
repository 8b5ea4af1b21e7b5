"""One language model as the gateway sees it: tokenize, send to a replica, and carry the answer through failures.

Plain asyncio, without Ray: `call` sends a Ticket to a replica and yields what comes back.

A replica that dies takes its keys and values with it, but not the answer: the gateway has every token that the client
has, so another replica goes on from the prompt and these. It says what the first would have said, greedy or sampled,
because a token's random number depends on the seed and the token's index in the answer only (Flover leaves fault
tolerance to the server around it).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from pliant import __version__
from pliant.config.cluster import LlmConfig
from pliant.deployments.http.chat_template import ChatTemplate
from pliant.deployments.llm.messages import Refusal, Ticket
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.routing_table import LlmRoutingTable
from pliant.deployments.llm.token_texts import TokenTexts
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.models.sources import DecoderInfo
from pliant.policies.cluster.live_tokens import NoReplicaError

_LONG_TEXT = 4_000
"""Characters from which on a text is tokenized in a thread, so that the event loop stays responsive."""
_CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this per token of the longest prompt is too long without looking closer."""
_RETRY_S = 0.05
_MOST_LOST = 3
"""Replicas that may die under one answer before it is suspected of killing them."""
_MOST_REFUSED = 3

Call = Callable[[Ticket], AsyncGenerator[Piece | Refusal, None]]


class LlmRecorder(Recorder, Protocol):
    """Where a language model records what happened to an answer."""

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        """It took `seconds` in all, and `first_s` to its first token. `rank` is its adapter's, 0 without one."""


@dataclass
class _Course:
    """How far one answer has come."""

    model: str
    """What computes it, in words."""
    moved: float
    """When it last got on."""
    deadline: float | None
    """When its first token is wanted; None once that no longer counts."""
    received: list[int] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    """Replicas that were tried."""
    refusals: list[tuple[float, str]] = field(default_factory=list)
    """When to come back, and why."""
    lost: int = 0
    unloadable: list[Refusal] = field(default_factory=list)
    """By replicas that could not load its adapter."""

    def rest(self, generation: Generation) -> Generation:
        """What is left to do of `generation`."""
        within_s = None
        if self.deadline is not None and not self.received:
            within_s = max(0.0, self.deadline - time.monotonic())
        return generation._replace(generated=tuple(self.received), first_token_within_s=within_s)

    def refused(self, refusal: Refusal) -> None:
        """Raises RequestError when others need not be asked."""
        if refusal.kind == "busy":
            self.refusals.append((refusal.retry_after_s or 0.0, refusal.reason))
        elif refusal.kind in ("adapter", "adapter_too_large"):
            self.unloadable.append(refusal)
            if len(self.unloadable) == _MOST_REFUSED:
                raise self.given_up()
        elif not self.received:
            raise RequestError(Outcome.REJECTED, refusal.reason, fault=Fault.CONTEXT_LENGTH)

    def given_up(self) -> RequestError:
        """What to tell the client when enough replicas have refused."""
        if self.refusals:
            retry_after_s, reason = min(self.refusals)
            return RequestError(Outcome.SHED, f"{self.model} is too busy: {reason}; retry later", retry_after_s)
        reason = self.unloadable[-1].reason
        if all(refusal.kind == "adapter_too_large" for refusal in self.unloadable):
            return RequestError(Outcome.REJECTED, reason, fault=Fault.ADAPTER_TOO_LARGE, param="model")
        return RequestError(Outcome.UNAVAILABLE, reason, fault=Fault.ADAPTER_NOT_LOADABLE, param="model")


class LanguageModel:
    """Answers prompts, with adapters or without. Each answer is sent by itself, to the replica that the table says."""

    def __init__(
        self,
        name: str,
        config: LlmConfig,
        folder: Path,
        info: DecoderInfo,
        table: LlmRoutingTable,
        call: Call,
        recorder: LlmRecorder,
    ) -> None:
        self.name = name
        self.root = config.model
        self.created = int(time.time())
        identity = f"{__version__} {config.model} {config.dtype}"
        self.fingerprint = f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
        """Changes when the same seed may give another answer."""
        self.defaults = info.sampling
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.token_texts = TokenTexts(self.tokenizer)
        self._vocabulary = info.vocabulary
        self._config = config
        self._model_takes = info.max_length
        self._table = table
        self._call = call
        self._recorder = recorder
        self._template = ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None

    @property
    def ready(self) -> bool:
        return self._table.ready

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._table.max_length or min(self._config.max_length or self._model_takes, self._model_takes)

    def text(self, prompt: str | Sequence[int]) -> str:
        """A prompt as a client reads it."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt, skip_special_tokens=False))

    async def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a text, with those that the tokenizer adds, or of token ids. Raises RequestError."""
        ids = await self._tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        if not ids:
            raise RequestError(Outcome.REJECTED, "prompt: has no tokens; send at least one", param="prompt")
        if (highest := max(ids)) >= self._vocabulary:
            reason = f"prompt: has token {highest}; {self.name} has tokens 0 to {self._vocabulary - 1}"
            raise RequestError(Outcome.REJECTED, reason, param="prompt")
        return ids

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the answer begins. Raises RequestError."""
        if self._template is None:
            raise RequestError(
                Outcome.REJECTED,
                f"{self.name} has no chat template; send a prompt to /v1/completions",
                param="messages",
            )
        if sum(len(message["content"]) for message in messages) > _LONG_TEXT:
            text = await asyncio.to_thread(self._template.render, messages)
        else:
            text = self._template.render(messages)
        if ids := await self._tokenize(text, add_special_tokens=False):
            return ids
        raise RequestError(
            Outcome.REJECTED, "messages: the model's chat template makes no text of them", param="messages"
        )

    async def _tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        if len(text) > self.max_length * _CHARACTERS_PER_TOKEN:
            raise self._too_long(f"a prompt of {len(text)} characters")
        if len(text) <= _LONG_TEXT:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        encoding = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def tokens_for(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How long the answer to `prompt` may be: as `wanted`, or else what is usual and fits.

        Raises RequestError.
        """
        room = self.max_length - len(prompt)
        if room < 1:
            raise self._too_long(f"a prompt of {len(prompt)} tokens")
        if wanted is None:
            return min(self._config.max_tokens, room)
        if wanted > room:
            raise self._too_long(f"a prompt of {len(prompt)} tokens and an answer of up to {wanted}")
        return wanted

    def _too_long(self, given: str) -> RequestError:
        reason = f"{given}; {self.name} takes at most {self.max_length} tokens, prompt and answer together"
        return RequestError(Outcome.REJECTED, reason, fault=Fault.CONTEXT_LENGTH)

    async def answer(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """The pieces of one answer, the last of which says how it finished.

        Raises RequestError, perhaps after some pieces. To close it ends the generation at once.
        """
        started = time.monotonic()
        first_s = 0.0
        count = 0
        with counted(self._recorder):
            async with aclosing(self._pieces(generation, started)) as pieces:
                async for piece in pieces:
                    first_s = first_s or time.monotonic() - started
                    count += len(piece.tokens)
                    yield piece
        rank = generation.adapter.rank if generation.adapter else 0
        self._recorder.answered(time.monotonic() - started, first_s, len(generation.prompt), count, rank)

    async def _pieces(self, generation: Generation, started: float) -> AsyncGenerator[Piece, None]:
        """Send until answered. Once a replica failed us the SLO no longer counts: late is better than never."""
        adapter = generation.adapter and generation.adapter.name
        model = f"{adapter} ({self.name})" if adapter else self.name
        course = _Course(model, started, started + self._config.slo_ms / 1e3)
        size = len(generation.prompt) + generation.max_tokens
        while True:
            replica = await self._choose(size, adapter, course)
            ticket = Ticket(replica, self._table.gateway, course.rest(generation))
            try:
                async with aclosing(self._call(ticket)) as items:
                    while not isinstance(item := await self._next(items, course), Refusal):
                        course.received += item.tokens
                        yield item
                        if item.finish:
                            return
                        course.moved = time.monotonic()  # only now: a client that reads slowly is no standstill
                course.refused(item)
                self._recorder.retried("busy" if item.kind == "busy" else "moved")
            except (NotDeployedError, ReplicaLeftError):
                course.deadline = None
                self._recorder.retried("moved")
            except (ReplicaLostError, StopAsyncIteration):
                course.deadline = None
                course.lost += 1
                if course.lost == _MOST_LOST:
                    reason = f"{course.lost} replicas of {model} died while they computed this"
                    raise RequestError(Outcome.UNAVAILABLE, reason) from None
                self._recorder.retried("lost")
            finally:
                self._table.done(replica, size)

    async def _choose(self, size: int, adapter: str | None, course: _Course) -> str:
        """A replica that has not failed or refused this answer lately, waited for if that makes sense."""
        while len(course.refusals) < _MOST_REFUSED or course.received:
            try:
                replica = self._table.choose(size, course.avoid, adapter)
            except NoReplicaError:
                if (course.refusals or course.unloadable) and not course.received:
                    break
                course.avoid.clear()
                course.deadline = None
                self._left_s(course)
                await asyncio.sleep(_RETRY_S)
            else:
                course.avoid.add(replica)
                return replica
        raise course.given_up()

    async def _next(self, items: AsyncGenerator[Piece | Refusal, None], course: _Course) -> Piece | Refusal:
        try:
            async with asyncio.timeout(self._left_s(course)):
                return await anext(items)
        except TimeoutError:
            raise self._standstill(course) from None

    def _left_s(self, course: _Course) -> float:
        """Seconds until the answer has stood still for too long. Raises RequestError when it has."""
        left_s = course.moved + self._config.timeout_s - time.monotonic()
        if left_s <= 0:
            raise self._standstill(course)
        return left_s

    def _standstill(self, course: _Course) -> RequestError:
        what = "went on with this answer" if course.received else "answered"
        return RequestError(
            Outcome.UNAVAILABLE, f"no replica of {course.model} {what} within {self._config.timeout_s:g} s", 1
        )
