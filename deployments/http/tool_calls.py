"""Calls of tools in the text of an answer, found while it comes, and the grammars that make a model call.

Models write calls in forms of their own: Hermes and Qwen as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
within text, Llama 3 as an answer that is `{"name": …, "parameters": {…}}` and nothing else, Mistral as one that is a
list of calls. A model that is made to call one writes a list, too, whatever its own form, and of a named tool the
arguments alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from pliant.deployments.http.grammars import Json, bound_call, json_schema, rules
from pliant.deployments.http.openai_messages import Function, ToolRequest
from pliant.deployments.http.reasoning import undecided
from pliant.deployments.serving.outcome import Outcome, RequestError

ToolForm = Literal["hermes", "llama3_json", "mistral"]

_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_BETWEEN = " \n\t[],;"
"""What calls of a list may have around them."""
_BEGIN, _END = "<tool_call>", "</tool_call>"
_MARKS: dict[str, ToolForm] = {_BEGIN: "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}


def form_of(template: str) -> ToolForm | None:
    """How a model writes calls whose chat template this is, None if that does not show."""
    return next((form for mark, form in _MARKS.items() if mark in template), None)


class CallDelta(NamedTuple):
    """What is new of one call of an answer; its name comes first, and once."""

    number: int
    """Counts the calls of the answer, from 0."""
    name: str | None
    arguments: str


class Delta(NamedTuple):
    """What is new of an answer."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolParser(Protocol):
    """Tells calls and other text of one answer apart."""

    def push(self, text: str, ends: bool) -> Delta:
        """What is new with `text`; nothing comes after it if the answer `ends` with it."""


def parser(call: ToolRequest, form: ToolForm | None) -> ToolParser | None:
    """Of each answer to `call`; None for answers that are text alone. Raises RequestError."""
    most = 1 if call.parallel_tool_calls is False else None
    if call.named:
        return _Named(call.named)
    if call.tool_choice == "required":
        return _Calls("[", most)
    if not call.usable:
        return None
    if form is None:
        reason = (
            "tools: the model's chat template does not show how it writes calls; set tool_parser of the service, or "
            'send tool_choice: "required" or a named one'
        )
        raise RequestError(Outcome.REJECTED, reason, param="tools")
    return _Tagged(most) if form == "hermes" else _Calls("{" if form == "llama3_json" else "[", most)


def grammar(call: ToolRequest, form: ToolForm | None) -> str | None:
    """What answers to `call` are bound to, None for nothing. May take a while. Raises RequestError."""
    for index, tool in enumerate(call.tools or ()):
        json_schema(_schema(tool.function), f"tools[{index}].function.parameters")
    tools = call.usable
    if call.named:
        return json_schema(_schema(tools[0]), "tools")
    if call.tool_choice == "required":
        more = "" if call.parallel_tool_calls is False else ' (", " call)*'
        return rules(f'start: "[" call{more} "]"\n{_rules(tools)}', "tools")
    if form == "hermes" and any(tool.strict for tool in tools):
        text = r"TEXT: /(.|\n)*/"
        begin, end = (json.dumps(part) for part in (f"{_BEGIN}\n", f"\n{_END}"))
        return rules(f"start: (begin call {end})* TEXT\nbegin[lazy]: TEXT {begin}\n{text}\n{_rules(tools)}", "tools")
    return None


def _rules(tools: Sequence[Function]) -> str:
    """How Lark writes a call of one of them."""
    return "call: " + " | ".join(bound_call(tool.name, _schema(tool)) for tool in tools)


def _schema(tool: Function) -> Json:
    return tool.parameters or {"type": "object"}


