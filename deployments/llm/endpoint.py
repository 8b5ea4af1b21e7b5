"""One language model as the gateway sees it: tokenize, send to a replica, and carry the answer through failures.

Plain asyncio, without Ray.

A replica that dies takes its keys and values with it, but not the answer: the gateway has every token that the client
has, so another replica goes on from the prompt and these. It says what the first would have said, greedy or sampled,
because a token's random number depends on the seed and the token's index in the answer only (Flover leaves fault
tolerance to the server around it).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from pliant.config.llm import LlmConfig
from pliant.deployments.http.chat_template import ChatTemplate, texts
from pliant.deployments.http.reasoning import ReasoningParser, begun, thinks
from pliant.deployments.http.tool_calls import ToolForm, form_of
from pliant.deployments.llm.chooser import Prompted
from pliant.deployments.llm.errand import AnswerErrand
from pliant.deployments.llm.fingerprint import fingerprint
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.token_texts import TokenTexts
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, counted
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import current
from pliant.deployments.serving.tokenizing import CHARACTERS_PER_TOKEN, tokenize
from pliant.models.sources import DecoderInfo

_LONG_CHAT = 1_024
"""Characters from which on a conversation is rendered in a thread, so that the event loop stays responsive."""
_MANY_MESSAGES = 16
"""The same, of messages."""
_TAG_TOKENS = 16
"""At the end of a prompt: they have the tag in them with which a thought begins, if one is there."""


class LlmRecorder(Recorder, Protocol):
    """Where a language model records what happened to an answer."""

    def arrived(self, prompt_tokens: int) -> None:
        """A request with so long a prompt came."""

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        """It took `seconds` in all, and `first_s` to its first token. `rank` is its adapter's, 0 without one."""


