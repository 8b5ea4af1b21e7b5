"""Chat templates: a conversation as the one text that a model was trained to continue.

Templates come with models, from strangers, so they run in jinja2's sandbox. They see what transformers'
`apply_chat_template` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.errors import ModelError


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are what templates know by name, such as bos_token and eos_token.

        Raises ModelError for a `source` that is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is no jinja2 template: {error}; mend or remove it") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of `messages` up to where the assistant's answer begins.

        Raises RequestError with the template's own reason when the conversation does not suit it.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        except TemplateError as error:
            raise RequestError(
                Outcome.REJECTED, f"messages: the model's chat template says: {error}", param="messages"
            ) from None
        except Exception as error:
            reason = f"messages: the model's chat template fails on them: {type(error).__name__}: {error}"
            raise RequestError(Outcome.REJECTED, reason, param="messages") from error


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
