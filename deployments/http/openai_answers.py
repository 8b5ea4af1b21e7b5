"""Answers in the shapes of OpenAI's two text endpoints, whole or chunk by chunk."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pliant.deployments.http.reasoning import ReasoningParser, Thought
from pliant.deployments.http.tool_calls import CallDelta, ToolParser
from pliant.deployments.llm.request import Piece, TokenLogprobs
from pliant.deployments.llm.token_texts import TokenTexts

Json = dict[str, Any]

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


class Shape(Protocol):
    """What one endpoint calls things. `index` counts the choices of a request."""

    whole: str
    chunk: str

    def choice(self, index: int, answer: Piece) -> Json:
        """A choice of a whole answer."""

    def opening(self, index: int) -> Json | None:
        """What a streamed choice begins with, before its first piece."""

    def part(self, index: int, piece: Piece) -> Json:
        """A piece of a streamed choice; pieces of a choice come in order."""


class Echo(NamedTuple):
    """What a choice begins with."""

    text: str
    first: int
    """The prompt's first token, of which nobody knows how likely it is."""


class CompletionShape:
    """Of /v1/completions. `echo` has what each choice begins with, if that was asked for; with `logprobs` alternatives
    to each token it waits for its own log probabilities. `prompt_logprobs` is as in the request.
    """

    whole = chunk = "text_completion"

    def __init__(
        self,
        texts: TokenTexts,
        echo: Sequence[Echo] | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._texts = texts
        self._echo = echo if logprobs is None else None
        self._scored_echo = echo if logprobs is not None else None
        self._alternatives = logprobs
        self._prompt_alternatives = prompt_logprobs
        self._offsets: dict[int, _Offsets] = {}

    def choice(self, index: int, answer: Piece) -> Json:
        choice = self.part(index, answer)
        if self._prompt_alternatives is not None and answer.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, answer.prompt_logprobs, self._prompt_alternatives)
        return {**choice, "text": self._echo[index].text + choice["text"]} if self._echo else choice

    def opening(self, index: int) -> Json | None:
        return self.part(index, Piece((), self._echo[index].text)) if self._echo else None

    def part(self, index: int, piece: Piece) -> Json:
        text, logprobs = piece.text, None
        if piece.logprobs is not None:
            if self._scored_echo and piece.prompt_logprobs is not None:
                echo = self._scored_echo[index]
                text = echo.text + text
                rows = [row.with_top(self._alternatives or 0) for row in piece.prompt_logprobs]
                logprobs = self._logprobs(index, [*rows, *piece.logprobs], echo, 1 + len(rows))
            else:
                logprobs = self._logprobs(index, piece.logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, index: int, rows: Sequence[TokenLogprobs], echo: Echo | None = None, echoed: int = 0) -> Json:
        """Of `rows`, behind the first token of a prompt if there is an `echo`, which has so many tokens."""
        offsets = self._offsets.setdefault(index, _Offsets())
        begins = [] if echo is None else [self._texts[echo.first]]
        nothing = [None] * len(begins)
        texts = [*begins, *(self._texts[row.token] for row in rows)]
        top = [
            {self._texts[token].text: _finite(value) for token, value in zip(row.top_ids, row.top, strict=True)}
            | {self._texts[row.token].text: _finite(row.logprob)}
            for row in rows
        ]
        contents = [text.content for text in texts]
        places = offsets.within(echo.text, contents[:echoed]) if echo else []
        return {
            "tokens": [text.text for text in texts],
            "token_logprobs": [*nothing, *(_finite(row.logprob) for row in rows)],
            "top_logprobs": [*nothing, *top],
            "text_offset": [*places, *map(offsets.next, contents[echoed:])],
        }


def prompt_logprobs(texts: TokenTexts, rows: Sequence[TokenLogprobs], alternatives: int) -> list[Json | None]:
    """As vLLM has them: by place in the prompt, its token and the likeliest by their ids; null for the first."""

    def scored(token: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts[token].text}

    places: list[Json | None] = [None]
    for row in rows:
        top = zip(row.top_ids[:alternatives], row.top, range(1, alternatives + 1), strict=False)
        others = {str(token): scored(token, value, rank) for token, value, rank in top if token != row.token}
        places.append({str(row.token): scored(row.token, row.logprob, row.rank), **others})
    return places