class _Named:
    """All text is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str, ends: bool) -> Delta:
        name, self._name = self._name, None
        return Delta(calls=(CallDelta(0, name, text),)) if name or text else Delta()


class _Calls:
    """An answer that begins with `opening` is calls, one after another; any other is text."""

    def __init__(self, opening: str, most: int | None) -> None:
        self._opening = opening
        self._most = most
        self._calls = 0
        self._call: _Call | None = None
        self._held = self._begun = ""
        self._is_text = False

    def push(self, text: str, ends: bool) -> Delta:
        if self._is_text:
            return Delta(text)
        self._held += text
        if not (self._calls or (self._call and self._call.begun)):
            self._begun += text
            opening = self._begun.lstrip()
            if opening and not opening.startswith(self._opening):
                self._is_text = True
                return Delta(self._begun)
        deltas: list[CallDelta] = []
        while self._call or self._held.lstrip(_BETWEEN):
            self._call = self._call or _Call(self._calls)
            self._held = self._held if self._call.begun else self._held.lstrip(_BETWEEN)
            delta, self._held = self._call.push(self._held)
            if delta and (self._most is None or self._calls < self._most):
                deltas.append(delta)
            if not self._call.over:
                break
            self._call = None
            self._calls += 1
        if ends and not (self._calls or (self._call and self._call.begun)):
            return Delta(self._begun)
        return Delta(calls=tuple(deltas))


class _Tagged:
    """Calls between tags, and text around them, without the space beside a call."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._calls = 0
        self._call: _Call | None = None
        self._held = ""

    def push(self, text: str, ends: bool) -> Delta:
        self._held += text
        content, deltas = "", list[CallDelta]()
        while True:
            if self._call is None:
                before, tag, behind = self._held.partition(_BEGIN)
                if not tag:
                    kept = 0 if ends else undecided(before, _BEGIN)
                    cut = len(before) - kept
                    content += before[:cut]
                    self._held = before[cut:]
                    break
                content += before.rstrip()
                self._call, self._held = _Call(self._calls), behind
            delta, self._held = self._call.push(self._held)
            if delta and (self._most is None or self._calls < self._most):
                deltas.append(delta)
            if not self._call.over:
                if ends and not self._call.begun:
                    content += _BEGIN + self._held
                break
            behind = self._held.lstrip()
            if not (behind.startswith(_END) or ends):
                break
            self._held = behind.removeprefix(_END)
            self._call = None
            self._calls += 1
        return Delta(content, tuple(deltas))


class _Call:
    """One call as its JSON comes: arguments are passed on at once where they come last, else with the end of it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._depth = 0
        self._quoted = self._escaped = False
        self.begun = False
        """Whether its name was sent."""
        self._closing = False
        """Whether the arguments are over, so that what is left is other keys."""
        self.over = False

    def push(self, text: str) -> tuple[CallDelta | None, str]:
        """What is new, and what of `text` is to be pushed again with more."""
        name, arguments = None, ""
        if not (self.begun or self.over):
            head = _HEAD.match(text)
            if not head:
                return self._whole(text)
            name, text, self.begun = str(json.loads(head[1])), text[head.end() :], True
        if not (self._closing or self.over):
            size = self._to_end(text)
            arguments, text = text[:size], text[size:]
            if not self._depth:
                self._closing, self._depth = True, 1
        if self._closing and not self.over:
            text = text[self._to_end(text) :]
            self.over = not self._depth
        return (CallDelta(self._number, name, arguments) if name or arguments else None), text

    def _to_end(self, text: str) -> int:
        """How many characters of `text` belong to the value that it is within, or begins with."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return len(text)

    def _whole(self, text: str) -> tuple[CallDelta | None, str]:
        """A call whose keys are in another order."""
        if "}" not in text:
            return None, text
        bare = text.lstrip()
        try:
            found, size = json.JSONDecoder().raw_decode(bare)
        except (ValueError, RecursionError):
            return None, text
        if not (isinstance(found, dict) and isinstance(found.get("name"), str)):
            return None, text
        arguments = found.get("arguments", found.get("parameters", {}))
        self.begun = self.over = True
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return CallDelta(self._number, found["name"], written), bare[size:]