class LanguageModel:
    """Answers prompts, with adapters or without. Each answer is sent by itself, to the replica that the table says."""

    def __init__(
        self,
        name: str,
        config: LlmConfig,
        folder: Path,
        info: DecoderInfo,
        table: ReplicaTable[Prompted, ReplicaReport],
        caller: Caller[Prompted, Generation, Piece],
        recorder: LlmRecorder,
    ) -> None:
        self.name = name
        self.root = config.model
        self.created = int(time.time())
        self.fingerprint = fingerprint(config, folder)
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
        self._caller = caller
        self._recorder = recorder
        self._as_text = _as_text(self.tokenizer)
        self.tool_form: ToolForm | None = config.tool_parser or form_of(info.chat_template or "")
        """How the model writes calls of tools, None if that is not known."""
        self._thinks = config.reasoning_parser == "think" or (
            config.reasoning_parser is None and thinks(info.chat_template or "")
        )
        self._template = (
            ChatTemplate(info.chat_template, info.special_tokens, self._as_text) if info.chat_template else None
        )

    @property
    def ready(self) -> bool:
        return self._table.ready

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        reported = [report["max_length"] for report in self._table.reports().values()]
        return min(reported, default=min(self._config.max_length or self._model_takes, self._model_takes))

    def text(self, prompt: str | Sequence[int]) -> str:
        """A prompt as a client reads it."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt, skip_special_tokens=False))

    async def encode(self, prompt: str | Sequence[int], special: bool = True) -> tuple[int, ...]:
        """The tokens of a text, by default with those that the tokenizer adds, or of token ids. Raises RequestError."""
        ids = tuple(await self._tokenize(prompt, special) if isinstance(prompt, str) else prompt)
        if not ids:
            raise RequestError(Outcome.REJECTED, "prompt: has no tokens; send at least one", param="prompt")
        self.check_tokens(ids, "prompt")
        return ids

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError that names `param` unless there are all these tokens."""
        wrong = next((id for id in ids if not 0 <= id < self._vocabulary), None)
        if wrong is not None:
            reason = f"{param}: has token {wrong}; {self.name} has tokens 0 to {self._vocabulary - 1}"
            raise RequestError(Outcome.REJECTED, reason, param=param)

    def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of `words`, as they begin a text and as they come behind a space; without those that no answer
        has, as the tokenizer has more tokens than the model."""
        ways = [way for word in words for way in (word, f" {word.lstrip()}")]
        found = (self.tokenizer.encode(way, add_special_tokens=False).ids for way in ways)
        return list(dict.fromkeys(tuple(ids) for ids in found if ids and max(ids) < self._vocabulary))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a conversation, with the `tools` that may be called and the `options` of the model's chat
        template, up to where the answer begins. Raises RequestError.
        """
        if self._template is None:
            reason = f"{self.name} has no chat template; send a prompt to /v1/completions"
            raise RequestError(Outcome.REJECTED, reason, param="messages")
        length = sum(map(len, texts([messages, tools])))
        self._check_characters(length)
        if length > _LONG_CHAT or len(messages) > _MANY_MESSAGES or tools or options:
            parts = await asyncio.to_thread(self._template.parts, messages, tools, options)
        else:
            parts = self._template.parts(messages)
        ids: list[int] = []
        for part in parts:
            ids += self._as_text[part.text] if part.as_text else await self._tokenize(part.text, special=False)
        if not ids:
            reason = "messages: the model's chat template makes no text of them"
            raise RequestError(Outcome.REJECTED, reason, param="messages")
        self.check_tokens(ids, "messages")
        return tuple(ids)

    def reasoning(self, prompt: Sequence[int], choices: int) -> list[ReasoningParser]:
        """What tells reasoning and content of each answer to `prompt` apart; nothing if the model does not think."""
        if not self._thinks:
            return []
        within = begun(self.text(prompt[-_TAG_TOKENS:]))
        return [ReasoningParser(within) for _ in range(choices)]

    async def _tokenize(self, text: str, special: bool = True) -> Sequence[int]:
        self._check_characters(len(text))
        most = self.max_length
        encoding, read = await tokenize(self.tokenizer, text, most, special)
        if read < len(text):
            raise self._too_long(f"a prompt of more than {most} tokens")
        return encoding.ids

    def _check_characters(self, length: int) -> None:
        if length > self.max_length * CHARACTERS_PER_TOKEN:
            raise self._too_long(f"a prompt of {length} characters")

    def tokens_for(self, prompt: Sequence[int], wanted: int | None) -> int:
        """How long the answer to `prompt` may be: as `wanted`, or else what fits and is usual.

        Raises RequestError.
        """
        room = self.max_length - len(prompt)
        if room < 1:
            raise self._too_long(f"a prompt of {len(prompt)} tokens")
        if wanted is None:
            return min(self._config.max_tokens or room, room)
        if wanted > room:
            raise self._too_long(f"a prompt of {len(prompt)} tokens and an answer of up to {wanted}")
        return wanted

    def _too_long(self, given: str) -> RequestError:
        reason = f"{given}; {self.name} takes at most {self.max_length} tokens, prompt and answer together"
        return RequestError(Outcome.REJECTED, reason, fault=Fault.CONTEXT_LENGTH)

    async def answer(self, generation: Generation, spent_s: float = 0.0) -> AsyncGenerator[Piece, None]:
        """The pieces of one answer, the last of which says how it finished; its request came `spent_s` seconds ago.

        Raises RequestError, perhaps after some pieces. To close it ends the generation at once.
        """
        started = time.monotonic()
        first_s = 0.0
        count = 0
        adapter = generation.adapter
        subject = f"{adapter.name} ({self.name})" if adapter else self.name
        config = self._config
        slo_s, timeout_s = (max(0.0, within_s - spent_s) for within_s in (config.slo_ms / 1e3, config.timeout_s))
        errand = AnswerErrand(generation, subject, slo_s, timeout_s, config.share_prefixes)
        account = current()
        self._recorder.arrived(len(generation.prompt))
        with counted(self._recorder), account.spending(len(generation.prompt)) as spending:
            async with aclosing(self._caller.stream(errand)) as pieces:
                async for piece in pieces:
                    first_s = first_s or time.monotonic() - started
                    spending.begun = True
                    count += len(piece.tokens)
                    account.spend(len(piece.tokens))
                    yield piece
        rank = adapter.rank if adapter else 0
        self._recorder.answered(time.monotonic() - started, first_s, len(generation.prompt), count, rank)


def _as_text(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """What the texts of special tokens are made of where they are only texts."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    tokenizer.encode_special_tokens = True
    try:
        return {text: tokenizer.encode(text, add_special_tokens=False).ids for text in special}
    finally:
        tokenizer.encode_special_tokens = False
