"""Chat templates: a conversation as the one text that a model was trained to continue.

Templates come with models, from strangers, so they run in jinja2's sandbox. They see what transformers'
`apply_chat_template` shows them. Special tokens are the template's alone: what looks like one in a message, such as an
end of turn with a system prompt of the client's own behind it, is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.errors import ModelError

_MOST_MARKED = 4_096
"""Special tokens in the messages of a conversation."""


class Part(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    as_text: bool
    """It looks like a special token and is none, because a message has it."""


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], control: Collection[str] = ()) -> None:
        """`special_tokens` are what templates know by name, such as bos_token and eos_token; `control` are the texts
        of all those that a tokenizer would find.

        Raises ModelError for a `source` that is no template.
        """
        self._control = re.compile(_any_of(control)) if control else None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is no jinja2 template: {error}; fix or remove it") from None
        self._special_tokens = dict(special_tokens)

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Part]:
        """What `render` makes of these, to be tokenized part by part: one part, if none has a special token.

        Special tokens in what clients send are marked before the template is rendered, by what nobody can foresee.
        Raises RequestError as `render`, and for too many special tokens or what is nested too deeply to look for them.
        """
        try:
            return self._parts(messages, tools, options)
        except RecursionError:
            reason = "messages: what they and the tools say is nested too deeply"
            raise RequestError(Outcome.REJECTED, reason, param="messages") from None

    def _parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> list[Part]:
        control = self._control
        sent = list(texts([messages, tools, options]))
        if control is None or not any(map(control.search, sent)):
            return [Part(self.render(messages, tools, options), as_text=False)]
        found = chain.from_iterable(map(control.finditer, sent))
        if next(islice(found, _MOST_MARKED, None), None):
            reason = f"messages: have more than {_MOST_MARKED} texts of special tokens"
            raise RequestError(Outcome.REJECTED, reason, param="messages")
        nonce = secrets.token_hex(8)
        begin, end = f"\ue000{nonce}", f"\ue001{nonce}"

        def mark(text: str) -> str:
            return control.sub(rf"{begin}\g<0>{end}", text)

        marked = [{**_changed(message, mark), "role": message["role"]} for message in messages]
        rendered = self.render(marked, _changed(tools, mark), _changed(options, mark))
        return list(_split(rendered, begin, end, control))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages` up to where the assistant's answer begins; it may call `tools`. What templates know
        beside these is in `options`.

        Raises RequestError with the template's own reason when the conversation does not suit it.
        """
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(options or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except TemplateError as error:
            raise RequestError(
                Outcome.REJECTED, f"messages: the model's chat template says: {error}", param="messages"
            ) from None
        except Exception as error:
            reason = f"messages: the model's chat template fails on them: {type(error).__name__}: {error}"
            raise RequestError(Outcome.REJECTED, reason, param="messages") from error


def texts(value: Any) -> Iterator[str]:
    """All texts within `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts(each)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with all texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(each, change) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_changed(each, change) for each in value]
    return value


def _split(text: str, begin: str, end: str, control: re.Pattern[str]) -> Iterator[Part]:
    """The parts of `text` in which special tokens are marked; a template may have cut a mark off from its other."""
    at = 0
    for marked in re.finditer(f"{begin}({control.pattern}){end}", text):
        yield from _unmarked(text[at : marked.start()], begin, end)
        yield Part(marked[1], as_text=True)
        at = marked.end()
    yield from _unmarked(text[at:], begin, end)


def _unmarked(text: str, begin: str, end: str) -> Iterator[Part]:
    if text := text.replace(begin, "").replace(end, ""):
        yield Part(text, as_text=False)


def _any_of(texts: Collection[str]) -> str:
    """A pattern of the longest of `texts` that matches, which takes no longer the more there are."""
    by_first: dict[str, list[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text[1:])
    ways = [re.escape(first) + _any_of(rest) for first, rest in by_first.items()]
    if len(ways) == 1 and "" not in texts:
        return ways[0]
    return f"(?:{'|'.join(ways)})" + "?" * ("" in texts) if ways else ""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; they are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(style)


def _to_json(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    """Unlike jinja2's own, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)