class ChatShape:
    """Of /v1/chat/completions. `parsers` tell calls of tools and text of each choice apart, if tools may be called, and
    `thoughts` reasoning and all else, if the model thinks; `name` is what ids of calls are made of.
    """

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(
        self,
        texts: TokenTexts,
        parsers: Sequence[ToolParser] = (),
        name: str = "",
        thoughts: Sequence[ReasoningParser] = (),
    ) -> None:
        self._texts = texts
        self._parsers = parsers
        self._thoughts = thoughts
        self._name = name
        self._called: set[int] = set()
        """Choices that have called a tool."""

    def choice(self, index: int, answer: Piece) -> Json:
        reasoning, text = self._thought(index, answer.text, ends=True)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._parsers:
            content, calls = self._parsers[index].push(text, ends=True)
            message["content"] = content if content.strip() or not calls else None
            if calls:
                message["tool_calls"] = self._whole_calls(index, calls)
        return {"index": index, "message": message, **self._end(index, answer)}

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> Json:
        delta = Json()
        reasoning, content = self._thought(index, piece.text, piece.finish is not None)
        if reasoning:
            delta["reasoning_content"] = reasoning
        if self._parsers:
            content, calls = self._parsers[index].push(content, piece.finish is not None)
            if calls:
                self._called.add(index)
                delta["tool_calls"] = [self._call(index, call) for call in calls]
        if content:
            delta["content"] = content
        return {"index": index, "delta": delta, **self._end(index, piece)}

    def _thought(self, index: int, text: str, ends: bool) -> Thought:
        return self._thoughts[index].push(text, ends) if self._thoughts else Thought(content=text)

    def _whole_calls(self, index: int, deltas: Sequence[CallDelta]) -> list[Json]:
        self._called.add(index)
        whole: dict[int, Json] = {}
        for delta in deltas:
            call = whole.setdefault(delta.number, self._call(index, delta._replace(arguments="")))
            call["function"]["arguments"] += delta.arguments
        for call in whole.values():
            del call["index"]
        return list(whole.values())

    def _call(self, index: int, call: CallDelta) -> Json:
        if call.name is None:
            return {"index": call.number, "function": {"arguments": call.arguments}}
        # Nine letters and digits: more, and templates of Mistral's refuse the conversation that it is sent back in.
        name = hashlib.sha256(f"{self._name} {index} {call.number}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.number, "id": name, "type": "function", "function": function}

    def _end(self, index: int, piece: Piece) -> Json:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = {"content": [self._token(row) for row in piece.logprobs], "refusal": None}
        calls = piece.finish == "stop" and index in self._called
        return {"logprobs": logprobs, "finish_reason": "tool_calls" if calls else piece.finish}

    def _token(self, row: TokenLogprobs) -> Json:
        top = [self._scored(token, value) for token, value in zip(row.top_ids, row.top, strict=True)]
        return {**self._scored(row.token, row.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> Json:
        text, content = self._texts[token]
        return {"token": text, "logprob": _finite(logprob), "bytes": list(content)}


class _Offsets:
    """Where each token of a text begins, in characters; one that goes on with a character begins after it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def within(self, text: str, contents: Sequence[bytes]) -> list[int]:
        """Of the tokens of a whole prompt, whose `text` may be longer or shorter than their `contents` together: it
        shows special tokens, or has no space before its first word, which some tokenizers put there.
        """
        found = [self.next(content) for content in contents]
        begun = bool(self._decoder.getstate()[0])
        more = len(text) - self._characters - begun
        self._characters += more
        return [0, *(max(0, offset + more) for offset in found[1:])]

    def next(self, content: bytes) -> int:
        offset = self._characters
        self._characters += len(self._decoder.decode(content))
        return offset


class Usage:
    """The tokens of one request: of its prompts, `prompt_tokens` in all, and of `choices` answers to each.

    A prompt's cached tokens are those that no choice had computed. Of an answer that another replica went on with,
    what the first one says counts.
    """

    def __init__(self, prompt_tokens: int, choices: int = 1) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        """Of the answers, so far."""
        self._choices = choices
        self._cached: dict[int, int] = {}
        """By answer: tokens of its prompt."""

    def add(self, index: int, piece: Piece) -> None:
        """Answer number `index` goes on; the choices of one prompt have numbers in a row."""
        self.tokens += len(piece.tokens)
        if piece.cached is not None:
            self._cached.setdefault(index, piece.cached)

    @property
    def cached(self) -> int:
        """Tokens of the prompts that no answer had computed."""
        least: dict[int, int] = {}
        for index, cached in self._cached.items():
            prompt = index // self._choices
            least[prompt] = min(cached, least.get(prompt, cached))
        return sum(least.values())

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
